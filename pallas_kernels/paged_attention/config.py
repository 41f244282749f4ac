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

    shared_chunk_tokens: int = 0
    """Keys per turn over a prefix that all rows share, a multiple of chunk_tokens; 0: no such loop. Read once for all
    rows, a shared system prompt costs one row's memory traffic instead of one per row."""


CPU_TUNING = TuningConfig(rows_per_group=16, chunk_tokens=64, branch_on_partial_chunks=True, shared_chunk_tokens=128)
GPU_TUNING = TuningConfig(rows_per_group=256, chunk_tokens=256, branch_on_partial_chunks=False)


@dataclass(frozen=True)
class MosaicTuningConfig:
    """Sizes of the Mosaic kernel."""

    tile_kv: int = 64
    """Keys per turn, whole blocks and a multiple of 64."""
    stages: int = 2
    """Tiles in flight or in use."""
    min_keys_per_item: int = 256
    """No row is cut into shorter items, a multiple of tile_kv."""
    target_thread_blocks: int = 528
    """Items times KV heads to aim for when rows are few and long."""
    stage_a_in_smem: bool = True
    """Probabilities reach wgmma through shared memory."""
