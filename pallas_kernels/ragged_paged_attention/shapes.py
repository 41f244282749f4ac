"""Shapes of real models, shared by tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MixedShape:
    """One mixed call: per row its query tokens and its length including them."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rows: tuple[tuple[int, int], ...]
    """(query_len, seq_len) of each row."""
    num_tokens: int
    """T: the query tokens plus padding."""
    block_size: int = 16


MIXED_SHAPES = (
    MixedShape("smollm2-135m prefill 1x512", 9, 3, 64, ((512, 512),), 512),
    MixedShape("smollm2-135m prefill 4x128", 9, 3, 64, ((128, 128),) * 4, 512),
    MixedShape("smollm2-135m chunk with history", 9, 3, 64, ((512, 2048),), 512),
    MixedShape("smollm2-135m 31 decodes + prefill 256", 9, 3, 64, ((1, 256),) * 31 + ((256, 256),), 512),
    MixedShape("llama-3.1-8b prefill 1x512", 32, 8, 128, ((512, 512),), 512),
)
