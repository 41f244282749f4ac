"""POST /v1/completions."""

import asyncio
import time
from contextlib import aclosing
from functools import partial
from typing import Any

from aiohttp import web

from ..engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from ..engine.sampling_params import SamplingParams
from .engine_client import EngineClient
from .generation import Prompt, Usage, collect, generate
from .prompts import encode_prompts, split_prompts
from .protocol.requests import CompletionRequest, parse_request
from .protocol.responses import CompletionLogprobs, encode_json, prompt_logprobs
from .sampling import completion_params, default_max_tokens, fit_context, only_prompt
from .state import STATE, read_body, request_label
from .streaming import Chunk, has_news, stream_response


async def post_completions(http_request: web.Request) -> web.StreamResponse:
    state = http_request.app[STATE]
    state.require_engine()
    request = parse_request(await read_body(http_request), CompletionRequest)
    engine, model = state.require_model(request.model)
    params = completion_params(request, engine.default_sampling_params, engine.config)
    prompts = await make_prompts(engine, request, params, state.options.max_prompts)
    echoes = await make_echoes(engine, prompts) if request.echo else None
    builder = CompletionBuilder(request, f"cmpl-{request_label(http_request)}", model, prompts, echoes)
    usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts))
    count_choices = not only_prompt(request)
    outputs = generate(state, prompts, priority=request.priority, cache_salt=request.cache_salt)
    if request.stream:
        options, stall_s = request.stream_options, state.options.stall_timeout_s
        return await stream_response(http_request, outputs, builder, usage, options, stall_s, count_choices)
    async with aclosing(outputs):
        results = await collect(outputs, len(prompts))
    for index, output in results.items():
        usage.add(index, output, count_choices)
    # Log-probabilities of a long prompt are hundreds of thousands of numbers: not on the event loop (rule R24).
    make_body = partial(encode_body, builder, results, usage)
    body = await asyncio.to_thread(make_body) if params.prompt_logprobs is not None else make_body()
    return web.Response(body=body, content_type="application/json")


def encode_body(builder: "CompletionBuilder", results: dict[int, RequestOutput], usage: Usage) -> bytes:
    return encode_json(builder.body(results) | {"usage": usage.encode()})


async def make_prompts(
    engine: EngineClient, request: CompletionRequest, params: SamplingParams, max_prompts: int
) -> list[Prompt]:
    """Every prompt with its ids and its own ``max_tokens``. Raises RequestError."""
    given = split_prompts(request.prompt, max_prompts)
    encoded = await encode_prompts(engine, given, request.add_special_tokens)
    default = default_max_tokens(request, engine.default_sampling_params)
    limit = engine.config.max_model_len
    return [
        Prompt(ids, item if isinstance(item, str) else None, fit_context(params, len(ids), default, limit))
        for item, ids in zip(given, encoded, strict=True)
    ]


async def make_echoes(engine: EngineClient, prompts: list[Prompt]) -> list[tuple[str, str]]:
    """Per prompt its text, and the text of its first token (which no log-probability entry carries)."""
    echoes = []
    for prompt in prompts:
        if engine.tokenizer is None:
            echoes.append(("", ""))
            continue
        text = prompt.text if prompt.text is not None else await engine.decode(prompt.token_ids)
        first = await engine.decode(prompt.token_ids[:1])
        # A begin-of-sequence token that the encoder added is no part of the text.
        echoes.append((text, first if text.startswith(first) else ""))
    return echoes


class CompletionBuilder:
    """Bodies and chunks; the index of a choice is ``prompt_index * n + k``."""

    def __init__(
        self,
        request: CompletionRequest,
        response_id: str,
        model: str,
        prompts: list[Prompt],
        echoes: list[tuple[str, str]] | None,
    ) -> None:
        self._request = request
        self._prompts = prompts
        self._echoes = echoes
        self._only_prompt = only_prompt(request)
        self._head = {"id": response_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._echoed: set[int] = set()
        self._held: dict[int, list[CompletionOutput]] = {}
        self._prompt_entries: dict[int, list[TokenLogprobs | None]] = {}
        self.only_text = request.logprobs is None and not (request.echo or request.return_token_ids)

    def body(self, results: dict[int, RequestOutput]) -> dict[str, Any]:
        choices = []
        for prompt_index in range(len(self._prompts)):
            output = results[prompt_index]
            for choice in sorted(output.outputs, key=lambda item: item.index):
                choices.append(self._choice(prompt_index, choice, output.prompt_logprobs))
                if self._request.prompt_logprobs is not None:
                    choices[-1]["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return self._head | {"choices": choices}

    def start(self) -> list[Chunk]:
        return []

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[Chunk]:
        """A choice that must begin with the prompt's log-probabilities is held until they are there."""
        request = self._request
        choices = self._held.setdefault(prompt_index, [])
        choices.extend(output.outputs)
        if output.prompt_logprobs is not None:
            self._prompt_entries[prompt_index] = output.prompt_logprobs
        entries = self._prompt_entries.get(prompt_index)
        if request.echo and request.logprobs is not None and entries is None:
            return []
        self._held[prompt_index] = []
        return [
            self._head | {"choices": [self._choice(prompt_index, choice, entries)]}
            for choice in choices
            if self._has_echo_left(prompt_index, choice)
            or has_news(choice, request.logprobs is not None, request.return_token_ids)
        ]

    def usage_chunk(self) -> Chunk:
        return self._head | {"choices": []}

    def _has_echo_left(self, prompt_index: int, choice: CompletionOutput) -> bool:
        return self._request.echo and self._index(prompt_index, choice) not in self._echoed

    def _index(self, prompt_index: int, choice: CompletionOutput) -> int:
        return prompt_index * self._request.n + choice.index

    def _choice(self, prompt_index: int, choice: CompletionOutput, prompt_entries: Any) -> dict[str, Any]:
        request = self._request
        index = self._index(prompt_index, choice)
        token_ids = [] if self._only_prompt else choice.token_ids
        text = "" if self._only_prompt else choice.text
        entries: list[Any] = [] if self._only_prompt else list(choice.logprobs or [])
        logged_ids, first_text = token_ids, ""
        first = index not in self._echoed
        self._echoed.add(index)
        if request.echo and first:
            assert self._echoes is not None
            echo, first_text = self._echoes[prompt_index]
            text = echo + text
            logged_ids = self._prompts[prompt_index].token_ids + token_ids
            entries = list(prompt_entries or []) + entries
        result: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._encode_logprobs(index, logged_ids, entries, first_text),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._only_prompt and choice.finished:
            result["finish_reason"], result["stop_reason"] = "length", None
        if request.return_token_ids:
            result["token_ids"] = token_ids
            if first:
                result["prompt_token_ids"] = self._prompts[prompt_index].token_ids
        return result

    def _encode_logprobs(
        self, index: int, token_ids: list[int], entries: list[Any], first_text: str
    ) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        writer = self._logprobs.get(index)
        if writer is None:
            as_ids = self._request.return_tokens_as_token_ids
            writer = self._logprobs[index] = CompletionLogprobs(self._request.logprobs, as_ids)
        return writer.encode(token_ids, entries, first_text)
