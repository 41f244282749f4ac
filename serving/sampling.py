"""Request fields -> ``SamplingParams``: the request, then the model's generation config, then OpenAI's defaults."""

from collections.abc import Mapping
from typing import Any

from ..engine.errors import RequestError
from ..engine.sampling_params import OutputKind, SamplingParams
from .engine_client import EngineConfigView
from .protocol.requests import ChatRequest, CompletionRequest, GenerateRequest

_MODEL_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_COMPLETION_MAX_TOKENS = 16


def completion_params(
    request: CompletionRequest, defaults: Mapping[str, Any], config: EngineConfigView
) -> SamplingParams:
    """``max_tokens`` may still be None; ``fit_context`` settles it for a prompt. Raises RequestError."""
    _check_limit("logprobs", request.logprobs, config.max_logprobs)
    if request.echo and request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed; echo with logprobs can", "prompt_logprobs")
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
    return _params(request, defaults, config, request.logprobs, prompt_logprobs, completion_max_tokens(request))


def completion_max_tokens(request: CompletionRequest) -> int | None:
    """With echo, 0 asks for the prompt alone: the engine makes one token, which the answer leaves out."""
    return 1 if only_prompt(request) else request.max_tokens


def only_prompt(request: CompletionRequest) -> bool:
    return request.echo and request.max_tokens == 0


def chat_params(request: ChatRequest, defaults: Mapping[str, Any], config: EngineConfigView) -> SamplingParams:
    """As ``completion_params``, for chat."""
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    _check_limit("top_logprobs", request.top_logprobs, config.max_logprobs)
    given = request.max_completion_tokens
    if given is not None and given < 1:
        raise RequestError(f"max_completion_tokens must be at least 1, got {given}", "max_completion_tokens")
    max_tokens = request.max_tokens if given is None else given
    logprobs = request.top_logprobs if request.logprobs else None
    return _params(request, defaults, config, logprobs, request.prompt_logprobs, max_tokens)


def fit_context(
    params: SamplingParams, num_prompt_tokens: int, default_max_tokens: int | None, limit: int, param: str = "prompt"
) -> SamplingParams:
    """``params`` with ``max_tokens`` settled for one prompt.

    A prompt that leaves no room, or a ``max_tokens`` that was asked for and does not fit, is refused with both
    numbers (rule R9); nothing is ever cut. ``default_max_tokens`` only applies where it fits; ``param`` is the
    prompt's field.
    """
    room = limit - num_prompt_tokens
    if room < 1:
        raise RequestError(
            f"this model's maximum context length is {limit} tokens, and the prompt has {num_prompt_tokens}: "
            "no room is left to generate",
            param,
        )
    if params.max_tokens is None:
        return params.clone(max_tokens=room if default_max_tokens is None else min(default_max_tokens, room))
    if params.max_tokens > room:
        raise RequestError(
            f"this model's maximum context length is {limit} tokens: the prompt has {num_prompt_tokens} and "
            f"max_tokens asks for {params.max_tokens} more, {num_prompt_tokens + params.max_tokens} in total",
            "max_tokens",
        )
    return params


def default_max_tokens(request: GenerateRequest, defaults: Mapping[str, Any]) -> int | None:
    """Where the request has none: OpenAI's 16 for completions, the generation config's or all that fits for chat."""
    if isinstance(request, CompletionRequest):
        return _COMPLETION_MAX_TOKENS
    return defaults.get("max_tokens")


def _check_limit(name: str, value: int | None, limit: int) -> None:
    if value is not None and not 0 <= value <= limit:
        raise RequestError(f"{name} must be in [0, {limit}] on this server, got {value}", name)


def _params(
    request: GenerateRequest,
    defaults: Mapping[str, Any],
    config: EngineConfigView,
    logprobs: int | None,
    prompt_logprobs: int | None,
    max_tokens: int | None,
) -> SamplingParams:
    _check_limit("prompt_logprobs", prompt_logprobs, config.max_logprobs)
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed", "prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")
    if request.cache_salt is not None and not request.cache_salt:
        raise RequestError("cache_salt must not be empty", "cache_salt")
    chosen = {name: getattr(request, name) for name in _MODEL_DEFAULTS}
    for name, fallback in _MODEL_DEFAULTS.items():
        if chosen[name] is None:
            chosen[name] = defaults.get(name, fallback)
    params = SamplingParams(
        n=request.n,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=request.seed,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=request.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens,
        include_stop_str_in_output=request.include_stop_str_in_output,
        output_kind=OutputKind.DELTA if request.stream else OutputKind.FINAL_ONLY,
        logit_bias=request.logit_bias,
        **chosen,
    )
    params.check_vocabulary(config.vocab_size)
    return params
