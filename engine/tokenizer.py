"""Text to token ids and back, for one model: transformers' fast tokenizers, or the one inside a GGUF file."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.pre_tokenizers import ByteLevel

from .chat_template import ChatTemplate
from .errors import ConfigError, RequestError
from .gguf_tokenizer import load_gguf_tokenizer
from .hf_tokenizers import AutoTokenizer, PreTrainedTokenizerFast, only_errors
from .sampling_params import is_int

_LONG_TEXT_CHARS = 4096
"""From here on a text is encoded as a batch of one, which lets other Python threads run meanwhile."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: every byte has one printable character; the printable ones keep their own."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in own]
    alphabet = {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(rest)}
    if set(alphabet) != set(ByteLevel.alphabet()):
        raise RuntimeError("the tokenizers package uses another byte alphabet")
    return alphabet


class Tokenizer:
    """What the engine needs of a tokenizer. Safe to use from several threads.

    ``hf`` is a fast transformers tokenizer; ``eos_token_ids`` are ids that end a generation besides
    its ``eos_token_id``; ``chat_template`` replaces the tokenizer's own (None: keep it).
    """

    def __init__(
        self,
        hf: PreTrainedTokenizerFast,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
    ) -> None:
        self.hf = hf
        self._backend: Backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        """id -> text of the tokens that are matched as a whole, special or not."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids that ``skip_special_tokens`` leaves out: control tokens."""
        own = () if hf.eos_token_id is None else (hf.eos_token_id,)
        self.eos_token_ids = eos_token_ids | frozenset(own)
        """Ids that end a generation, as far as the tokenizer knows; a generation config may know more."""
        self.is_byte_level = isinstance(self._backend.decoder, decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}
        source = chat_template or hf.chat_template
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}
        self._template = ChatTemplate(source, hf.special_tokens_map) if source else None

    @classmethod
    def load(
        cls,
        model_path: str | Path,
        tokenizer: str | Path | None = None,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        download_dir: str | None = None,
        chat_template: str | None = None,
    ) -> "Tokenizer":
        """The tokenizer of ``tokenizer``, or of ``model_path`` when None.

        Either is a folder, a ``tokenizer.json``, a ``.gguf`` file or a hub id. ``chat_template`` is a
        file, or the template itself. Raises ConfigError naming what is wrong; tokenizers that exist
        in Python only ("slow" ones, without a ``tokenizer.json``) are refused.
        """
        source = str(tokenizer if tokenizer is not None else model_path)
        template = _read_template(chat_template)
        ends: frozenset[int] = frozenset()
        if source.endswith(".gguf"):
            hf, ends = load_gguf_tokenizer(source)
        elif source.endswith(".json") and Path(source).is_file():
            hf = PreTrainedTokenizerFast(tokenizer_file=source)
        else:
            hf = _load_pretrained(
                source, revision=revision, trust_remote_code=trust_remote_code, cache_dir=download_dir
            )
        if not isinstance(getattr(hf, "backend_tokenizer", None), Backend):
            raise ConfigError(f"{source}: {type(hf).__name__} is a slow tokenizer; Octavo needs a tokenizer.json")
        return cls(hf, eos_token_ids=ends, chat_template=template)

    @cached_property
    def vocab_size(self) -> int:
        """Largest id + 1, added tokens included; a model's logits may be wider."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def bos_token_id(self) -> int | None:
        return self.hf.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self.hf.eos_token_id

    @property
    def pad_token_id(self) -> int | None:
        return self.hf.pad_token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        ``add_special_tokens`` adds what the tokenizer adds on its own (often a begin-of-sequence
        id), but not a second one before a text that spells it already. Control tokens spelled in
        the text become their ids. Raises RequestError for text that is not valid Unicode.
        """
        try:
            if len(text) < _LONG_TEXT_CHARS:
                ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                ids = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the text is not valid Unicode: {error}") from error
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of whole ids; bytes that are no UTF-8 become U+FFFD. Raises RequestError for a bad id."""
        for token_id in ids:
            if not is_int(token_id) or not 0 <= token_id < self.vocab_size:
                raise RequestError(f"token id {token_id!r} is outside the vocabulary of {self.vocab_size} tokens")
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_unchecked(self, ids: list[int]) -> str:
        """As :meth:`decode`, special tokens included; ids outside the vocabulary give nothing."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id (for byte-level ones not yet text), or None."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for; b"" outside the vocabulary. Only where ``is_byte_level``."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self.id_to_token(token_id) or ""
            numbers = [_BYTE_ALPHABET.get(char) for char in token]
            # Added tokens may hold characters outside the alphabet: they stand for themselves.
            data = token.encode() if None in numbers else bytes(number for number in numbers if number is not None)
            self._bytes[token_id] = data
        return data

    def stop_ids_for(self, stop: Sequence[str]) -> dict[int, str]:
        """id -> stop string, for those that are one token matched as a whole.

        Such an id has to be among a request's stop ids: with ``skip_special_tokens`` its text
        never gets as far as the stop strings.
        """
        wanted = set(stop)
        return {token_id: text for token_id, text in self.added_tokens.items() if text in wanted} if wanted else {}

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the model's chat format.

        Nothing is added to what the template writes (it writes its own begin-of-sequence token),
        and a control token that a message spells is encoded as text. May take long for long
        conversations: not for an event loop. Raises RequestError, see :meth:`ChatTemplate.render`.
        """
        if self._template is None:
            raise RequestError(
                "this model has no chat template: use the completions API, or start with a chat template", "messages"
            )
        pieces = self._template.render(
            messages,
            control_tokens=self._control_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return [token_id for piece in pieces for token_id in self.encode(piece, add_special_tokens=False)]

    @cached_property
    def _control_tokens(self) -> list[str]:
        return [self.added_tokens[token_id] for token_id in sorted(self.special_ids)]


_BYTE_ALPHABET = _byte_alphabet()


def _load_pretrained(source: str, **options: Any) -> Any:
    folder = Path(source)
    if source.startswith(("/", "./", "../", "~")) and not folder.exists():
        raise ConfigError(f"{source}: no such file or folder")
    configs = ("tokenizer_config.json", "config.json")
    if (folder / "tokenizer.json").is_file() and not any((folder / name).is_file() for name in configs):
        return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    try:
        with only_errors():
            return AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError, json.JSONDecodeError) as error:
        raise ConfigError(f"no tokenizer could be loaded from {source!r}: {error}") from error


def _read_template(template: str | None) -> str | None:
    """A template given as such is told from a file name by the braces that every template has."""
    if template is None or "{{" in template or "{%" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"chat template {template!r} is neither a template nor a readable file: {error}") from error
