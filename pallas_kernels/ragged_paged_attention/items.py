"""What the Mosaic kernel of mixed attention works on: a query tile and some heads at a time, over resident programs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..attention_common import AttentionOptions
from .config import MosaicTuningConfig
from .work import ALIGNMENT, FIRST_TOKEN, NUM_KEYS, NUM_TOKENS, ROW, SEQ_LEN, TILE_FIELDS, WG_QUERIES, Split

Ref = Any
"""A Pallas reference."""


@dataclass(frozen=True)
class KernelShape:
    """What the kernel is specialised on."""

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: Any
    """Of queries, of the output and of what is multiplied."""
    kv_dtype: Any
    """Of the pool; keys and values of another type are widened to ``dtype`` tile by tile."""
    options: AttentionOptions
    has_sinks: bool
    tuning: MosaicTuningConfig
    tiles_start: int
    """Where the tiles and their number begin in their vectors."""
    num_tiles_start: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def split(self) -> Split:
        return Split.of(self.group, self.head_dim)

    @property
    def slices(self) -> int:
        """Items per tile."""
        return self.num_heads // self.split.heads

    @property
    def value_dim(self) -> int:
        """Columns of the values, and of the output, that a warpgroup works on."""
        return self.head_dim // self.split.columns

    @property
    def tile_blocks(self) -> int:
        return self.tuning.tile_kv // self.block_size

    @property
    def widens(self) -> bool:
        return self.kv_dtype != self.dtype

    @property
    def slice_columns(self) -> int:
        """Columns of a tile in shared memory, and of what is changed in it at once."""
        return 64 if self.head_dim % 64 == 0 else 32

    @property
    def transforms(self) -> tuple:
        return self._transforms(self.dtype)

    @property
    def raw_transforms(self) -> tuple:
        """Of tiles as they are in the pool."""
        return self._transforms(self.kv_dtype)

    def _transforms(self, dtype: Any) -> tuple:
        swizzle = self.slice_columns * jnp.dtype(dtype).itemsize
        return plgpu.TilingTransform((8, self.slice_columns)), plgpu.SwizzleTransform(swizzle)


class Refs(NamedTuple):
    """Global memory (q … out), shared memory and barriers."""

    q: Ref  # [T, N, H]
    kv: Ref  # [B, 2, K, S, H]
    tables: Ref  # i32 [R, max_blocks]
    tiles: Ref  # i32 [W, 5] at tiles_start of a vector
    num_tiles: Ref  # i32 [1] at num_tiles_start of a vector
    sinks: Ref  # f32 [N]; None unless has_sinks
    out: Ref  # [T, N, H]
    q_smem: Ref  # [2, H / value_dim, 64, value_dim]; in the end the first part is the output's
    k_smem: Ref  # [stages, tile_kv, H]
    v_smem: Ref  # [stages, tile_kv, H]
    raw_smem: Ref  # [raw_stages, tile_kv, H] of the pool's type; None unless widens
    edge_smem: Ref  # [2, 64, 64]
    p_smem: Ref  # [2, 64, tile_kv]; None unless stage_p_in_smem
    q_full: Ref
    q_empty: Ref
    k_full: Ref  # [stages]
    k_empty: Ref  # [stages]
    v_full: Ref  # [stages]
    v_empty: Ref  # [stages]
    raw_full: Ref  # [raw_stages]; unless widens, of values that are to be cleared before they are used
    turn: Ref


class Item(NamedTuple):
    """One tile and head slice. Positions and keys are counted in the row's sequence; KV tiles start at multiples of
    tile_kv. Turn i is about KV tile ``last_tile - i``."""

    row: jax.Array
    first_token: jax.Array
    num_tokens: jax.Array
    first_pos: jax.Array
    seq_len: jax.Array
    head: jax.Array  # of warpgroup 0
    first_block: jax.Array  # no block outside first … last is read
    last_block: jax.Array
    last_tile: jax.Array
    num_turns: jax.Array
    diagonal_turns: jax.Array  # the turns before this one need a mask
    window_turn: jax.Array  # the turns from this one on need a mask


class WarpgroupRows(NamedTuple):
    """The 64 rows of one compute warpgroup, of which ``num_rows`` from ``first_row`` on are its queries."""

    head: jax.Array
    start: jax.Array  # the token of row 0
    first_row: jax.Array
    num_rows: jax.Array
    first_pos: jax.Array  # of row 0; may be negative


def for_each_item(
    refs: Refs, shape: KernelShape, body: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Calls ``body(place, items so far, turns so far)`` for this program's items, ``place`` being the item's number;
    it returns the turns so far, its own included. Returns the numbers of items and turns.

    Items are dealt out back and forth over the programs, dearest first, so that their sums come out about equal.
    """
    num_ctas = shape.tuning.num_ctas
    num_items = refs.num_tiles[shape.num_tiles_start] * shape.slices

    def place_in(index: jax.Array) -> jax.Array:
        cta = lax.axis_index("cta")
        return index * num_ctas + jnp.where(lax.rem(index, 2) == 0, cta, num_ctas - 1 - cta)

    full_rounds = num_items // num_ctas
    rounds = full_rounds + (place_in(full_rounds) < num_items).astype(jnp.int32)
    turns = lax.fori_loop(0, rounds, lambda index, turns: body(place_in(index), index, turns), jnp.int32(0))
    return rounds, turns


