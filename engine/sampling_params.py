"""How to sample: the one place where sampling options are checked and normalised (rules R1 and R3)."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import RequestError

MAX_LOGPROBS = 20
"""Most alternatives per position that the step returns."""
MAX_LOGIT_BIAS = 300
"""Most entries of ``logit_bias`` (OpenAI's limit)."""
MAX_STOP_TOKEN_IDS = 128
"""Most ``stop_token_ids``, and most ids that ``min_tokens`` can hold back (end-of-sequence ids included)."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_CHOICES = 128
GREEDY_EPSILON = 1e-5
"""A temperature below this is exact argmax (rule R4)."""
MIN_REPETITION_PENALTY = 1e-4
"""Logits are divided by it in float32: anything near 0 would make them infinite."""
MAX_REPETITION_PENALTY = 1e4
_SHOWN_CHARS = 80


class OutputKind(enum.IntEnum):
    """CUMULATIVE: all so far at every step; DELTA: only what is new; FINAL_ONLY: once, at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request; names and defaults as in vLLM, checked on construction.

    Raises RequestError naming the field. Types are exact: a bool is no number and 2.0 is no
    integer. ``top_k`` 0 or -1 is off; ``seed`` is any signed 64-bit integer; ``max_tokens`` None
    means the rest of the context; ``logprobs`` None is off, 0 is the chosen token only. After
    construction ``stop`` and ``stop_token_ids`` are tuples, ``logit_bias`` maps int to float (or is
    None) and ``top_k`` is 0 when off.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_lengths(self)
        _check_bools(self)
        object.__setattr__(self, "stop", _normalise_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _normalise_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _normalise_bias(self.logit_bias))
        if not isinstance(self.output_kind, OutputKind):
            raise RequestError(f"output_kind must be an OutputKind, got {_shown(self.output_kind)}", "output_kind")
        if self.top_k < 0:
            object.__setattr__(self, "top_k", 0)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", "stop")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def uses_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def clone(self, **changes: Any) -> "SamplingParams":
        """A copy with ``changes`` applied and checked again."""
        return replace(self, **changes)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses ids outside the vocabulary; the device would clamp or drop them in silence."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token_id in ids or ():
                if not 0 <= token_id < vocab_size:
                    message = f"{name}: id {_shown(token_id)} is outside the vocabulary of {vocab_size} tokens"
                    raise RequestError(message, name)


def is_int(value: object) -> bool:
    """An exact integer: a bool is not one."""
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """A value for an error message: never long, whatever a client sends."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of thousands of digits.
        return "a number too long to show"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def _number(params: SamplingParams, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {_shown(value)}", name)
    # One closed comparison, which NaN and the infinities fail.
    if not (low < value <= high if open_low else low <= value <= high):
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise RequestError(f"{name} must be in {bounds}, got {_shown(value)}", name)
    object.__setattr__(params, name, float(value))


def _integer(params: SamplingParams, name: str, low: int, high: int, *, optional: bool = False) -> None:
    value = getattr(params, name)
    if value is None and optional:
        return
    if not is_int(value):
        raise RequestError(f"{name} must be an integer, got {_shown(value)}", name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {_shown(value)}", name)


def _check_numbers(params: SamplingParams) -> None:
    _number(params, "presence_penalty", -2.0, 2.0)
    _number(params, "frequency_penalty", -2.0, 2.0)
    _number(params, "repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    _number(params, "temperature", 0.0, 2.0)
    _number(params, "top_p", 0.0, 1.0, open_low=True)
    _number(params, "min_p", 0.0, 1.0)
    _integer(params, "top_k", -1, 2**31 - 1)
    _integer(params, "seed", -(2**63), 2**63 - 1, optional=True)


def _check_lengths(params: SamplingParams) -> None:
    _integer(params, "n", 1, MAX_CHOICES)
    _integer(params, "max_tokens", 1, 2**31 - 1, optional=True)
    _integer(params, "min_tokens", 0, 2**31 - 1)
    _integer(params, "logprobs", 0, MAX_LOGPROBS, optional=True)
    _integer(params, "prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({params.max_tokens})", "min_tokens"
        )
    if params.n > 1 and params.greedy:
        raise RequestError("n > 1 needs temperature > 0: greedy choices would all be the same", "n")


def _check_bools(params: SamplingParams) -> None:
    names = (
        "ignore_eos",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
    )
    for name in names:
        if not isinstance(getattr(params, name), bool):
            raise RequestError(f"{name} must be true or false, got {_shown(getattr(params, name))}", name)


def _items(value: object, name: str, limit: int) -> tuple[object, ...]:
    """A list or tuple as a tuple; None is empty. Other iterables (texts, sets, arrays) are refused."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} must be a list, got {_shown(value)}", name)
    if len(value) > limit:
        raise RequestError(f"{name} has {len(value)} entries, at most {limit} are allowed", name)
    return tuple(value)


def _normalise_stop(stop: object) -> tuple[str, ...]:
    result: list[str] = []
    for item in (stop,) if isinstance(stop, str) else _items(stop, "stop", MAX_STOP_STRINGS):
        if not isinstance(item, str) or not item:
            raise RequestError(f"stop must hold non-empty strings, got {_shown(item)}", "stop")
        if len(item) > MAX_STOP_STRING_CHARS:
            raise RequestError(f"a stop string may have at most {MAX_STOP_STRING_CHARS} characters", "stop")
        result.append(item)
    return tuple(result)


def _normalise_ids(ids: object) -> tuple[int, ...]:
    result: list[int] = []
    for item in _items(ids, "stop_token_ids", MAX_STOP_TOKEN_IDS):
        if not is_int(item):
            raise RequestError(f"stop_token_ids must hold integers, got {_shown(item)}", "stop_token_ids")
        result.append(item)  # type: ignore[arg-type]
    return tuple(result)


def _normalise_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {_shown(bias)}", "logit_bias")
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(bias)} entries, at most {MAX_LOGIT_BIAS} are allowed", "logit_bias")
    result: dict[int, float] = {}
    for key, value in bias.items():
        if not is_int(key):
            raise RequestError(f"logit_bias keys must be token ids, got {_shown(key)}", "logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise RequestError(f"logit_bias values must be numbers in [-100, 100], got {_shown(value)}", "logit_bias")
        result[key] = float(value)
    return result or None
