"""The one decoder: every supported family is this module with another ``DecoderConfig``.

Its parameters travel as a plain tree of dicts and lists, so that jit flattens them in C++:

    {"embed": {"weight"}, "norm": {"weight"}, "head": {"weight"} if not tied,
     "layers": [{"attention_norm": {"weight"}, "attention": {"qkv": {"weight"}, "o": {"weight"}},
                 "mlp_norm": {"weight"}, "mlp": {"gate_up": {"weight"}, "down": {"weight"}}}, ...]}

plus biases, q/k norms, post norms and sinks where the config has them, ``positions`` beside ``embed``, ``up`` in
place of ``gate_up`` where an MLP has no gate, and ``router`` and ``experts`` in a mixture of experts.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from ..pallas_kernels.dispatch import Implementation
from .attention_metadata import AttentionMetadata
from .decoder_config import DecoderConfig, LayerSpec
from .layers.attention import Attention
from .layers.embedding import Embedding
from .layers.mlp import MLP, PlainMLP
from .layers.moe import MoE
from .layers.norm import LayerNorm, RMSNorm, hidden_norm
from .layers.rope import RopeTable, rope_table
from .quantization.weights import is_split
from .sharding import TP_AXIS, Placement

Params = dict[str, Any]
"""The plain parameter tree described above; leaves are arrays or ShapeDtypeStructs."""


class DecoderLayer(nnx.Module):
    """Attention and MLP, each with its norms and residual."""

    def __init__(self, config: DecoderConfig, layer: LayerSpec, *, dtype: jnp.dtype, placement: Placement) -> None:

        def norm(wanted: bool) -> RMSNorm | LayerNorm | None:
            return hidden_norm(config, dtype) if wanted else None

        before, after = config.norm_placement in ("pre", "both"), config.norm_placement in ("post", "both")
        self.attention_norm, self.attention_post_norm = norm(before), norm(after)
        self.attention = Attention(config, layer, dtype=dtype, placement=placement)
        self.mlp_norm, self.mlp_post_norm = norm(before and not config.parallel_block), norm(after)
        self.mlp = _mlp(config, layer, dtype, placement)
        self.residual_multiplier, self.parallel = config.residual_multiplier, config.parallel_block

    def __call__(
        self, x: jax.Array, kv: jax.Array, rope: RopeTable | None, metadata: AttentionMetadata
    ) -> tuple[jax.Array, jax.Array]:
        """``x [T, D]``, ``kv [B, 2, K, S, H]`` → the same, one layer further."""
        normed = _maybe(self.attention_norm, x)
        attended, kv = self.attention(normed, kv, rope, metadata)
        if self.parallel:
            return self._add(x, attended + self._feed_forward(normed, kv, metadata)), kv
        x = self._add(x, _maybe(self.attention_post_norm, attended))
        return self._add(x, _maybe(self.mlp_post_norm, self._feed_forward(_maybe(self.mlp_norm, x), kv, metadata))), kv

    def _feed_forward(self, x: jax.Array, kv: jax.Array, metadata: AttentionMetadata) -> jax.Array:
        if not isinstance(self.mlp, MoE):
            return self.mlp(x)
        num_slots = kv.shape[0] * kv.shape[3]
        return self.mlp(x, metadata.slot_mapping < num_slots)

    def _add(self, x: jax.Array, update: jax.Array) -> jax.Array:
        return x + (update if self.residual_multiplier == 1.0 else update * self.residual_multiplier)


def _mlp(config: DecoderConfig, layer: LayerSpec, dtype: jnp.dtype, placement: Placement) -> MLP | PlainMLP | MoE:
    if layer.moe is not None:
        return MoE(config, layer.moe, dtype=dtype, placement=placement)
    if not config.gated_mlp:
        return PlainMLP(config, layer, dtype=dtype, placement=placement)
    return MLP(config, dtype=dtype, placement=placement, layer=layer)


def _maybe(norm: RMSNorm | LayerNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


@partial(jax.jit, static_argnums=0)
def _run_layer(
    graphdef: nnx.GraphDef[DecoderLayer],
    params: Params,
    x: jax.Array,
    kv: jax.Array,
    rope: RopeTable | None,
    metadata: AttentionMetadata,
) -> tuple[jax.Array, jax.Array]:
    """One layer. Layers of one kind have equal graphdefs, so this is traced once for all of them."""
    return nnx.merge(graphdef, params)(x, kv, rope, metadata)


class Decoder(nnx.Module):
    """Embedding, layers, final norm, logits. Parameters are zeros until ``merge`` puts a checkpoint's in.

    With a ``mesh`` of several devices along "tp", heads and rows are shared among them. Raises ModelConfigError
    for a config that asks for what the forward pass does not do, or that the mesh cannot share equally.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: jax.typing.DTypeLike,
        implementation: Implementation = "xla",
        mesh: Mesh | None = None,
        interpret: Any = None,
    ) -> None:
        dtype, placement = jnp.dtype(dtype), Placement(implementation, mesh, interpret)
        placement.check(config)
        self.config, self.placement = config, placement
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        table = config.learned_positions
        self.positions = None if table is None else Embedding(table, config.hidden_size, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(config, layer, dtype=dtype, placement=placement) for layer in config.layers]
        )
        self.norm = hidden_norm(config, dtype)
        self.head = None if config.tie_embeddings else Embedding(config.vocab_size, config.hidden_size, dtype=dtype)

    def __call__(
        self, token_ids: jax.Array, kv_caches: list[jax.Array], metadata: AttentionMetadata
    ) -> tuple[jax.Array, list[jax.Array]]:
        """One forward pass.

        token_ids i32 ``[T]``; kv_caches one ``[B, 2, K, S, H]`` per layer. Returns the hidden states
        ``[T, D]`` after the final norm and the pools with this step's keys and values written.
        """
        if len(kv_caches) != self.config.num_layers:
            raise ValueError(f"{len(kv_caches)} KV arrays for {self.config.num_layers} layers")
        x = self.embed.embed(token_ids)
        if self.config.embedding_multiplier != 1.0:
            x = x * self.config.embedding_multiplier
        if self.positions is not None:
            x = x + self.positions.embed(metadata.positions)
        if self.placement.implementation == "xla" and not metadata.work:
            windows = (spec.window for spec in self.config.layers)
            metadata = metadata.with_xla_plans(windows, kv_caches[0].shape[3], self.placement.platform)
        tables = {spec: rope_table(metadata.positions, spec) for spec in self.config.rope_specs}
        if self.placement.platform == "cpu":
            # XLA:CPU works out the sines in every layer otherwise.
            tables = {spec: jax.lax.optimization_barrier(table) for spec, table in tables.items()}
        written = []
        for layer, spec, kv in zip(self.layers, self.config.layers, kv_caches, strict=True):
            graphdef, state = nnx.split(layer)
            rope = None if spec.rope is None else tables[spec.rope]
            x, kv = _run_layer(graphdef, nnx.to_pure_dict(state), x, kv, rope, metadata)
            written.append(kv)
        return self.norm(x), written

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        """``hidden [R, D]``, the rows to sample from → f32 ``[R, V]``."""
        table = self.embed if self.head is None else self.head
        logits = table.logits(hidden)
        if self.config.logits_multiplier != 1.0:
            logits = logits * self.config.logits_multiplier
        cap = self.config.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def abstract_params(
    config: DecoderConfig,
    dtype: jax.typing.DTypeLike,
    implementation: Implementation = "xla",
    mesh: Mesh | None = None,
    interpret: Any = None,
) -> tuple[nnx.GraphDef[Decoder], Params]:
    """The decoder without weights: its static half, and the parameter tree as ShapeDtypeStructs.

    ``mesh`` must be the one that the parameters are loaded onto, or None for one device: the rows of fused
    weights are ordered by shard (``WeightMapping.pieces``). ``interpret`` is for GPU kernels on a CPU
    (``pallas_kernels.dispatch.gpu_interpreter``).
    """
    decoder = nnx.eval_shape(
        lambda: Decoder(config, dtype=dtype, implementation=implementation, mesh=mesh, interpret=interpret)
    )
    graphdef, state = nnx.split(decoder)
    tree = nnx.to_pure_dict(state)
    layers = tree.pop("layers")
    return graphdef, {**tree, "layers": [layers[index] for index in range(config.num_layers)]}


