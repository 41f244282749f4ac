"""The work list of a decode step: which thread block attends which keys of which row.

A row is cut into items of about equal length, so that one long row spreads over the whole GPU and short ones do not
wait for it. The number of items is static; how they are shared out follows the lengths. Planned in NumPy from NumPy
lengths, as an engine does before it sends a step, or in-graph from JAX's.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..attention_common import array_module, segment_of
from .config import MosaicTuningConfig

ITEM_FIELDS = 4
"""Columns of ``WorkPlan.items``."""


class WorkPlan(NamedTuple):
    """W items, rows in order; padding items, which have no keys, come last. NumPy's or JAX's arrays, or a
    ``PackedArray`` each."""

    items: Any
    """i32[W, 4]: row, first key, end of keys (exclusive), first key that the query sees (differs from the first key
    only where a window begins inside a block). Padding: all 0."""
    row_items: Any
    """i32[R + 1]: row r's items are row_items[r] .. row_items[r + 1] - 1; none for a row of length 0."""


@dataclass(frozen=True)
class WorkSpec:
    """What the work list of a call depends on, besides its rows."""

    num_kv_heads: int
    block_size: int
    max_keys: int
    """The longest a row can be."""
    window: int | None
    tuning: MosaicTuningConfig

    def num_items(self, num_rows: int) -> int:
        """W for ``num_rows`` rows."""
        max_keys = self.max_keys
        if self.window is not None:
            max_keys = min(max_keys, self.window + self.block_size - 1)
        tuning = self.tuning
        return num_work_items(
            num_rows, max_keys, self.num_kv_heads, tuning.target_thread_blocks, tuning.min_keys_per_item
        )

    def plan(self, seq_lens: Any) -> WorkPlan:
        """``seq_lens`` i32[R]; a row of length 0 gets no item."""
        return plan_work(
            seq_lens,
            num_items=self.num_items(seq_lens.shape[0]),
            block_size=self.block_size,
            tile_kv=self.tuning.tile_kv,
            min_keys=self.tuning.min_keys_per_item,
            window=self.window,
        )


def num_work_items(num_rows: int, max_keys: int, num_kv_heads: int, target_blocks: int, min_keys: int) -> int:
    """W for a bucket: one item for each row, and enough more for ``target_blocks`` thread blocks in all.

    ``max_keys``: the longest a row can be; no row is cut into items shorter than ``min_keys``.
    """
    extra = -(-target_blocks // num_kv_heads)
    return min(num_rows + extra, num_rows * -(-max_keys // min_keys))


def plan_work(
    seq_lens: Any, *, num_items: int, block_size: int, tile_kv: int, min_keys: int, window: int | None
) -> WorkPlan:
    """Shares out the visible keys of rows of ``seq_lens`` i32[R] tokens among ``num_items`` items.

    An item begins at a block and covers whole tiles of ``tile_kv`` keys, except at the row's end. ``num_items`` as
    ``num_work_items`` gives it, with the same ``min_keys``, a multiple of ``tile_kv``.
    """
    xp = array_module(seq_lens)
    num_rows = seq_lens.shape[0]
    first_seen = xp.zeros_like(seq_lens) if window is None else xp.maximum(seq_lens - window, 0)
    first_key = first_seen // block_size * block_size
    num_keys = seq_lens - first_key

    # With items of at least total / (W - R) keys, no more than W - R are full, and each row has at most one other.
    if num_items > num_rows:
        fair = _ceil_div(xp.sum(num_keys), num_items - num_rows)
    else:
        fair = xp.max(num_keys)
    pieces = _ceil_div(num_keys, _round_up(xp.maximum(fair, min_keys), tile_kv))
    piece = _round_up(_ceil_div(num_keys, xp.maximum(pieces, 1)), tile_kv)
    pieces = _ceil_div(num_keys, xp.maximum(piece, 1))

    ends = xp.cumsum(pieces)
    item = xp.arange(num_items)
    row = segment_of(item, ends)
    is_used = row < num_rows
    row = xp.minimum(row, num_rows - 1)
    first = first_key[row] + (item - (ends - pieces)[row]) * piece[row]
    end = xp.minimum(first + piece[row], seq_lens[row])
    fields = xp.stack([row, first, end, xp.maximum(first_seen[row], first)], axis=1)
    row_items = xp.concatenate([xp.zeros_like(ends[:1]), ends])
    return WorkPlan(xp.where(is_used[:, None], fields, 0).astype(xp.int32), row_items.astype(xp.int32))


def _ceil_div(x: Any, y: Any) -> Any:
    return (x + y - 1) // y


def _round_up(x: Any, multiple: int) -> Any:
    return _ceil_div(x, multiple) * multiple
