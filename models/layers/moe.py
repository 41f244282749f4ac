"""A mixture of experts in place of the dense MLP (Shazeer et al. 2017): dropless, its products grouped by expert.

Tokens are sorted by expert, so that an expert's weights meet all of its tokens at once and are read once. XLA's own
``jax.lax.ragged_dot`` is not used: on a CPU and on a GPU it multiplies every token by every expert, and writes an
array ``[T, E, D]`` to do so (docs/architecture.md has the figures).
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from ...pallas_kernels.grouped_matmul import grouped_matmul, mosaic_tiles, plan_items, tiles_obstacle
from ..decoder_config import Activation, DecoderConfig, MoESpec
from ..errors import ModelConfigError
from ..sharding import TP_AXIS, Placement
from .linear import Linear, matmul
from .mlp import ACTIVATIONS, MLP

logger = logging.getLogger(__name__)

MAX_BLOCK_ROWS = 64
"""Of a product with one expert's weights."""
MAX_PAIRED_ROWS = 4096
"""Rows that are put in order by comparing each with each: 16 million comparisons are less than sorting takes."""


class Routing(NamedTuple):
    """Which rows of the sorted tokens go to which expert. A = T * experts_per_token."""

    tokens: jax.Array
    """i32 ``[A]``: the token of each row, rows in the order of their experts; those of padding come last."""
    places: jax.Array
    """i32 ``[T, experts_per_token]``: the row of each token's choices."""
    weights: jax.Array
    """f32 ``[T, experts_per_token]``: what each choice counts."""
    group_ends: jax.Array
    """i32 ``[E]``: the row after each expert's last; the last of them leaves out padding."""
    live: jax.Array
    """bool ``[T]``: not padding."""


