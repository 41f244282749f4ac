"""What an architecture file says, and the parts that all of them share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..decoder_config import DecoderConfig, LayerSpec
from ..errors import ModelConfigError

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

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the target."""
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

    Keys of ``names``: ``embed``, ``norm``, ``head`` (whole names of modules) and, below ``layer_prefix``,
    ``qkv``, ``o``, ``q_norm``, ``k_norm``, ``gate_up``, ``down``, ``attention_norm``, ``attention_post_norm``,
    ``mlp_norm``, ``mlp_post_norm``, ``sinks``. Values are tuples of module names without ``.weight``.
    """

    name: str
    build: "Callable[[ModelConfig], DecoderConfig]"
    names: Mapping[str, tuple[str, ...]]
    layer_prefix: str = "model.layers.{}."
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of config.json keys that are absent or null."""
    ignorable: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    """Regular expressions (full match) of checkpoint tensors that no parameter is made of."""
    ignorable_when_tied: tuple[str, ...] = (r"lm_head\.weight",)
    context_includes_rope: bool = False
    """max_position_embeddings is the context after stretching by rope (Gemma 3)."""
    permutes_gguf_heads: bool = False
    """llama.cpp reorders the rows of q and k for this family."""

    def decoder_config(self, model_config: "ModelConfig") -> DecoderConfig:
        """The decoder that ``model_config`` describes."""
        return self.build(model_config)

    def ignorable_names(self, config: DecoderConfig) -> tuple[str, ...]:
        """Regular expressions (full match) of tensors that may be present and are not loaded."""
        return self.ignorable + (self.ignorable_when_tied if config.tie_embeddings else ())

    def weight_mappings(self, config: DecoderConfig) -> list[WeightMapping]:
        """Every parameter of ``Decoder(config)``, each once."""
        vocab, hidden = config.vocab_size, config.hidden_size
        mappings = [
            self._mapping("embed.weight", "", "embed", ((vocab, hidden),)),
            self._mapping("norm.weight", "", "norm", ((hidden,),)),
        ]
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
        return WeightMapping(target, sources, shapes, heads if self.permutes_gguf_heads else (), parts)

    def _layer(self, index: int, layer: LayerSpec, config: DecoderConfig) -> Iterator[WeightMapping]:
        prefix, ours = self.layer_prefix.format(index), f"layers.{index}."
        hidden, ffn, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
        heads = (config.num_heads, config.num_kv_heads, 0)
        linears = (
            ("attention.qkv", "qkv", (q, kv, kv), hidden, config.qkv_bias, heads),
            ("attention.o", "o", (hidden,), q, config.o_bias, ()),
            ("mlp.gate_up", "gate_up", (ffn, ffn), hidden, config.mlp_bias, ()),
            ("mlp.down", "down", (hidden,), ffn, config.mlp_bias, ()),
        )
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


def norm_parts(config: DecoderConfig) -> tuple[str, ...]:
    """Names of the norms around a layer's two sublayers."""
    before, after = ("attention_norm", "mlp_norm"), ("attention_post_norm", "mlp_post_norm")
    return {"pre": before, "post": after, "both": before + after}[config.norm_placement]


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
