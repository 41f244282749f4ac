"""POST /v1/chat/completions."""

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from ..engine.errors import RequestError
from ..engine.outputs import CompletionOutput, RequestOutput
from .engine_client import EngineClient
from .generation import Prompt, Usage, collect, generate
from .prompts import check_token_ids
from .protocol.requests import ChatRequest, parse_request
from .protocol.responses import chat_logprobs, encode_json, prompt_logprobs
from .sampling import chat_params, default_max_tokens, fit_context
from .state import STATE, read_body, request_label
from .streaming import Chunk, has_news, stream_response

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_MESSAGES = 4096


async def post_chat_completions(http_request: web.Request) -> web.StreamResponse:
    state = http_request.app[STATE]
    state.require_engine()
    request = parse_request(await read_body(http_request), ChatRequest)
    engine, model = state.require_model(request.model)
    defaults = engine.default_sampling_params
    params = chat_params(request, defaults, engine.config)
    token_ids = await render_messages(
        engine,
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=template_kwargs(request),
    )
    default = default_max_tokens(request, defaults)
    params = fit_context(params, len(token_ids), default, engine.config.max_model_len, "messages")
    builder = ChatBuilder(request, f"chatcmpl-{request_label(http_request)}", model, token_ids)
    usage = Usage(prompt_tokens=len(token_ids))
    prompts = [Prompt(token_ids, None, params)]
    outputs = generate(state, prompts, priority=request.priority, cache_salt=request.cache_salt)
    if request.stream:
        options = request.stream_options
        return await stream_response(http_request, outputs, builder, usage, options, state.options.stall_timeout_s)
    async with aclosing(outputs):
        results = await collect(outputs, 1)
    usage.add(0, results[0])
    body = encode_json(builder.body(results[0]) | {"usage": usage.encode()})
    return web.Response(body=body, content_type="application/json")


def template_kwargs(request: ChatRequest) -> dict[str, Any]:
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        if request.reasoning_effort not in REASONING_EFFORTS:
            raise RequestError(f"reasoning_effort must be one of {', '.join(REASONING_EFFORTS)}", "reasoning_effort")
        kwargs["reasoning_effort"] = request.reasoning_effort
    return kwargs


async def render_messages(
    engine: EngineClient,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> list[int]:
    """Messages -> ids through the server's own template. Raises RequestError."""
    check_messages(messages)
    if "chat_template" in (chat_template_kwargs or {}):
        raise RequestError("chat_template is chosen when the server starts, never by a request", "chat_template_kwargs")
    if continue_final_message:
        if add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt to be false: they contradict each other",
                "continue_final_message",
            )
        if messages[-1].get("role") != "assistant":
            raise RequestError("continue_final_message needs a last message of the assistant", "continue_final_message")
    if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
        missing = "tokenizer" if engine.tokenizer is None else "chat template"
        raise RequestError(f"this model has no {missing}: use /v1/completions, or --chat-template", "messages")
    token_ids = await engine.render_chat(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template_kwargs=dict(chat_template_kwargs or {}),
    )
    check_token_ids(token_ids, engine.config.vocab_size, "messages")
    return token_ids


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """The outer shape; the messages themselves are checked where they are put in the template's form."""
    if not messages:
        raise RequestError("messages is empty", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages holds {len(messages)} entries, at most {MAX_MESSAGES} are allowed", "messages")


class ChatBuilder:
    """Bodies and chunks of one chat request."""

    def __init__(self, request: ChatRequest, response_id: str, model: str, prompt_token_ids: list[int]) -> None:
        self._request = request
        self._prompt_token_ids = prompt_token_ids
        self._id = response_id
        self._created = int(time.time())
        self._model = model
        self.only_text = not request.logprobs and not request.return_token_ids

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def body(self, output: RequestOutput) -> dict[str, Any]:
        request = self._request
        choices = []
        for choice in sorted(output.outputs, key=lambda item: item.index):
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            entry = {"index": choice.index, "message": message} | self._ending(choice)
            if request.return_token_ids:
                entry["token_ids"] = choice.token_ids
            choices.append(entry)
        body = self._head("chat.completion") | {"choices": choices}
        if request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if request.return_token_ids:
            body["prompt_token_ids"] = self._prompt_token_ids
        return body

    def start(self) -> list[Chunk]:
        chunks = []
        for index in range(self._request.n):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunks.append(self._head("chat.completion.chunk") | {"choices": [choice]})
        if self._request.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._prompt_token_ids
        return chunks

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[Chunk]:
        request = self._request
        result = []
        for choice in output.outputs:
            if not has_news(choice, request.logprobs, request.return_token_ids):
                continue
            delta = {"content": choice.text} if choice.text else {}
            entry: dict[str, Any] = {"index": choice.index, "delta": delta} | self._ending(choice)
            if request.return_token_ids:
                entry["token_ids"] = choice.token_ids
            result.append(self._head("chat.completion.chunk") | {"choices": [entry]})
        return result

    def usage_chunk(self) -> Chunk:
        return self._head("chat.completion.chunk") | {"choices": []}

    def _ending(self, choice: CompletionOutput) -> dict[str, Any]:
        request = self._request
        logprobs = None
        if request.logprobs:
            logprobs = chat_logprobs(choice, request.top_logprobs, request.return_tokens_as_token_ids)
        return {"logprobs": logprobs, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
