"""What one forward pass needs to know about its batch, as a pytree."""

from dataclasses import dataclass, field

import jax

from ..pallas_kernels.paged_attention.work import WorkPlan
from ..pallas_kernels.ragged_paged_attention.work import MixedWorkPlan


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
    work: tuple[WorkPlan | MixedWorkPlan, ...] = ()
    """What the kernels work on, planned on the host: for decode or mixed attention, one per ``work_windows``."""
    work_windows: tuple[int | None, ...] = field(default=(), metadata={"static": True})

    def work_of(self, window: int | None) -> WorkPlan | MixedWorkPlan | None:
        """The work of layers with this window; None: not planned by the host."""
        return self.work[self.work_windows.index(window)] if self.work else None
