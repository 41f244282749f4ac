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
