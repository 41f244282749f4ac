"""Token ids to text, one id at a time: text leaves only when its bytes are complete (rule R6).

Byte-level vocabularies (GPT-2's kind: Llama 3, Qwen, SmolLM, ...) map every id to bytes, so text is
what UTF-8 says and one id costs under a microsecond. Other vocabularies are decoded in a short
window of ids with the tokenizer's own decoder, because an id's text depends on its left neighbour
(SentencePiece drops a leading space at the start only).
"""

import codecs
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from .tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT_IDS = 6
"""Ids of the prompt that give the first new id its left context: a UTF-8 character has up to four bytes."""
_MAX_PENDING_IDS = 4
"""A character is complete after four byte ids at most; more that end in U+FFFD are not UTF-8."""


class IncrementalDetokenizer(Protocol):
    """The text of one choice. Joining all that ``push`` and one last ``flush`` give is its whole text."""

    @property
    def pending(self) -> bool:
        """True while the last id's text is held back for its missing bytes."""
        ...

    def push(self, token_id: int) -> str:
        """The text that this id completes; "" while bytes are missing, and for a skipped special token."""
        ...

    def peek(self, token_id: int) -> str:
        """What ``push`` would give, without taking the id."""
        ...

    def flush(self) -> str:
        """At the end: U+FFFD for an incomplete character, else ""."""
        ...


def create_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> IncrementalDetokenizer:
    """The detokenizer for what follows the prompt.

    ``spaces_between_special_tokens`` False removes the space that some decoders put between two
    added tokens in a row; byte-level and SentencePiece decoders never put one.
    """
    context = list(prompt_token_ids[-_CONTEXT_IDS:])
    if tokenizer.is_byte_level:
        return ByteLevelDetokenizer(tokenizer, context, skip_special_tokens)
    return WindowDetokenizer(tokenizer, context, skip_special_tokens, spaces_between_special_tokens)


class ByteLevelDetokenizer:
    """For vocabularies whose ids stand for bytes. An incomplete end of the context belongs to the first id."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._tail = b""
        for token_id in context:
            self.push(token_id)

    @property
    def pending(self) -> bool:
        return bool(self._tail)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        data = self._tail + self._bytes(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._tail = data[used:]
        return text

    def peek(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return codecs.utf_8_decode(self._tail + self._bytes(token_id), "replace", False)[0]

    def flush(self) -> str:
        tail, self._tail = self._tail, b""
        return tail.decode("utf-8", "replace")


class WindowDetokenizer:
    """For all other vocabularies: decodes context + pending ids and gives what is new.

    The context is what was given out last, so that the decoder sees a left neighbour.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> None:
        self._decode = tokenizer.decode_unchecked
        self._id_to_token = tokenizer.id_to_token
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._glued = {} if spaces_between_special_tokens else tokenizer.added_tokens
        self._context = [token_id for token_id in context if token_id not in self._skipped]
        self._shown = self._decode(self._context)  # the context's text
        self._pending: list[int] = []

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        text = self.peek(token_id)
        if text:
            self._pending.append(token_id)
            self._restart()
        elif self._matters(token_id):
            self._pending.append(token_id)
        return text

    def peek(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        last = self._pending[-1:] or self._context[-1:]
        if token_id in self._glued and last and last[0] in self._glued:
            return self._glued[token_id]
        window = self._decode([*self._context, *self._pending, token_id])
        if window.endswith(_REPLACEMENT) and len(self._pending) < _MAX_PENDING_IDS:
            return ""
        return self._new_part(window)

    def flush(self) -> str:
        text = self._new_part(self._decode(self._context + self._pending)) if self._pending else ""
        self._restart()
        return text

    def _matters(self, token_id: int) -> bool:
        """True for an id that gives no text yet but changes what follows: the beginning of a character, or a
        first space, which the decoder drops. Others must not pile up in the window.
        """
        window = [*self._context, *self._pending, token_id]
        return self._decode(window) != self._shown or (len(window) == 1 and self._id_to_token(token_id) is not None)

    def _new_part(self, window: str) -> str:
        if window.startswith(self._shown):
            return window[len(self._shown) :]
        # The context ended inside a character that is complete now.
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(window, self._shown, strict=False)))
        return window[same:]

    def _restart(self) -> None:
        if self._pending:
            self._context, self._pending = self._pending, []
            self._shown = self._decode(self._context)
