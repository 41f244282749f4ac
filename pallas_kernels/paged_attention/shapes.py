"""Shapes of real models, shared by tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeShape:
    """One decode call: ``num_rows`` rows of ``seq_len`` tokens in blocks of ``block_size``."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_rows: int
    seq_len: int
    block_size: int = 16


DECODE_SHAPES = (
    DecodeShape("smollm2-135m r1", 9, 3, 64, 1, 256),
    DecodeShape("smollm2-135m r8", 9, 3, 64, 8, 256),
    DecodeShape("smollm2-135m r32", 9, 3, 64, 32, 256),
    DecodeShape("smollm2-135m r64", 9, 3, 64, 64, 128),
    DecodeShape("smollm2-135m r32 long", 9, 3, 64, 32, 700),
    DecodeShape("qwen2.5-7b r8", 28, 4, 128, 8, 512),
    DecodeShape("llama-3.1-8b r8", 32, 8, 128, 8, 512),
)
