"""Sizes that the XLA loops over query tiles and keys are tuned by."""

from dataclasses import dataclass

from ..paged_attention.config import CPU_TUNING as CPU_DECODE_TUNING
from ..paged_attention.config import GPU_TUNING as GPU_DECODE_TUNING
from ..paged_attention.config import TuningConfig as DecodeTuningConfig


@dataclass(frozen=True)
class TuningConfig:
    """How much one turn of the inner loop does."""

    tile_q: int
    """Query tokens of one row attended together."""
    chunk_tokens: int
    """Keys per turn, rounded to whole blocks."""
    decode: DecodeTuningConfig
    """For the rows with a single query token."""


CPU_TUNING = TuningConfig(tile_q=32, chunk_tokens=64, decode=CPU_DECODE_TUNING)
GPU_TUNING = TuningConfig(tile_q=256, chunk_tokens=512, decode=GPU_DECODE_TUNING)


@dataclass(frozen=True)
class MosaicTuningConfig:
    """Sizes of the Mosaic kernel."""

    tile_kv: int
    """Keys per turn: a multiple of 64 and of the block size."""
    stages: int
    """KV tiles in flight, at least 2."""
    num_ctas: int
    """Programs that share the work, one per streaming multiprocessor."""
    stage_p_in_smem: bool = False
    """Probabilities reach the second product through shared memory, and its sum is added to the accumulator
    afterwards: what the interpreter can run. Otherwise both stay in registers."""

    raw_stages: int = 3
    """Tiles of a float8 pool on their way to shared memory, from where they are widened; not used otherwise."""

    def __post_init__(self) -> None:
        if self.tile_kv < 64 or self.tile_kv % 64:
            raise ValueError(f"tile_kv must be a multiple of 64; got {self.tile_kv}")
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2; got {self.stages}")
        if self.raw_stages < 1:
            raise ValueError(f"raw_stages must be at least 1; got {self.raw_stages}")
        if self.num_ctas < 1:
            raise ValueError(f"num_ctas must be at least 1; got {self.num_ctas}")


def mosaic_tuning(head_dim: int, num_multiprocessors: int = 132, *, interpreted: bool = False) -> MosaicTuningConfig:
    """Sizes by reasoning, for a GPU of ``num_multiprocessors``; not measured.

    128 keys a turn keep the tensor cores busy between two barriers, and leave room for two stages. At a head_dim of
    256 a KV tile of 64 keys takes 64 KB, so turns are half as long; at 96 they are too, because shared memory of that
    width takes many addresses, and with 128 keys registers would be spilled.

    Tiles of a float8 pool wait in shared memory beside the widened ones: three of them where that leaves room, at a
    head_dim of 256 one.

    Interpreted: as small as the instructions allow, and two programs, so that tests see several of them cheaply.
    """
    if interpreted:
        return MosaicTuningConfig(tile_kv=64, stages=2, num_ctas=2, stage_p_in_smem=True, raw_stages=2)
    if head_dim == 96:
        return MosaicTuningConfig(tile_kv=64, stages=4, num_ctas=num_multiprocessors)
    if head_dim > 128:
        return MosaicTuningConfig(tile_kv=64, stages=2, num_ctas=num_multiprocessors, raw_stages=1)
    return MosaicTuningConfig(tile_kv=128, stages=2, num_ctas=num_multiprocessors)
