"""A model's parameters, placed on their devices -> the work of a step, for ``step_floor``."""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ..models.decoder_config import DecoderConfig, MoESpec
from ..models.quantization.weights import QUANTIZED_TYPES, WORD_BITS, Float8Weight, IntWeight, PartedWeight
from .step_floor import StepWork

Leaf = jax.Array | jax.ShapeDtypeStruct


def step_work(decoder: DecoderConfig, params: Any, kv_token_bytes: int) -> StepWork:
    """The work of a step on one device; ``params`` is placed (arrays or shapes with shardings), ``kv_token_bytes`` is
    of all layers."""
    embed = params["embed"]["weight"]
    head = embed if decoder.tie_embeddings else params["head"]["weight"]
    tables = {"embed", "head", "positions"}
    found = {name: part for name, part in params.items() if name not in tables}
    leaves = jax.tree_util.tree_leaves_with_path(found)
    layers = [leaf for path, leaf in leaves if not _is_expert(path)]
    experts = [leaf for path, leaf in leaves if _is_expert(path)]
    weights = jax.tree_util.tree_leaves_with_path(found, is_leaf=lambda node: isinstance(node, QUANTIZED_TYPES))
    # The mixtures of a model are all alike.
    spec = next((layer.moe for layer in decoder.layers if layer.moe is not None), MoESpec(1, 1, 1))
    return StepWork(
        weight_bytes=sum(shard_bytes(leaf) for leaf in [*layers, head]),
        layer_params=sum(_multiplied(weight) for path, weight in weights if not _is_expert(path)),
        head_params=shard_size(head),
        kv_bytes=kv_token_bytes // decoder.num_layers,
        query_size=decoder.q_size // head.sharding.mesh.size,
        windows=tuple(layer.window for layer in decoder.layers),
        num_experts=spec.num_experts if experts else 0,
        experts_per_token=spec.experts_per_token if experts else 0,
        expert_bytes=sum(shard_bytes(leaf) for leaf in experts) // spec.num_experts,
        expert_params=sum(shard_size(leaf) for leaf in experts) // spec.num_experts,
    )


def _multiplied(weight: Any) -> int:
    """Weights, quantised or not, that a token is multiplied by on one device; 0 for a vector."""
    if isinstance(weight, PartedWeight):
        return sum(_multiplied(part) for part in weight.parts)
    if isinstance(weight, IntWeight):
        return shard_size(weight.packed) * WORD_BITS // weight.bits
    if isinstance(weight, Float8Weight):
        return shard_size(weight.weight)
    return shard_size(weight) if len(weight.shape) == 2 else 0


def _is_expert(path: tuple[Any, ...]) -> bool:
    return jax.tree_util.DictKey("experts") in path


def shard_size(leaf: Leaf) -> int:
    """Numbers of a placed leaf on one device."""
    assert leaf.sharding is not None
    return prod(leaf.sharding.shard_shape(leaf.shape))


def shard_bytes(leaf: Leaf) -> int:
    """Bytes of a placed leaf on one device."""
    return shard_size(leaf) * jnp.dtype(leaf.dtype).itemsize
