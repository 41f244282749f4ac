"""The prefix cache's second tier: which blocks have a copy in host memory, and what has to be copied there and back.

Host memory is a fixed number of chunks of ``chunk_size`` blocks, and a chunk is what one transfer moves, so that one
compiled program serves each direction. A chunk is filled once and thrown away whole, least recently used first:
blocks that leave the device together come back together.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from .block_pool import Block

SWAP_CHUNK = 16
"""Blocks in a chunk: large enough that a transfer's fixed cost does not count, small enough to be filled."""
SCAN_CHUNKS = 4
"""How far past the blocks to be saved the free queue is searched for others to fill the last chunk, in chunks."""


@dataclass(frozen=True, slots=True)
class HostBlock:
    """Where a block's copy lies in host memory."""

    chunk: int
    place: int
    """0 .. chunk_size - 1"""


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """One transfer between a host chunk and blocks of the device's pool."""

    to_host: bool
    chunk: int
    blocks: tuple[tuple[int, int], ...]
    """(block id, place in the chunk), at most chunk_size of them."""


class HostTier:
    """Keys of the blocks in host memory. Says what to copy; others copy, in the order in which it was said.

    An entry can be found as soon as its copy has been planned: copies and steps run on the device in the order of
    their dispatch, so whoever reads it comes later.
    """

    def __init__(self, num_chunks: int, chunk_size: int = SWAP_CHUNK) -> None:
        if num_chunks < 1:
            raise ValueError(f"{num_chunks=} must be at least 1")
        self.chunk_size = chunk_size
        self.num_chunks = num_chunks
        self._places: dict[bytes, HostBlock] = {}
        self._keys: list[set[bytes]] = [set() for _ in range(num_chunks)]
        """By chunk."""
        self._order: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_chunks))
        """Chunks, least recently used first."""
        self.saved_total = 0
        """Blocks copied to the host."""
        self.restored_total = 0
        """Blocks copied back."""

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._places)

    def lookup(self, key: bytes) -> HostBlock | None:
        return self._places.get(key)

    def save(self, free: Iterable[Block], count: int, keep: Collection[int] = ()) -> list[ChunkCopy]:
        """Copies of those of the next ``count`` blocks to be issued whose content is in no other place.

        ``free``: the free queue, next to be issued first. The last chunk is filled up with blocks whose turn comes
        soon after; they stay findable on the device as well. Chunks in ``keep`` are not reused; when all are kept,
        content is lost.
        """
        batch: list[Block] = []
        limit = count + SCAN_CHUNKS * self.chunk_size
        for turn, block in enumerate(free):
            if turn >= count and (len(batch) % self.chunk_size == 0 or turn >= limit):
                break
            if block.key is None:
                continue
            place = self._places.get(block.key)
            if place is None:
                batch.append(block)
            elif turn < count:
                self._order.move_to_end(place.chunk)  # from now on the only copy
        parts = [batch[at : at + self.chunk_size] for at in range(0, len(batch), self.chunk_size)]
        return [copy for part in parts if (copy := self._fill(part, keep)) is not None]

    def restore(self, hits: Sequence[tuple[HostBlock, int]]) -> list[ChunkCopy]:
        """Copies back to the device: (where the copy lies, block id to copy it to), in the order of the prefix."""
        by_chunk: dict[int, list[tuple[int, int]]] = {}
        for place, block_id in hits:
            by_chunk.setdefault(place.chunk, []).append((block_id, place.place))
        for chunk in reversed(by_chunk):  # the beginning of a prefix is worth more than its end: it goes last
            self._order.move_to_end(chunk)
        self.restored_total += len(hits)
        return [ChunkCopy(False, chunk, tuple(blocks)) for chunk, blocks in by_chunk.items()]

    def discard(self, key: bytes) -> None:
        """Forgets one block, if it is there."""
        place = self._places.pop(key, None)
        if place is not None:
            self._keys[place.chunk].remove(key)

    def clear(self) -> None:
        """Forgets everything."""
        for chunk in range(self.num_chunks):
            self._forget(chunk)

    def check_integrity(self) -> None:
        """Asserts that keys and chunks agree."""
        assert sorted(self._order) == list(range(self.num_chunks)), "a chunk is lost"
        listed = {key: chunk for chunk, keys in enumerate(self._keys) for key in keys}
        found = {key: place.chunk for key, place in self._places.items()}
        assert listed == found, "keys of chunks and the lookup table differ"
        assert len(listed) == sum(map(len, self._keys)), "a key lies in two chunks"
        places = set(self._places.values())
        assert len(places) == len(self._places), "two keys share a place"
        assert all(0 <= place.place < self.chunk_size for place in places), "a chunk is overfull"

    def _fill(self, blocks: Sequence[Block], keep: Collection[int]) -> ChunkCopy | None:
        chunk = next((chunk for chunk in self._order if chunk not in keep), None)
        if chunk is None:
            return None
        self._forget(chunk)
        self._order.move_to_end(chunk)
        for place, block in enumerate(blocks):
            assert block.key is not None
            self._keys[chunk].add(block.key)
            self._places[block.key] = HostBlock(chunk, place)
        self.saved_total += len(blocks)
        return ChunkCopy(True, chunk, tuple((block.block_id, place) for place, block in enumerate(blocks)))

    def _forget(self, chunk: int) -> None:
        for key in self._keys[chunk]:
            del self._places[key]
        self._keys[chunk].clear()
