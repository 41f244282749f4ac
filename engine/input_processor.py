"""From a user's prompt and sampling options to an EngineRequest: tokenised, checked, complete (rule R1)."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ..models.config import SAMPLING_KEYS
from .admission import check_fits
from .config import EngineConfig
from .errors import ConfigError, RequestError
from .messages import EngineRequest
from .sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from .tokenizer import Tokenizer

MAX_SALT_CHARS = 1024


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
"""A text, a list of token ids, or either as a dict under ``prompt`` or ``prompt_token_ids``."""


class InputProcessor:
    """Makes EngineRequests. Without a tokenizer only token ids are taken and no text is made."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._eos_ids = config.eos_token_ids
        if tokenizer is not None:
            self._eos_ids |= tokenizer.eos_token_ids

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> tuple[EngineRequest, str | None]:
        """The request and the prompt's text, where it was given as text. Raises RequestError naming the field."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        text, token_ids = self._tokens(prompt)
        if not token_ids:
            raise RequestError("the prompt is empty: at least one token is needed", "prompt")
        params = self._complete(params, len(token_ids))
        self._check_priority(priority)
        if cache_salt is not None:
            _check_salt(cache_salt)
        eos = frozenset() if params.ignore_eos else self._eos_ids
        stops = frozenset(params.stop_token_ids or ())
        if params.min_tokens and len(eos | stops) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"min_tokens holds back at most {MAX_STOP_TOKEN_IDS} ids; stop_token_ids and the model's "
                f"end-of-sequence ids are {len(eos | stops)}",
                "stop_token_ids",
            )
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            arrival_time_s=time.monotonic(),
            stop_token_ids=eos | stops,
            eos_token_ids=eos - stops,
            priority=priority,
            cache_salt=cache_salt,
        )
        return request, text

    def _check_priority(self, priority: object) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
            raise RequestError(f"priority must be a signed 64-bit integer, got {priority!r}", "priority")
        if priority and self._config.scheduler.policy != "priority":
            raise RequestError("priority needs the option --scheduling-policy priority", "priority")

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            known = {"prompt", "prompt_token_ids"}
            if unknown := set(prompt) - known:
                raise RequestError(f"a prompt has no field {sorted(unknown)[0]!r}; known: {sorted(known)}", "prompt")
            text: Any = prompt.get("prompt")
            ids: Any = prompt.get("prompt_token_ids")
            if ids is None and text is None:
                raise RequestError("a prompt needs the field prompt or prompt_token_ids", "prompt")
            if text is not None and not isinstance(text, str):
                raise RequestError(f"prompt must be a text, got {type(text).__name__}", "prompt")
            if isinstance(ids, str | Mapping):
                raise RequestError(f"prompt_token_ids must be a list of ids, got {type(ids).__name__}", "prompt")
            given: Any = text if ids is None else ids
            return text, self._tokens(given)[1]
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError("a text prompt needs a tokenizer; this engine has none: pass token ids", "prompt")
            token_ids = self._tokenizer.encode(prompt)
            if token_ids:
                self._checked_id(max(token_ids))  # a tokenizer may know tokens that the model has no embeddings for
            return prompt, token_ids
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise RequestError(f"a prompt is a text or a list of token ids, got {type(prompt).__name__}", "prompt")
        return None, [self._checked_id(token_id) for token_id in prompt]

    def _checked_id(self, token_id: object) -> int:
        """Refuses what is not an id of the vocabulary: the device would clamp it in silence."""
        size = self._config.vocab_size
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < size:
            raise RequestError(f"prompt: {token_id!r} is not a token id; this model has ids 0 to {size - 1}", "prompt")
        return token_id

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        config = self._config
        params.check_vocabulary(config.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > config.max_logprobs:
                raise RequestError(f"{name} must be at most {config.max_logprobs}, got {value}", name)
        check_fits(
            num_prompt_tokens,
            params.max_tokens,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_usable_blocks=config.num_blocks - 1,
        )
        changes: dict[str, object] = {}
        if params.max_tokens is None:
            rest = config.max_model_len - num_prompt_tokens
            if params.min_tokens > rest:
                raise RequestError(f"min_tokens ({params.min_tokens}) exceeds the {rest} tokens left", "min_tokens")
            changes["max_tokens"] = rest
        if self._tokenizer is None:
            if params.stop:
                raise RequestError("stop strings need a tokenizer; this engine has none", "stop")
            changes["detokenize"] = False
        elif params.stop:
            extra = self._tokenizer.stop_ids_for(params.stop)
            changes["stop_token_ids"] = tuple(dict.fromkeys((*(params.stop_token_ids or ()), *extra)))
        return params.clone(**changes) if changes else params


def _check_salt(salt: object) -> None:
    """The salt is hashed as UTF-8 in the engine's loop, where half a surrogate pair would be an error of the engine."""
    if not isinstance(salt, str) or not 0 < len(salt) <= MAX_SALT_CHARS:
        raise RequestError(f"cache_salt must be a text of 1 to {MAX_SALT_CHARS} characters", "cache_salt")
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"cache_salt is not valid Unicode: {error.reason}", "cache_salt") from error


def default_sampling_params(
    generation_defaults: Mapping[str, Any], generation_config: str, override: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The model's sampling defaults: its generation_config.json ("auto") or none ("vllm"), under the override's.

    ``override`` has generation_config.json's names, the result those of SamplingParams. Raises ConfigError for a
    value that no request could have: it would be every caller's error.
    """
    own = {SAMPLING_KEYS[key]: value for key, value in (override or {}).items()}
    defaults = {**(generation_defaults if generation_config == "auto" else {}), **own}
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ConfigError(
            f"generation_config.json: {error}; leave it aside with generation_config='vllm', or set the value with "
            "override_generation_config"
        ) from error
    return defaults
