"""What an architecture file says, and the parts that all of them share."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..decoder_config import DecoderConfig, LayerSpec, MoESpec
from ..errors import ModelConfigError
from ..quantization.apply import with_quantization

if TYPE_CHECKING:
    from ..config import ModelConfig


@dataclass(frozen=True)
class WeightMapping:
    """One of our parameters and the checkpoint tensors it is made of."""

    target: str
    """Dotted path in the parameter tree; a number indexes the list of layers: ``layers.3.attention.qkv.weight``."""
    sources: tuple[str, ...]
    """Checkpoint names, concatenated along axis 0 in this order."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape each source must have, weights as ``[out, in]``."""
    permuted_heads: tuple[int, ...] = ()
    """Heads in each source whose rows llama.cpp reorders when it writes GGUF; 0 for a source left alone."""
    parts: tuple[int, ...] = ()
    """Rows of each fused part (q, k, v; gate, up), of which every shard of a split target holds its share."""
    copies: tuple[int, ...] = ()
    """How often each part is there on several shards: a KV head on every shard that attends to it. () is once."""
    padding: int = 0
    """Rows of zeros after the sources'."""
    transposed: bool = False
    """The checkpoint stores ``[in, out]`` (GPT-2)."""
    num_experts: int = 0
    """Sources are those of one expert after the other, and the target has an axis of experts before its rows."""

    @property
    def stored_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each source in the checkpoint."""
        return tuple(shape[::-1] for shape in self.shapes) if self.transposed else self.shapes

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the target."""
        if self.num_experts:
            return (self.num_experts, *self.expert(0).shape)
        rows = sum(shape[0] for shape in self.shapes)
        if self.copies:
            rows = sum(part * copies for part, copies in zip(self.parts, self.copies, strict=True))
        return (rows + self.padding, *self.shapes[0][1:])

    def pieces(self, num_shards: int = 1) -> Iterator[tuple[int, int, int, int]]:
        """How the target is put together: (source's index, its first row, its last row + 1, row in the target).

        On one shard the sources follow one another. On more, so do the shards, each with its share of every
        part: what a shard's product yields is then whole heads, or gates beside their own ups. A part with n
        copies is cut into a share for every n shards. Raises ModelConfigError if a part does not divide.
        """
        rows = [shape[0] for shape in self.shapes]
        parts = self.parts if num_shards > 1 and self.parts else (sum(rows),)
        shards = num_shards if parts is self.parts else 1
        copies = self.copies if self.copies and shards > 1 else (1,) * len(parts)
        shares = [shards // count for count in copies]
        if any(shards % count for count in copies) or any(part % n for part, n in zip(parts, shares, strict=True)):
            raise ModelConfigError(f"{self.target}: rows {parts} cannot be split into {shards} shards")
        place = 0
        for shard in range(shards):
            for index, part in enumerate(parts):
                size = part // shares[index]
                first = sum(parts[:index]) + shard // copies[index] * size
                for source, start, stop in _locate(rows, first, first + size):
                    yield source, start, stop, place
                    place += stop - start

    def expert(self, index: int) -> "WeightMapping":
        """The mapping of one expert's matrix, from that of all."""
        count = len(self.sources) // self.num_experts
        own = slice(index * count, (index + 1) * count)
        return replace(self, sources=self.sources[own], shapes=self.shapes[own], num_experts=0)

    def split_as(self, config: DecoderConfig) -> "WeightMapping":
        """The mapping onto a decoder that ``sharding.split_over`` changed, from that of its checkpoint."""
        copies, names = config.kv_head_copies, self.target.split(".")
        if names[0] in ("embed", "head"):
            return replace(self, padding=config.vocab_padding)
        if copies > 1 and "qkv" in names:
            return replace(self, copies=(1, copies, copies))
        if copies > 1 and "k_norm" in names and config.qk_norm == "full":
            return replace(self, parts=(self.shapes[0][0],), copies=(copies,))
        return self


def _locate(rows: Sequence[int], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """The rows [first, last) of tensors laid end to end, as (tensor, its first row, its last row + 1)."""
    offset = 0
    for index, count in enumerate(rows):
        start, stop = max(first - offset, 0), min(last - offset, count)
        if start < stop:
            yield index, start, stop
        offset += count


@dataclass(frozen=True)
class Architecture:
    """A family of checkpoints, as data. ``names`` maps a part of the decoder to its checkpoint names.

    Keys of ``names``: ``embed``, ``positions``, ``norm``, ``head`` (whole names of modules) and, below
    ``layer_prefix``, ``qkv``, ``o``, ``q_norm``, ``k_norm``, ``gate_up``, ``up``, ``down``, ``attention_norm``,
    ``attention_post_norm``, ``mlp_norm``, ``mlp_post_norm``, ``sinks``, ``router``, ``expert_gate_up`` and
    ``expert_down`` (with ``{}`` for the expert), ``shared_gate_up``, ``shared_down``, ``shared_gate``. Values are
    tuples of module names without ``.weight``.
    """

    name: str
    build: "Callable[[ModelConfig], DecoderConfig]"
    names: Mapping[str, tuple[str, ...]]
    layer_prefix: str = "model.layers.{}."
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of config.json keys that are absent or null."""
    config_keys: Mapping[str, str] = field(default_factory=dict)
    """This family's own key of config.json → the key that means the same elsewhere."""
    ffn_factor: int | None = None
    """intermediate_size in units of hidden_size where config.json does not give it."""
    transposed: bool = False
    """The checkpoint stores the weights of linear layers as ``[in, out]``."""
    optional_prefix: str = ""
    """Beginning of every name, which some checkpoints leave out."""
    ignorable: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    """Regular expressions (full match) of checkpoint tensors that no parameter is made of."""
    ignorable_when_tied: tuple[str, ...] = (r"lm_head\.weight",)
    context_includes_rope: bool = False
    """max_position_embeddings is the context after stretching by rope (Gemma 3)."""
    permutes_gguf_heads: bool = False
    """llama.cpp reorders the rows of q and k for this family."""

    def decoder_config(self, model_config: "ModelConfig") -> DecoderConfig:
        """The decoder that ``model_config`` describes."""
        config, method = self.build(model_config), model_config.quantization
        return config if method is None else with_quantization(config, method, self.names, self.layer_prefix)

    def ignorable_names(self, config: DecoderConfig) -> tuple[str, ...]:
        """Regular expressions (full match) of tensors that may be present and are not loaded."""
        return self.ignorable + (self.ignorable_when_tied if config.tie_embeddings else ())

    def as_named(self, mappings: list[WeightMapping], names: Iterable[str]) -> list[WeightMapping]:
        """The mappings from a checkpoint that has these names: without ``optional_prefix`` where it leaves that out."""
        prefix = self.optional_prefix
        if not prefix or any(name.startswith(prefix) for name in names):
            return mappings
        return [
            replace(mapping, sources=tuple(name.removeprefix(prefix) for name in mapping.sources))
            for mapping in mappings
        ]

    def weight_mappings(self, config: DecoderConfig) -> list[WeightMapping]:
        """Every parameter of ``Decoder(config)``, each once."""
        vocab, hidden = config.vocab_size, config.hidden_size
        mappings = [
            self._mapping("embed.weight", "", "embed", ((vocab, hidden),)),
            self._mapping("norm.weight", "", "norm", ((hidden,),)),
        ]
        if config.norm_bias:
            mappings.append(self._mapping("norm.bias", "", "norm", ((hidden,),)))
        if config.learned_positions is not None:
            mappings.append(self._mapping("positions.weight", "", "positions", ((config.learned_positions, hidden),)))
        if not config.tie_embeddings:
            mappings.append(self._mapping("head.weight", "", "head", ((vocab, hidden),)))
        for index, layer in enumerate(config.layers):
            mappings.extend(self._layer(index, layer, config))
        return mappings

    def _mapping(
        self, target: str, prefix: str, part: str, shapes: tuple[tuple[int, ...], ...], heads: tuple[int, ...] = ()
    ) -> WeightMapping:
        suffix = "" if part == "sinks" else "." + target.rpartition(".")[2]
        sources = tuple(prefix + name + suffix for name in self.names[part])
        parts = tuple(shape[0] for shape in shapes) if len(shapes) > 1 else ()
        if len(sources) == 1 and parts:  # a checkpoint that is fused already
            shapes = ((sum(parts), *shapes[0][1:]),)
        transposed = self.transposed and part in LINEAR_PARTS and target.endswith("weight")
        heads = heads if self.permutes_gguf_heads else ()
        return WeightMapping(target, sources, shapes, heads, parts, transposed=transposed)

    def _experts(
        self, target: str, prefix: str, part: str, shapes: tuple[tuple[int, int], ...], count: int
    ) -> WeightMapping:
        names = [prefix + name.format(expert) for expert in range(count) for name in self.names[part]]
        parts = tuple(shape[0] for shape in shapes) if len(shapes) > 1 else ()
        sources = tuple(f"{name}.weight" for name in names)
        return WeightMapping(target, sources, shapes * count, parts=parts, num_experts=count)

    def _mixture(self, ours: str, prefix: str, moe: MoESpec, hidden: int) -> Iterator[WeightMapping]:
        count, ffn, shared = moe.num_experts, moe.intermediate_size, moe.shared_intermediate_size
        yield self._mapping(f"{ours}router.weight", prefix, "router", ((count, hidden),))
        yield self._experts(f"{ours}experts.gate_up.weight", prefix, "expert_gate_up", ((ffn, hidden),) * 2, count)
        yield self._experts(f"{ours}experts.down.weight", prefix, "expert_down", ((hidden, ffn),), count)
        if shared is not None:
            yield self._mapping(f"{ours}shared.gate_up.weight", prefix, "shared_gate_up", ((shared, hidden),) * 2)
            yield self._mapping(f"{ours}shared.down.weight", prefix, "shared_down", ((hidden, shared),))
            yield self._mapping(f"{ours}shared_gate.weight", prefix, "shared_gate", ((1, hidden),))

    def _layer(self, index: int, layer: LayerSpec, config: DecoderConfig) -> Iterator[WeightMapping]:
        prefix, ours = self.layer_prefix.format(index), f"layers.{index}."
        hidden, ffn, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
        heads = (config.num_heads, config.num_kv_heads, 0)
        linears: list[tuple[str, str, tuple[int, ...], int, bool, tuple[int, ...]]] = [
            ("attention.qkv", "qkv", (q, kv, kv), hidden, config.qkv_bias, heads),
            ("attention.o", "o", (hidden,), q, config.o_bias, ()),
        ]
        if layer.moe is not None:
            yield from self._mixture(f"{ours}mlp.", prefix, layer.moe, hidden)
        else:
            up = ("gate_up", (ffn, ffn)) if config.gated_mlp else ("up", (ffn,))
            linears.append((f"mlp.{up[0]}", *up, hidden, config.mlp_bias, ()))
            linears.append(("mlp.down", "down", (hidden,), ffn, config.mlp_bias, ()))
        for path, part, outs, inner, bias, permuted in linears:
            yield self._mapping(f"{ours}{path}.weight", prefix, part, tuple((out, inner) for out in outs), permuted)
            if bias:
                yield self._mapping(f"{ours}{path}.bias", prefix, part, tuple((out,) for out in outs), permuted)
        if config.qk_norm is not None:
            per_head = config.qk_norm == "head"
            for part, full in (("q_norm", q), ("k_norm", kv)):
                size = config.head_dim if per_head else full
                yield self._mapping(f"{ours}attention.{part}.weight", prefix, part, ((size,),))
        if config.attention_sinks:
            yield self._mapping(f"{ours}attention.sinks", prefix, "sinks", ((config.num_heads,),))
        for part in norm_parts(config):
            yield self._mapping(f"{ours}{part}.weight", prefix, part, ((hidden,),))
            if config.norm_bias:
                yield self._mapping(f"{ours}{part}.bias", prefix, part, ((hidden,),))


def norm_parts(config: DecoderConfig) -> tuple[str, ...]:
    """Names of the norms around a layer's two sublayers."""
    if config.parallel_block:
        return ("attention_norm",)
    before, after = ("attention_norm", "mlp_norm"), ("attention_post_norm", "mlp_post_norm")
    return {"pre": before, "post": after, "both": before + after}[config.norm_placement]


LINEAR_PARTS = ("qkv", "o", "gate_up", "up", "down")
LLAMA_NAMES: Mapping[str, tuple[str, ...]] = {
    "embed": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
}
"""Names that Llama introduced and most families keep."""


def llama_like(config: "ModelConfig", windows: tuple[int | None, ...], **changes: Any) -> DecoderConfig:
    """A pre-norm decoder with Llama's parts; ``changes`` overrides fields of the result."""
    layers = tuple(LayerSpec(rope=config.rope_of(index), window=window) for index, window in enumerate(windows))
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "layers": layers,
        "norm_eps": config.norm_eps,
        "activation": config.activation,
        "tie_embeddings": config.tie_word_embeddings,
    }
    return DecoderConfig(**{**fields, **changes})
