"""The gated feed-forward layer (Shazeer 2020)."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from ..decoder_config import Activation, DecoderConfig
from .linear import Linear

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class MLP(nnx.Module):
    """``[T, D] → [T, D]``: down(activation(gate x) * up x). ``gate_up.weight`` is gate's rows, then up's (on
    several shards, each shard's share of them)."""

    def __init__(self, config: DecoderConfig, *, dtype: jnp.dtype, num_shards: int = 1) -> None:
        hidden, ffn, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(hidden, 2 * ffn, bias=bias, dtype=dtype)
        self.down = Linear(ffn, hidden, bias=bias, dtype=dtype)
        self.activation: Activation = config.activation
        self.sizes = (ffn, ffn)
        self.num_shards = num_shards

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self.gate_up.split(x, self.sizes, self.num_shards)
        return self.down(ACTIVATIONS[self.activation](gate) * up)
