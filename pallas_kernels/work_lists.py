"""The work lists of a whole step: what the host plans and sends for the Mosaic kernels of all layers.

A list follows from the rows' lengths, which the host knows, so that the device need not spend a dozen small launches
on it before its first real kernel. Layers with the same window share one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .dispatch import AttentionShape
from .packed_array import PackedArray
from .paged_attention.work import ITEM_FIELDS, WorkPlan
from .ragged_paged_attention import work_spec
from .ragged_paged_attention.work import TILE_FIELDS, MixedWorkPlan, TilePlan, WorkSpec


@dataclass(frozen=True)
class WorkListSpec:
    """What to plan for a step, one spec for each window; hashable. Fields of several windows are told apart by the
    window's index."""

    specs: tuple[WorkSpec, ...]

    @classmethod
    def of(
        cls, shape: AttentionShape, max_blocks: int, windows: Iterable[int | None], interpret: Any = None
    ) -> "WorkListSpec":
        """``shape``: of one device's share of the heads; ``windows``: of the layers, repetitions allowed."""
        q = jax.ShapeDtypeStruct((1, shape.num_heads, shape.head_dim), jnp.dtype(shape.dtype))
        kv_dtype = jnp.dtype(shape.kv_dtype or shape.dtype)
        kv = jax.ShapeDtypeStruct((1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim), kv_dtype)
        distinct = dict.fromkeys(windows)
        return cls(tuple(work_spec(q, kv, max_blocks, window=window, interpret=interpret) for window in distinct))

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(spec.decode.window for spec in self.specs)

    def fields(self, num_tokens: int, num_rows: int, decode_only: bool) -> dict[str, tuple[int, ...]]:
        """Name and shape of the int32 arrays that a step of this size sends."""
        shapes: dict[str, tuple[int, ...]] = {}
        for index, spec in enumerate(self.specs):
            shapes[f"work_items_{index}"] = (spec.decode.num_items(num_rows), ITEM_FIELDS)
            shapes[f"row_items_{index}"] = (num_rows + 1,)
            if not decode_only:
                shapes[f"tiles_{index}"] = (spec.num_tiles(num_tokens, num_rows), TILE_FIELDS)
                shapes[f"num_tiles_{index}"] = (1,)
        if not decode_only:
            shapes["single_tokens"] = (num_rows,)
        return shapes

    def fill(self, views: Mapping[str, np.ndarray], num_tokens: int, decode_only: bool) -> None:
        """Plans from ``query_start_loc`` i32[R+1] and ``seq_lens`` i32[R] in ``views`` and writes the fields there."""
        starts, lens = views["query_start_loc"], views["seq_lens"]
        for index, spec in enumerate(self.specs):
            if decode_only:
                rows = spec.decode.plan(lens)
            else:
                plan = spec.plan(starts, lens, num_tokens)
                rows = plan.singles
                views[f"tiles_{index}"][:] = plan.tiles.tiles
                views[f"num_tiles_{index}"][:] = plan.tiles.num_tiles
                views["single_tokens"][:] = plan.single_tokens
            views[f"work_items_{index}"][:] = rows.items
            views[f"row_items_{index}"][:] = rows.row_items

    def plans(self, fields: Mapping[str, PackedArray], decode_only: bool) -> tuple[WorkPlan | MixedWorkPlan, ...]:
        """The plans in a step's inputs, in the order of ``windows``."""
        plans: list[WorkPlan | MixedWorkPlan] = []
        for index in range(len(self.specs)):
            rows = WorkPlan(fields[f"work_items_{index}"], fields[f"row_items_{index}"])
            if decode_only:
                plans.append(rows)
            else:
                tiles = TilePlan(fields[f"tiles_{index}"], fields[f"num_tiles_{index}"])
                plans.append(MixedWorkPlan(tiles, rows, fields["single_tokens"].unpack()))
        return tuple(plans)
