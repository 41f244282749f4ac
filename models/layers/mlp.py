"""The feed-forward layer, gated (Shazeer 2020) or not."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from ..decoder_config import Activation, DecoderConfig, LayerSpec
from ..sharding import ONE_DEVICE, Placement
from .linear import Linear

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class MLP(nnx.Module):
    """``[T, D] → [T, D]``: down(activation(gate x) * up x). ``gate_up.weight`` is gate's rows, then up's (on
    several shards, each shard's share of them). ``intermediate_size`` is the config's where not given; ``layer`` says
    how the weights are quantised."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: jnp.dtype,
        placement: Placement = ONE_DEVICE,
        intermediate_size: int | None = None,
        layer: LayerSpec | None = None,
    ) -> None:
        hidden, bias = config.hidden_size, config.mlp_bias
        ffn = config.intermediate_size if intermediate_size is None else intermediate_size
        gate_up, down = (() if layer is None else layer.weight_specs(name) for name in ("gate_up", "down"))
        linear, num_shards = partial(Linear, bias=bias, dtype=dtype, placement=placement), placement.num_shards
        self.gate_up = linear(hidden, (ffn, ffn), specs=gate_up)
        self.down = linear(ffn, hidden, specs=down, input_shards=num_shards)
        self.activation: Activation = config.activation
        self.sizes = (ffn, ffn)
        self.num_shards = num_shards

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self.gate_up.split(x, self.sizes, self.num_shards)
        return self.down(ACTIVATIONS[self.activation](gate) * up)


class PlainMLP(nnx.Module):
    """``[T, D] → [T, D]``: down(activation(up x)). ``layer`` says how the weights are quantised."""

    def __init__(self, config: DecoderConfig, layer: LayerSpec, *, dtype: jnp.dtype, placement: Placement) -> None:
        hidden, ffn, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        linear = partial(Linear, bias=bias, dtype=dtype, placement=placement)
        self.up = linear(hidden, ffn, specs=layer.weight_specs("up"))
        self.down = linear(ffn, hidden, specs=layer.weight_specs("down"), input_shards=placement.num_shards)
        self.activation: Activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(ACTIVATIONS[self.activation](self.up(x)))