def route(logits: jax.Array, live: jax.Array, spec: MoESpec, *, by_pairs: bool = False) -> Routing:
    """Router logits f32 ``[T, E]`` → the experts of each token; ``live`` bool ``[T]`` is false for padding.

    Probabilities are over all experts, as the supported families have it, and the best are picked after. Padding is
    sent to none, so it neither costs a read of weights nor can spoil a row. ``by_pairs``: for a GPU, where sorting a
    few hundred rows and adding up are launches of little work; the result is the same.
    """
    chosen = spec.experts_per_token
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, experts = jax.lax.top_k(probabilities, chosen)
    if spec.normalize_weights:
        if by_pairs:  # added up one by one, they are not a launch of their own
            weights = weights / sum(weights[:, i : i + 1] for i in range(chosen))
        else:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    experts = jnp.where(live[:, None], experts, spec.num_experts).astype(jnp.int32).reshape(-1)
    in_order = _order_by_pairs if by_pairs and len(experts) <= MAX_PAIRED_ROWS else _order_by_sorting
    places, order, group_ends = in_order(experts, spec.num_experts)
    return Routing(order // chosen, places.reshape(weights.shape), weights, group_ends, live)


def _order_by_sorting(experts: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """i32 ``[A]``, of which ``num_experts`` is nobody's → the place of each element among them, equal ones in their
    order; what is at each place; and where each expert's end, i32 ``[E]``."""
    rows = jnp.arange(len(experts), dtype=jnp.int32)
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    places = jnp.zeros_like(rows).at[order].set(rows, mode="drop", unique_indices=True)
    group_sizes = jnp.sum(experts[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    return places, order, jnp.cumsum(group_sizes)


def _order_by_pairs(experts: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same by counting what comes before each: three launches. Sums are along the last axis, for XLA writes the
    comparisons of others to memory first; and so it does where it would have to work the keys out for each pair."""
    count = len(experts)
    rows = np.arange(count, dtype=np.int32)
    keys = jax.lax.optimization_barrier(experts * count + rows)
    bounds = jnp.concatenate([keys, np.arange(1, num_experts + 1, dtype=np.int32) * count])
    before = jnp.sum(keys < bounds[:, None], axis=1, dtype=jnp.int32)
    places, group_ends = before[:count], before[count:]
    order = jnp.sum(jnp.where(places == rows[:, None], rows, 0), axis=1, dtype=jnp.int32)
    return places, order, group_ends


def grouped_mlp_mosaic(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, group_ends: jax.Array, *, activation: Activation, interpret: Any
) -> jax.Array:
    """As ``grouped_mlp``, by a kernel for Hopper; rows past the last group may be NaN. ``interpret`` is for a CPU."""
    tiles = mosaic_tiles(len(x), len(group_ends), (gate_up.shape[1], down.shape[1]), interpret)
    items = plan_items(group_ends, len(x), tiles.rows)
    product = partial(grouped_matmul, items=items, tiles=tiles, interpret=interpret)
    if activation == "silu":
        return product(product(x, gate_up, gated=True), down)
    gate, up = jnp.split(product(x, gate_up), 2, axis=1)
    return product(ACTIVATIONS[activation](gate) * up, down)


def grouped_mlp(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, group_ends: jax.Array, *, activation: Activation
) -> jax.Array:
    """Each group of rows through its expert's MLP; for any device.

    ``x [A, D]`` sorted by expert, ``gate_up [E, 2F, D]`` (gate's rows, then up's), ``down [E, D, F]``, ``group_ends``
    i32 ``[E]`` → ``[A, D]``. Rows past the last group are arbitrary but finite if x is. A loop over blocks of rows, as
    many as there are: a group's last block reaches into the next groups' rows, which are overwritten in their turn.
    """
    num_rows, num_experts, ffn = x.shape[0], gate_up.shape[0], down.shape[2]
    size = block_rows(num_rows, num_experts)
    group_starts = jnp.pad(group_ends, (1, 0))[:-1]
    blocks = -(-(group_ends - group_starts) // size)
    block_ends = jnp.cumsum(blocks)
    padded = jnp.pad(x, ((0, size), (0, 0)))

    def body(index: jax.Array, written: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(block_ends, index, side="right", method="compare_all")
        block = index - (block_ends[expert] - blocks[expert])
        row = group_starts[expert] + block * size
        rows = jax.lax.dynamic_slice_in_dim(padded, row, size)
        hidden = matmul(rows, jax.lax.dynamic_index_in_dim(gate_up, expert, keepdims=False))
        hidden = ACTIVATIONS[activation](hidden[:, :ffn]) * hidden[:, ffn:]
        result = matmul(hidden, jax.lax.dynamic_index_in_dim(down, expert, keepdims=False))
        return jax.lax.dynamic_update_slice_in_dim(written, result, row, axis=0)

    return jax.lax.fori_loop(0, block_ends[-1], body, jnp.zeros_like(padded))[:num_rows]


def choose_grouped_mlp(hidden: int, ffn: int, dtype: jnp.dtype, placement: Placement) -> Callable[..., jax.Array]:
    """The kernel where attention is a kernel too, if it can serve the experts' shapes; else, and say so, plain JAX."""
    if placement.implementation != "mosaic":
        return grouped_mlp
    tiles = mosaic_tiles(1, 1, (2 * ffn, hidden))
    shapes = ((hidden, 2 * ffn), (ffn, hidden))
    obstacle = next(filter(None, (tiles_obstacle(*shape, dtype.name, tiles) for shape in shapes)), None)
    if obstacle is None:
        return partial(grouped_mlp_mosaic, interpret=placement.interpret)
    logger.warning("experts are multiplied by a loop over blocks of rows, which is slow on a GPU: %s", obstacle)
    return grouped_mlp


def block_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a block: twice what an expert gets on average, so that few read their weights twice."""
    average = -(-num_rows // num_experts)
    return min(MAX_BLOCK_ROWS, num_rows, 1 << (2 * average - 1).bit_length())


class ExpertWeights(nnx.Module):
    """Parameter: ``weight [E, out, in]``, one matrix an expert."""

    def __init__(self, num_experts: int, in_size: int, out_size: int, *, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((num_experts, out_size, in_size), dtype))


class Experts(nnx.Module):
    """Parameters: ``gate_up [E, 2F, D]``, each expert's gate's rows, then up's (on several shards, each shard's share
    of them), and ``down [E, D, F]``."""

    def __init__(self, hidden: int, spec: MoESpec, *, dtype: jnp.dtype) -> None:
        ffn = spec.intermediate_size
        self.gate_up = ExpertWeights(spec.num_experts, hidden, 2 * ffn, dtype=dtype)
        self.down = ExpertWeights(spec.num_experts, ffn, hidden, dtype=dtype)


class MoE(nnx.Module):
    """``[T, D] → [T, D]``: the sum of each token's experts by the router's weights, and of a shared MLP.

    Parameters: ``router [E, D]``, ``experts`` and, by config, ``shared`` (as ``MLP``) and ``shared_gate [1, D]``.
    Every shard has its share of every expert. Raises ModelConfigError for sizes that the shards cannot share equally.
    """

    def __init__(self, config: DecoderConfig, spec: MoESpec, *, dtype: jnp.dtype, placement: Placement) -> None:
        hidden, shards, shared = config.hidden_size, placement.num_shards, spec.shared_intermediate_size
        for size in (spec.intermediate_size, shared or 0):
            if size % shards:
                raise ModelConfigError(f"an expert's size of {size} cannot be split over {shards} devices")
        self.router = Linear(hidden, spec.num_experts, bias=False, dtype=dtype)
        self.experts = Experts(hidden, spec, dtype=dtype)
        mlp = partial(MLP, config, dtype=dtype, placement=placement)
        self.shared = None if shared is None else mlp(intermediate_size=shared)
        self.shared_gate = None if shared is None else Linear(hidden, 1, bias=False, dtype=dtype)
        self.spec, self.placement = spec, placement
        self._grouped_mlp = choose_grouped_mlp(hidden, spec.intermediate_size // shards, dtype, placement)
        self.activation: Activation = config.activation

    def __call__(self, x: jax.Array, live: jax.Array) -> jax.Array:
        """``x [T, D]``; ``live`` bool ``[T]``: false for padding, whose rows come out as those of the shared MLP."""
        routing = route(self.router.float32(x), live, self.spec, by_pairs=self.placement.implementation == "mosaic")
        mixed = self._mix
        if self.placement.num_shards > 1:
            mixed = jax.shard_map(
                mixed,
                mesh=self.placement.mesh,
                in_specs=(P(), P(None, TP_AXIS), P(None, None, TP_AXIS), P()),
                out_specs=P(),
                check_vma=False,
            )
        mixture = mixed(x, self.experts.gate_up.weight[...], self.experts.down.weight[...], routing)
        if self.shared is None or self.shared_gate is None:
            return mixture
        return mixture + jax.nn.sigmoid(self.shared_gate(x)) * self.shared(x)

    def _mix(self, x: jax.Array, gate_up: jax.Array, down: jax.Array, routing: Routing) -> jax.Array:
        """→ ``[T, D]``; on several shards each computes its share of every expert, and all add up."""
        rows = jnp.take(x, routing.tokens, axis=0, mode="clip")
        rows = self._grouped_mlp(rows, gate_up, down, routing.group_ends, activation=self.activation)
        chosen = jnp.take(rows, routing.places, axis=0, mode="clip")
        # The rows of padding were not computed.
        weighted = jnp.where(routing.live[:, None, None], chosen.astype(jnp.float32) * routing.weights[..., None], 0.0)
        mixture = jnp.sum(weighted, axis=1).astype(x.dtype)
        return jax.lax.psum(mixture, TP_AXIS) if self.placement.num_shards > 1 else mixture
