"""The pool of KV blocks: who holds which block, which are free, and which content is still worth finding.

A freed block keeps its content and its key until it is issued again, so free blocks are the
prefix cache; the free queue is in least-recently-used order.
"""

from collections.abc import Iterable, Iterator, Sequence


class Block:
    """One block of the pool; a node of the free queue while nobody holds it."""

    __slots__ = ("block_id", "key", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: bytes | None = None
        """Key of the content, when it is full, computed and findable."""
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, cached={self.key is not None})"


class FreeQueue:
    """Doubly linked list of free blocks: O(1) pop from the front, append, and removal from the middle."""

    def __init__(self) -> None:
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, block: Block) -> None:
        last = self._tail.prev_free
        assert last is not None
        assert block.next_free is None, f"{block} is already in the free queue"
        last.next_free, block.prev_free = block, last
        block.next_free, self._tail.prev_free = self._tail, block
        self._size += 1

    def remove(self, block: Block) -> None:
        before, after = block.prev_free, block.next_free
        assert before is not None, f"{block} is not in the free queue"
        assert after is not None, f"{block} is not in the free queue"
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self._size -= 1

    def pop(self) -> Block:
        """The least recently used block. The queue must not be empty."""
        block = self._head.next_free
        assert block is not None
        assert block is not self._tail, "the free queue is empty"
        self.remove(block)
        return block

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free


class BlockPool:
    """``num_blocks`` blocks; block 0 is the null block: it pads block tables, is never issued and never cached."""

    def __init__(self, num_blocks: int, *, enable_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"{num_blocks=} must be at least 2: block 0 is the null block")
        self.enable_caching = enable_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.ref_count = 1
        self._free = FreeQueue()
        for block in self.blocks[1:]:
            self._free.append(block)
        self._cached: dict[bytes, Block] = {}

    @property
    def num_usable(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be issued now, cached content or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that somebody holds, 0..1."""
        return 1.0 - self.num_free / self.num_usable

    def free_blocks(self) -> Iterator[Block]:
        """Free blocks, those to be issued first. The pool must not change meanwhile."""
        return iter(self._free)

    def allocate(self, count: int) -> list[Block]:
        """Issues ``count`` blocks, least recently used first; their old content is forgotten."""
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        issued = []
        for _ in range(count):
            block = self._free.pop()
            self.forget(block)
            block.ref_count = 1
            issued.append(block)
        return issued

    def lookup(self, key: bytes) -> Block | None:
        return self._cached.get(key)

    def hold(self, blocks: Iterable[Block]) -> None:
        """One more holder for each block; free ones leave the free queue."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """One holder less. Later blocks of a sequence are queued first: tails are re-issued before heads."""
        for block in reversed(blocks):
            assert block.ref_count > 0, f"{block} released twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)

    def publish(self, block: Block, key: bytes) -> None:
        """Makes a full, computed block findable. The first block with a key stays; a later twin is not merged."""
        if not self.enable_caching or block.key is not None or key in self._cached:
            return
        block.key = key
        self._cached[key] = block

    def reset_cache(self) -> bool:
        """Forgets all content; False (and nothing done) while any block is held."""
        if self.num_free != self.num_usable:
            return False
        for block in self.blocks:
            self.forget(block)
        return True

    def check_integrity(self, holders: Iterable[Sequence[Block]] | None = None) -> None:
        """Asserts that every block is either free or held, and findable content is consistent (rule R13).

        ``holders``: the block lists of all live requests, to compare reference counts with.
        """
        free = list(self._free)
        assert len(free) == len({block.block_id for block in free}) == self.num_free
        assert all(block.ref_count == 0 for block in free)
        held = [block for block in self.blocks[1:] if block.ref_count > 0]
        assert len(free) + len(held) == self.num_usable, "a block is neither free nor held"
        assert self.null_block.ref_count == 1
        assert self.null_block.key is None
        keyed = {block.key: block for block in self.blocks if block.key is not None}
        assert keyed == self._cached, "keys of blocks and the lookup table differ"
        if holders is not None:
            counts = [0] * len(self.blocks)
            for blocks in holders:
                for block in blocks:
                    counts[block.block_id] += 1
            wrong = [block for block in self.blocks[1:] if block.ref_count != counts[block.block_id]]
            assert not wrong, f"reference counts differ from the holders: {wrong[:5]}"

    def forget(self, block: Block) -> None:
        """Makes a block's content unfindable."""
        if block.key is not None:
            del self._cached[block.key]
            block.key = None
