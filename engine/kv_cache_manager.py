"""Block tables of the requests, and the prefix cache over them.

The scheduler's whole view of memory is ``allocate_slots``: blocks, or None when there are too few.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from .block_pool import Block, BlockPool
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
    digest.update(np.asarray(token_ids, dtype="<i8").tobytes())
    return digest.digest()


class KVCacheManager:
    """Hands blocks to requests, finds cached prefixes, takes blocks back."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, enable_caching=enable_prefix_caching)
        self.queries_total = 0
        """Tokens looked up in the prefix cache."""
        self.hits_total = 0
        """Tokens found there."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_cached_blocks(self, request: Request) -> list[Block]:
        """The longest run of leading blocks whose content is still in the pool.

        At least one token is always left to compute, or there would be no logits to sample
        from. Requests that need every prompt position computed find nothing (rule R15).
        """
        if not self.pool.enable_caching or request.wants_prompt_logprobs:
            return []
        found: list[Block] = []
        for index in range((request.num_tokens - 1) // self.block_size):
            block = self.pool.lookup(self._key(request, index))
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
        self, request: Request, num_new_tokens: int, cached: Sequence[Block] = (), headroom: int = 0
    ) -> list[Block] | None:
        """Makes room for ``num_new_tokens`` after the computed ones; the blocks added, or None if there are too few.

        ``cached`` blocks are taken over first (a request being admitted). ``headroom`` blocks
        must stay free besides. On None nothing has changed.
        """
        num_computed = len(cached) * self.block_size if cached else request.num_computed_tokens
        needed = self.blocks_for(num_computed + num_new_tokens) - len(cached) - len(request.blocks)
        idle_hits = sum(block.ref_count == 0 for block in cached)
        if max(needed, 0) + idle_hits + headroom > self.pool.num_free:
            return None
        self.pool.hold(cached)
        added = [*cached, *self.pool.allocate(max(needed, 0))]
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
        (copy,) = self.pool.allocate(1)
        child.blocks.append(copy)
        return tail, copy

    def publish(self, request: Request) -> None:
        """Makes the request's full, computed blocks findable."""
        if not self.pool.enable_caching:
            return
        num_full = request.num_computed_tokens // self.block_size
        for index in range(request.num_published_blocks, num_full):
            self.pool.publish(request.blocks[index], self._key(request, index))
        request.num_published_blocks = max(num_full, request.num_published_blocks)

    def free(self, request: Request) -> None:
        """Takes all blocks back; their content stays findable until they are issued again."""
        self.pool.release(request.blocks)
        request.blocks.clear()
        request.num_published_blocks = 0

    def check_integrity(self, requests: Iterable[Request]) -> None:
        self.pool.check_integrity([request.blocks for request in requests])

    def _key(self, request: Request, index: int) -> bytes:
        keys, size = request.block_keys, self.block_size
        while len(keys) <= index:
            start = len(keys) * size
            parent = keys[-1] if keys else b""
            keys.append(block_key(parent, request.token_ids[start : start + size], request.source.cache_salt))
        return keys[index]
