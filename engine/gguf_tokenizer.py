"""The tokenizer inside a GGUF file, rebuilt from the file's metadata with the ``tokenizers`` package.

GGUF stores the vocabulary, the merges or scores and the *name* of a pre-tokenizer; the rules behind
the name are llama.cpp's. A name that is not known here is refused: a nearly right splitting gives
slightly wrong tokens and no error. Names and rules: llama.cpp, src/llama-vocab.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..models.loading.errors import LoadError
from ..models.loading.gguf_file import GGUFFile
from .errors import ConfigError
from .hf_tokenizers import PreTrainedTokenizerFast

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_VISIBLE_SPACE = "\u2581"
"""SentencePiece's visible space."""


@dataclass(frozen=True)
class _PreTokenizer:
    """Splitting rules, each applied to the pieces of the one before; every match is a piece of its own."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token as a whole is not split, whatever the merges say."""
    add_bos: bool = False
    """When the file does not say."""
    nfc: bool = False


_PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _PreTokenizer((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _PreTokenizer((r"\p{N}", _GPT2))),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3"), _PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _PreTokenizer((_QWEN2,), nfc=True)),
    "tekken": _PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
}


class _TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def load_gguf_tokenizer(path: str | Path) -> tuple[PreTrainedTokenizerFast, frozenset[int]]:
    """The tokenizer of a GGUF file, with its chat template, and the ids that end a generation.

    Raises ConfigError when the file is no GGUF file, holds no tokenizer, or a kind that is not known here.
    """
    try:
        file = GGUFFile(Path(path))
    except LoadError as error:
        raise ConfigError(f"not a readable GGUF file: {error}") from error
    file.close()
    metadata = {
        name.removeprefix("tokenizer."): value for name, value in file.metadata.items() if name.startswith("tokenizer.")
    }
    return build_gguf_tokenizer(metadata, str(path))


def build_gguf_tokenizer(metadata: Mapping[str, Any], name: str) -> tuple[PreTrainedTokenizerFast, frozenset[int]]:
    """As :func:`load_gguf_tokenizer`, from the metadata entries below ``tokenizer.``; ``name`` is for messages."""
    if not metadata.get("ggml.tokens"):
        raise ConfigError(f"{name} holds no tokenizer (tokenizer.ggml.tokens)")
    kind = metadata.get("ggml.model")
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(metadata, name)
    elif kind == "llama":
        backend, add_bos = _sentencepiece_bpe(metadata, name), True
    else:
        raise ConfigError(f"{name}: tokenizer.ggml.model {kind!r} is not supported (known: 'gpt2', 'llama')")
    tokens: list[str] = metadata["ggml.tokens"]
    _add_special_tokens(backend, tokens, metadata)
    _add_post_processor(backend, tokens, metadata, add_bos)
    named = {
        f"{role}_token": tokens[token_id]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token_id := _token_id(metadata, key)) is not None
    }
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)
    hf.chat_template = metadata.get("chat_template")
    ends = (_token_id(metadata, key) for key in ("eos", "eot", "eom"))
    return hf, frozenset(token_id for token_id in ends if token_id is not None)


def _token_id(metadata: Mapping[str, Any], role: str) -> int | None:
    token_id = metadata.get(f"ggml.{role}_token_id")
    if token_id is None or not 0 <= int(token_id) < len(metadata["ggml.tokens"]):
        return None
    return int(token_id)


def _byte_level_bpe(metadata: Mapping[str, Any], name: str) -> tuple[Tokenizer, bool]:
    pre_name = metadata.get("ggml.pre", "default")
    pre = _PRE_TOKENIZERS.get(pre_name)
    if pre is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ConfigError(f"{name}: tokenizer.ggml.pre {pre_name!r} is not known (known: {known})")
    vocab = {token: token_id for token_id, token in enumerate(metadata["ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("ggml.merges") or ()]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece_bpe(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    """SentencePiece's BPE: of all neighbours that form a token, the best scored are joined first.

    That is BPE with the merges ordered by the score of their result, as long as no two tokens have
    the same score (true of models trained as BPE: the score is minus the training order).
    """
    tokens, scores = metadata["ggml.tokens"], metadata.get("ggml.scores")
    types = metadata.get("ggml.token_type")
    if scores is None or types is None:
        raise ConfigError(f"{name}: a 'llama' tokenizer needs tokenizer.ggml.scores and tokenizer.ggml.token_type")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == _TokenType.NORMAL}
    merges: list[tuple[float, int, int, str, str]] = []
    for token in normal:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                merges.append((-scores[vocab[token]], vocab[left], vocab[right], left, right))
    merges.sort()
    unknown = _token_id(metadata, "unknown")
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for *_, left, right in merges],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("ggml.add_space_prefix", True))
    to_visible = normalizers.Replace(" ", _VISIBLE_SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_VISIBLE_SPACE), to_visible]) if prefix else to_visible
    )
    steps = [decoders.Replace(_VISIBLE_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _add_special_tokens(backend: Tokenizer, tokens: list[str], metadata: Mapping[str, Any]) -> None:
    """Control tokens are special; user-defined ones are matched as a whole, but are ordinary text."""
    types = metadata.get("ggml.token_type") or [_TokenType.NORMAL] * len(tokens)
    special: list[AddedToken] = []
    whole: list[AddedToken] = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_TokenType.CONTROL, _TokenType.UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _TokenType.USER_DEFINED:
            whole.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(whole)


def _add_post_processor(
    backend: Tokenizer, tokens: list[str], metadata: Mapping[str, Any], add_bos_default: bool
) -> None:
    bos, eos = _token_id(metadata, "bos"), _token_id(metadata, "eos")
    template, used = ["$A"], []
    if bos is not None and metadata.get("ggml.add_bos_token", add_bos_default):
        template.insert(0, tokens[bos])
        used.append((tokens[bos], bos))
    if eos is not None and metadata.get("ggml.add_eos_token", False):
        template.append(tokens[eos])
        used.append((tokens[eos], eos))
    if used:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
