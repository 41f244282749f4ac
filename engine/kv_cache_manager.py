"""Block tables of the requests, and the prefix cache over them, in the device's memory and the host's.

The scheduler's whole view of memory is ``allocate_slots``: blocks, or None when there are too few. What has to be
copied between the tiers for that, ``take_chunk_copies`` tells, for the step that is planned.
"""

import hashlib
import struct
from collections.abc import Collection, Iterable, Sequence

from .block_pool import Block, BlockPool
from .host_tier import ChunkCopy, HostBlock, HostTier
from .request import Request


def block_key(parent: bytes, token_ids: Sequence[int], salt: str | None) -> bytes:
    """sha256 over the parent's key, the block's token ids and, for a first block, the caller's salt.

    The parent's key stands for everything before, its salt included; ids are fixed-width, so no
    two different splits of the same tokens give the same bytes.
    """
    digest = hashlib.sha256(parent)
    if not parent and salt is not None:
        digest.update(b"salt\x00" + salt.encode())
    digest.update(b"\x01")
    digest.update(struct.pack(f"<{len(token_ids)}q", *token_ids))
    return digest.digest()


class KVCacheManager:
    """Hands blocks to requests, finds cached prefixes, takes blocks back."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        host_tier: HostTier | None = None,
    ) -> None:
        if host_tier is not None and not enable_prefix_caching:
            raise ValueError("a host tier is a part of the prefix cache, which is off")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, enable_caching=enable_prefix_caching)
        self.host_tier = host_tier
        self._chunk_copies: list[ChunkCopy] = []
        """Planned and not yet handed out."""
        self.queries_total = 0
        """Tokens looked up in the prefix cache."""
        self.hits_total = 0
        """Tokens found there, in either tier."""
        self.host_hits_total = 0
        """Of them, those found in host memory alone."""

    @property
    def host_queries_total(self) -> int:
        """Tokens that the device did not have and that were looked up in host memory."""
        return self.queries_total - (self.hits_total - self.host_hits_total) if self.host_tier is not None else 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_cached_blocks(self, request: Request) -> list[Block | HostBlock]:
        """The longest run of leading blocks whose content is still in the pool or in host memory.

        At least one token is always left to compute, or there would be no logits to sample
        from. Requests that need every prompt position computed find nothing (rule R15).
        """
        if not self.pool.enable_caching or request.wants_prompt_logprobs:
            return []
        found: list[Block | HostBlock] = []
        for index in range((request.num_tokens - 1) // self.block_size):
            key = self._key(request, index)
            block: Block | HostBlock | None = self.pool.lookup(key)
            if block is None and self.host_tier is not None:
                block = self.host_tier.lookup(key)
            if block is None:
                break
            found.append(block)
        return found

    def count_lookup(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Counts a lookup that led to an admission, so that a request that waits is counted once."""
        if self.pool.enable_caching:
            self.queries_total += num_tokens
            self.hits_total += num_hit_tokens

    def allocate_slots(
        self, request: Request, num_new_tokens: int, cached: Sequence[Block | HostBlock] = (), headroom: int = 0
    ) -> list[Block] | None:
        """Makes room for ``num_new_tokens`` after the computed ones; the blocks added, or None if there are too few.

        ``cached`` blocks are taken over first (a request being admitted), those in host memory into new blocks.
        ``headroom`` blocks must stay free besides. On None nothing has changed.
        """
        num_computed = len(cached) * self.block_size if cached else request.num_computed_tokens
        on_device = [block for block in cached if isinstance(block, Block)]
        needed = self.blocks_for(num_computed + num_new_tokens) - len(on_device) - len(request.blocks)
        idle_hits = sum(block.ref_count == 0 for block in on_device)
        if max(needed, 0) + idle_hits + headroom > self.pool.num_free:
            return None
        self.pool.hold(on_device)
        new = self._issue(max(needed, 0), {block.chunk for block in cached if isinstance(block, HostBlock)})
        added = self._take_over(request, cached, new) if len(on_device) < len(cached) else [*on_device, *new]
        request.blocks.extend(added)
        return added

    def fork(self, parent: Request, child: Request) -> tuple[Block, Block] | None:
        """Gives ``child`` the parent's prompt: full blocks are shared, a part-filled last one must be copied.

        Returns (source, destination) of that copy; the same block twice when nothing is to be
        copied; None, with nothing changed, when no block is free for it.
        """
        num_full = parent.num_prompt_tokens // self.block_size
        tail = parent.blocks[num_full] if parent.num_prompt_tokens % self.block_size else None
        if tail is not None and self.pool.num_free == 0:
            return None
        shared = parent.blocks[:num_full]
        self.pool.hold(shared)
        child.blocks.extend(shared)
        child.num_computed_tokens = child.num_prompt_tokens
        if tail is None:
            return self.pool.null_block, self.pool.null_block
        (copy,) = self._issue(1)
        child.blocks.append(copy)
        return tail, copy

    def publish(self, request: Request) -> None:
        """Makes the request's full, computed blocks findable. The ids of all computed tokens must be known."""
        if not self.pool.enable_caching:
            return
        assert request.num_computed_tokens <= request.num_tokens, "a block's key needs the ids of all its tokens"
        num_full = request.num_computed_tokens // self.block_size
        for index in range(request.num_published_blocks, num_full):
            self.pool.publish(request.blocks[index], self._key(request, index))
        request.num_published_blocks = max(num_full, request.num_published_blocks)

    def free(self, request: Request) -> None:
        """Takes all blocks back; their content stays findable until they are issued again."""
        self.pool.release(request.blocks)
        request.blocks.clear()
        request.num_published_blocks = 0

    def unpublish(self, keys: Iterable[bytes]) -> None:
        """Forgets what a finished request published under these keys, except where others hold the block."""
        for key in keys:
            block = self.pool.lookup(key)
            if block is not None and block.ref_count == 0:
                self.pool.forget(block)
            if self.host_tier is not None:
                self.host_tier.discard(key)

    def take_chunk_copies(self) -> list[ChunkCopy]:
        """Copies between the tiers, in order, to be dispatched before the step that is being planned."""
        copies, self._chunk_copies = self._chunk_copies, []
        return copies

    def reset_cache(self) -> bool:
        """Forgets the content of both tiers; False (and nothing done) while any block is held."""
        if not self.pool.reset_cache():
            return False
        self._chunk_copies.clear()
        if self.host_tier is not None:
            self.host_tier.clear()
        return True

    def check_integrity(self, requests: Iterable[Request]) -> None:
        self.pool.check_integrity([request.blocks for request in requests])
        if self.host_tier is not None:
            self.host_tier.check_integrity()

    def _issue(self, count: int, keep: Collection[int] = ()) -> list[Block]:
        """Blocks from the pool; what they hold is saved to host memory first, but not in the chunks ``keep``."""
        if self.host_tier is not None and count > 0:
            self._chunk_copies += self.host_tier.save(self.pool.free_blocks(), count, keep)
        return self.pool.allocate(count)

    def _take_over(self, request: Request, cached: Sequence[Block | HostBlock], new: list[Block]) -> list[Block]:
        """The table of a request whose prefix is partly in host memory: that part goes to the first new blocks."""
        assert self.host_tier is not None
        rest, added = iter(new), list[Block]()
        hits: list[tuple[HostBlock, int]] = []
        for index, found in enumerate(cached):
            block = found if isinstance(found, Block) else next(rest)
            if isinstance(found, HostBlock):
                hits.append((found, block.block_id))
                self.pool.publish(block, self._key(request, index))
            added.append(block)
        self._chunk_copies += self.host_tier.restore(hits)
        self.host_hits_total += len(hits) * self.block_size
        return [*added, *rest]

    def _key(self, request: Request, index: int) -> bytes:
        keys, size = request.block_keys, self.block_size
        while len(keys) <= index:
            start = len(keys) * size
            parent = keys[-1] if keys else b""
            keys.append(block_key(parent, request.token_ids[start : start + size], request.source.cache_salt))
        return keys[index]
