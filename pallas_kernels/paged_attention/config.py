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

    tile_kv: int
    """Keys per turn: a multiple of 64 (what wgmma's layout of registers covers) and of the block size."""
    stages: int
    """KV tiles in shared memory, in flight or in use."""
    min_keys_per_item: int
    """No row is cut into items shorter than this many keys, a multiple of tile_kv."""
    target_thread_blocks: int
    """Work items times KV heads to aim for where rows are few and long."""
    stage_a_in_smem: bool = False
    """Probabilities reach wgmma through shared memory, as the interpreter needs, instead of from registers."""

    def __post_init__(self) -> None:
        if self.tile_kv < 64 or self.tile_kv % 64:
            raise ValueError(f"tile_kv must be a multiple of 64; got {self.tile_kv}")
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2; got {self.stages}")
        if self.min_keys_per_item < 1 or self.min_keys_per_item % self.tile_kv:
            raise ValueError(
                f"min_keys_per_item must be a multiple of tile_kv {self.tile_kv}; got {self.min_keys_per_item}"
            )
        if self.target_thread_blocks < 1:
            raise ValueError(f"target_thread_blocks must be at least 1; got {self.target_thread_blocks}")


def mosaic_tuning(
    head_dim: int, kv_itemsize: int = 2, num_multiprocessors: int = 132, *, interpreted: bool = False
) -> MosaicTuningConfig:
    """Sizes by reasoning, for Hopper (multiprocessors with 228 KiB of shared memory each); not measured.

    ``kv_itemsize``: bytes of a number in the pool. ``num_multiprocessors``: the GPU's.

    - A multiprocessor needs some 36-48 KB on their way to keep up with the memory. Stages of 64 KB in all, with
      queries and what else a thread block holds, leave room for two blocks on a multiprocessor: about 96 KB on their
      way, and one block's softmax runs while the other's products do. A head of 256 columns takes 128 KB for two
      stages and fills a multiprocessor with one block.
    - An item costs some microseconds to begin and end, about what 256 keys take. Four thread blocks for each
      multiprocessor, two waves, even out items of unequal length.

    Interpreted: as small as the kernel allows, so that tests see several items and turns cheaply.
    """
    tile_kv = 64
    if interpreted:
        return MosaicTuningConfig(tile_kv, 2, min_keys_per_item=64, target_thread_blocks=2, stage_a_in_smem=True)
    stage_bytes = 2 * tile_kv * head_dim * kv_itemsize
    stages = min(4, max(2, 64 * 1024 // stage_bytes))
    return MosaicTuningConfig(tile_kv, stages, min_keys_per_item=256, target_thread_blocks=4 * num_multiprocessors)