def load_item(refs: Refs, shape: KernelShape, place: jax.Array) -> Item:
    tile_kv, window = shape.tuning.tile_kv, shape.options.window
    tile, slice_ = lax.div(place, shape.slices), lax.rem(place, shape.slices)
    fields = [refs.tiles[shape.tiles_start + tile * TILE_FIELDS + i] for i in range(TILE_FIELDS)]
    num_tokens, num_keys = fields[NUM_TOKENS], fields[NUM_KEYS]
    first_pos = num_keys - num_tokens
    first_key = jnp.int32(0) if window is None else jnp.maximum(first_pos - window + 1, 0)
    first_tile, last_tile = first_key // tile_kv, (num_keys + tile_kv - 1) // tile_kv - 1
    num_turns = jnp.where(num_keys == 0, 0, last_tile - first_tile + 1)
    below_diagonal = (first_pos + 1) // tile_kv  # KV tiles that all queries see to the end
    inside_window = first_tile if window is None else (jnp.maximum(num_keys - window, 0) + tile_kv - 1) // tile_kv
    diagonal_turns = jnp.clip(last_tile + 1 - below_diagonal, 0, num_turns)
    return Item(
        row=fields[ROW],
        first_token=fields[FIRST_TOKEN],
        num_tokens=num_tokens,
        first_pos=first_pos,
        seq_len=fields[SEQ_LEN],
        head=slice_ * shape.split.heads,
        first_block=first_key // shape.block_size,
        last_block=jnp.maximum(num_keys - 1, 0) // shape.block_size,
        last_tile=last_tile,
        num_turns=num_turns,
        diagonal_turns=diagonal_turns,
        window_turn=jnp.clip(last_tile + 1 - inside_window, diagonal_turns, num_turns),
    )


def warpgroup_rows(shape: KernelShape, item: Item, warpgroup: jax.Array | int) -> WarpgroupRows:
    """The last tokens of q are reached by starting earlier: 64 rows from any other start would leave q."""
    groups = WG_QUERIES // ALIGNMENT
    wanted = item.first_token // ALIGNMENT  # in groups of rows, so that the compiler sees the alignment
    if shape.split.tokens > 1:
        wanted = wanted + warpgroup * groups
    start = jnp.minimum(wanted, shape.num_tokens // ALIGNMENT - groups) * ALIGNMENT
    first = jnp.maximum(item.first_token, wanted * ALIGNMENT)
    end = jnp.minimum(item.first_token + item.num_tokens, wanted * ALIGNMENT + WG_QUERIES)
    return WarpgroupRows(
        head=item.head + (warpgroup if shape.split.heads > 1 else 0),
        start=start,
        first_row=first - start,
        num_rows=jnp.maximum(end - first, 0),
        first_pos=item.first_pos + start - item.first_token,
    )