def merge(graphdef: nnx.GraphDef[Decoder], params: Mapping[str, Any]) -> Decoder:
    """The decoder with these parameters; cheap, and meant to be called inside jit."""
    return nnx.merge(graphdef, {**params, "layers": dict(enumerate(params["layers"]))})


def param_partition_specs(config: DecoderConfig) -> Params:
    """A PartitionSpec for every parameter, over the mesh axis "tp".

    Rows are split for qkv, gate_up, up, embed and head, columns for o and down; the rest is replicated. Biases and
    sinks go with the rows they belong to. Experts are split like dense layers, each over all devices.
    """
    _, params = abstract_params(config, jnp.float32)
    return jax.tree.map_with_path(_partition_spec, params)


def _partition_spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
    names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    experts = (None,) if "experts" in names else ()
    fields = [entry.name for entry in path if isinstance(entry, jax.tree_util.GetAttrKey)]
    if fields and not is_split(fields[-1], leaf, by_rows=names[-2] not in ("o", "down")):
        return PartitionSpec()
    if names[-1] == "sinks" or names[-2] in ("qkv", "gate_up", "up", "embed", "head"):
        return PartitionSpec(*experts, TP_AXIS, *(None,) * (len(leaf.shape) - 1 - len(experts)))
    if names[-2] in ("o", "down") and names[-1] == "weight":
        return PartitionSpec(*experts, None, TP_AXIS)
    return PartitionSpec()
