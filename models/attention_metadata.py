"""What one forward pass needs to know about its batch, as a pytree."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import jax

from ..pallas_kernels.paged_attention.work import WorkPlan
from ..pallas_kernels.paged_attention.xla import RowPlan, plan_rows
from ..pallas_kernels.paged_attention.xla import tuning_for as row_tuning_for
from ..pallas_kernels.ragged_paged_attention.work import MixedWorkPlan
from ..pallas_kernels.ragged_paged_attention.xla import TokenPlan, plan_tokens
from ..pallas_kernels.ragged_paged_attention.xla import tuning_for as token_tuning_for

Work = WorkPlan | MixedWorkPlan | RowPlan | TokenPlan


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """Shape letters: T padded tokens, R padded rows. Built inside the step from the packed inputs."""

    positions: jax.Array
    """i32[T]: a token's place in its sequence; padding 0."""
    slot_mapping: jax.Array
    """i32[T]: block_id * block_size + offset; padding ``num_slots``, dropped by the scatter."""
    block_tables: jax.Array
    """i32[R, max_blocks]: block ids of each row; unused entries 0, the null block."""
    query_start_loc: jax.Array
    """i32[R+1]: prefix sum of the tokens scheduled per row."""
    seq_lens: jax.Array
    """i32[R]: KV length including this step; padding rows 0."""
    decode_only: bool = field(metadata={"static": True})
    """True: token i belongs to row i, one token a row (T == R)."""
    work: tuple[Work, ...] = ()
    """What the layers' attention has in common, planned once a step: one for each of ``work_windows``. Mosaic's comes
    from the host; XLA's is made by ``with_xla_plans``."""
    work_windows: tuple[int | None, ...] = field(default=(), metadata={"static": True})

    def work_of(self, window: int | None) -> Work | None:
        """The work of layers with this window; None: each plans its own."""
        return self.work[self.work_windows.index(window)] if self.work else None

    def with_xla_plans(self, windows: Iterable[int | None], block_size: int, platform: str) -> "AttentionMetadata":
        """With what attention in plain JAX plans for layers of these windows on this platform, in-graph."""
        distinct = tuple(dict.fromkeys(windows))
        return replace(
            self,
            work=tuple(self._xla_plan(window, block_size, platform) for window in distinct),
            work_windows=distinct,
        )

    def _xla_plan(self, window: int | None, block_size: int, platform: str) -> RowPlan | TokenPlan:
        tables, lens = self.block_tables, self.seq_lens
        if self.decode_only:
            return plan_rows(tables, lens, block_size=block_size, window=window, tuning=row_tuning_for(platform))
        return plan_tokens(
            tables,
            self.query_start_loc,
            lens,
            num_tokens=self.positions.shape[0],
            block_size=block_size,
            window=window,
            tuning=token_tuning_for(platform),
        )
