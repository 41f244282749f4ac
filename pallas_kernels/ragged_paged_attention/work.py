"""Which query tiles the Mosaic kernel of mixed attention works on, and which rows go to decode instead.

Planned once for all layers of a step that have the same window: in NumPy from NumPy lengths, as an engine does before
it sends a step, or in-graph from JAX's.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..attention_common import array_module, segment_of
from ..paged_attention.work import WorkPlan
from ..paged_attention.work import WorkSpec as DecodeWorkSpec
from .config import MosaicTuningConfig

WG_QUERIES = 64
"""Queries per compute warpgroup: the M of wgmma."""
COMPUTE_WGS = 2
MAX_COLUMNS = 128
"""Of a compute warpgroup's sum of values."""
ALIGNMENT = 8
"""A warpgroup's queries start at a multiple of this token: a TMA fills swizzled shared memory in groups of 8 rows."""

TILE_FIELDS = 5
"""Columns of ``TilePlan.tiles``."""
ROW, FIRST_TOKEN, NUM_TOKENS, NUM_KEYS, SEQ_LEN = range(TILE_FIELDS)


class Split(NamedTuple):
    """What an item's two compute warpgroups share out; one of these is 2, the others 1."""

    heads: int
    tokens: int
    columns: int

    @classmethod
    def of(cls, group: int, head_dim: int) -> "Split":
        """A warpgroup has registers for a sum of 64 x 128. A wider head is halved by columns: then both warpgroups
        compute all scores, half as much work again. Else two heads, for finer tiles along the diagonal, if the group
        is even."""
        if head_dim > MAX_COLUMNS:
            return cls(heads=1, tokens=1, columns=COMPUTE_WGS)
        if group % COMPUTE_WGS:
            return cls(heads=1, tokens=COMPUTE_WGS, columns=1)
        return cls(heads=COMPUTE_WGS, tokens=1, columns=1)

    @property
    def tile_q(self) -> int:
        """Query tokens per tile."""
        return WG_QUERIES * self.tokens


class TilePlan(NamedTuple):
    """Query tiles, those with the most KV tiles first, and how many of them are real. NumPy's or JAX's arrays, or a
    ``PackedArray`` each."""

    tiles: Any
    """i32 ``[W, 5]``: the row, its first query token (an index into q), the number of query tokens, the number of
    keys up to and with the last query (0: nothing to attend to, the tile gives zeros), the row's length."""
    num_tiles: Any
    """i32 ``[1]``; tiles from there on are never looked at."""


class MixedWorkPlan(NamedTuple):
    """All work of a mixed call."""

    tiles: TilePlan
    singles: WorkPlan
    """Decode's work list, of the rows with one query token."""
    single_tokens: Any
    """i32 ``[R]``: a row's only query token; T for a row that has none or several."""


@dataclass(frozen=True)
class WorkSpec:
    """What the work of a call depends on, besides its tokens and rows."""

    split: Split
    tuning: MosaicTuningConfig
    decode: DecodeWorkSpec

    def num_tiles(self, num_tokens: int, num_rows: int) -> int:
        """W for ``num_tokens`` tokens in ``num_rows`` rows."""
        return max_tiles(num_tokens, num_rows, self.split.tile_q)

    def plan(self, query_start_loc: Any, seq_lens: Any, num_tokens: int) -> MixedWorkPlan:
        """``query_start_loc`` i32 ``[R+1]``, ``seq_lens`` i32 ``[R]``."""
        xp = array_module(seq_lens)
        tiles = plan_tiles(
            query_start_loc,
            seq_lens,
            num_tokens=num_tokens,
            tile_q=self.split.tile_q,
            tile_kv=self.tuning.tile_kv,
            window=self.decode.window,
        )
        is_single = xp.diff(query_start_loc) == 1
        return MixedWorkPlan(
            tiles,
            self.decode.plan(xp.where(is_single, seq_lens, 0)),
            xp.where(is_single, query_start_loc[:-1], num_tokens).astype(xp.int32),
        )


def max_tiles(num_tokens: int, num_rows: int, tile_q: int) -> int:
    """The most tiles of ``num_tokens`` tokens in ``num_rows`` rows, each with at least two, and a padding tail."""
    pieces = min(num_rows, num_tokens // 2) + 1
    return (num_tokens + pieces * (tile_q + ALIGNMENT - 2)) // tile_q


def plan_tiles(
    query_start_loc: Any,
    seq_lens: Any,
    *,
    num_tokens: int,
    tile_q: int,
    tile_kv: int,
    window: int | None = None,
) -> TilePlan:
    """Cuts the rows with two or more query tokens, and the padding tokens at the end, into tiles of ``tile_q`` tokens.

    query_start_loc i32 ``[R+1]``; seq_lens i32 ``[R]``; ``num_tokens`` is T, ``tile_kv`` the keys per turn. Rows with
    one query token are decode's. Tiles end at tokens that are multiples of ``ALIGNMENT``, or with their row. The order
    is by descending cost, so that programs that take turns end together.
    """
    xp = array_module(seq_lens)
    num_rows = seq_lens.shape[0]
    # The padding tokens are one more row, of length 0.
    starts = xp.append(query_start_loc, num_tokens)
    lens = xp.append(seq_lens, 0)
    query_lens = xp.diff(starts)
    is_single = (query_lens == 1) & (xp.arange(num_rows + 1) < num_rows)
    skipped = starts[:-1] % ALIGNMENT
    tiles_per_row = xp.where(is_single | (query_lens == 0), 0, (skipped + query_lens + tile_q - 1) // tile_q)
    tiles_up_to_row = xp.cumsum(tiles_per_row)

    index = xp.arange(max_tiles(num_tokens, num_rows, tile_q))
    row = xp.minimum(segment_of(index, tiles_up_to_row), num_rows)
    end = (index - (tiles_up_to_row - tiles_per_row)[row] + 1) * tile_q - skipped[row]  # in the row
    start = xp.maximum(end - tile_q, 0)
    count = xp.minimum(end, query_lens[row]) - start
    is_padding = row == num_rows
    num_keys = xp.where(is_padding, 0, lens[row] - query_lens[row] + start + count)
    fields = [xp.where(is_padding, 0, row), starts[row] + start, count, num_keys, lens[row]]

    first_key = 0 if window is None else xp.maximum(num_keys - count - window + 1, 0)
    cost = (num_keys + tile_kv - 1) // tile_kv - first_key // tile_kv
    cost = xp.where(index < tiles_up_to_row[-1], cost, -1)
    tiles = xp.stack(fields, axis=1)[xp.argsort(-cost, stable=True)]
    return TilePlan(tiles.astype(xp.int32), tiles_up_to_row[-1:].astype(xp.int32))
