"""Sizes that the XLA decode loop is tuned by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TuningConfig:
    """How much one turn of the loop does."""

    rows_per_group: int
    """Rows attended together; a group's loop ends with its longest row."""
    chunk_tokens: int
    """Keys per row and turn, rounded to whole blocks."""
    branch_on_partial_chunks: bool
    """Skip zeroing the unused slots in the chunks that have none. On a CPU the branch is worth it twice: it also
    keeps XLA from fusing a reshape into the gather, which then copies whole blocks, twice as fast."""


CPU_TUNING = TuningConfig(rows_per_group=16, chunk_tokens=64, branch_on_partial_chunks=True)
GPU_TUNING = TuningConfig(rows_per_group=256, chunk_tokens=256, branch_on_partial_chunks=False)
