"""Request bodies, with exact types: a bool is no integer, "2" no number, 2.0 no integer, NaN no JSON (rule R1).

Ranges are checked by ``SamplingParams``; here are only the shapes. null is taken as absent before these are made.
"""

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from ...engine.errors import RequestError
from .fields import Api, select_fields


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    """One more chunk at the end, with usage and no choices."""
    continuous_usage_stats: bool | None = None
    """usage in every chunk."""


class GenerateRequest(msgspec.Struct, kw_only=True):
    """What chat and completions share; None is "not given", so the model's own default applies."""

    model: str | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class CompletionRequest(GenerateRequest, kw_only=True):
    """POST /v1/completions. ``prompt``: str, list of str, list of ids, or list of lists of ids."""

    prompt: str | list[Any]
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True


class ChatRequest(GenerateRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int = 0
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


Request = TypeVar("Request", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)

_APIS: dict[type, Api] = {
    CompletionRequest: Api.COMPLETIONS,
    ChatRequest: Api.CHAT,
    TokenizeRequest: Api.TOKENIZE,
    DetokenizeRequest: Api.DETOKENIZE,
}
_PATH = re.compile(r" - at (?:`(?:key|value|key\.\.\.)` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")


def parse_request(body: bytes, request_type: type[Request]) -> Request:
    """Decodes and checks one body. Raises RequestError naming the field."""
    fields = select_fields(_APIS[request_type], decode_object(body))
    try:
        return msgspec.convert(fields, request_type, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise _as_request_error(str(error)) from None


def decode_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises RequestError for anything else."""
    if not body.strip():
        raise RequestError("the request body is empty; a JSON object is needed")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        name = _field_with_literal(body)
        if name is not None:
            raise RequestError(f"{name} must be a finite number", name) from None
        raise RequestError(f"the request body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, got {_json_kind(value)}")
    return value


def _field_with_literal(body: bytes) -> str | None:
    """Python's reader takes NaN and Infinity, which JSON has not; used only to name the field in the error."""
    if len(body) > 1 << 20:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        for name, item in value.items():
            inside = item.values() if isinstance(item, dict) else item if isinstance(item, list) else (item,)
            if any(isinstance(entry, float) and not math.isfinite(entry) for entry in inside):
                return name
    return None


def _json_kind(value: object) -> str:
    kinds = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _as_request_error(message: str) -> RequestError:
    missing = _MISSING.search(message)
    if missing:
        return RequestError(f"{missing['name']} is required", missing["name"])
    match = _PATH.search(message)
    if not match or not match["path"] or match["path"].startswith("[..."):
        return RequestError(message.replace("`", ""))
    path = match["path"]
    return RequestError(f"{path}: {message[: match.start()].replace('`', '')}", path.split("[")[0].split(".")[0])
