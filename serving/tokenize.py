"""POST /tokenize and /detokenize."""

import asyncio

from aiohttp import web

from ..engine.errors import RequestError
from .chat import render_messages
from .prompts import check_token_ids, encode_prompts
from .protocol.requests import DetokenizeRequest, TokenizeRequest, parse_request
from .protocol.responses import encode_json
from .state import STATE, read_body


async def post_tokenize(http_request: web.Request) -> web.Response:
    state = http_request.app[STATE]
    state.require_engine()
    request = parse_request(await read_body(http_request), TokenizeRequest)
    engine, _ = state.require_model(request.model)
    if engine.tokenizer is None:
        raise RequestError("this server has no tokenizer")
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("send either prompt or messages", "prompt")
    if request.messages is not None:
        token_ids = await render_messages(
            engine,
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=request.chat_template_kwargs,
        )
    elif request.prompt:
        (token_ids,) = await encode_prompts(engine, [request.prompt], request.add_special_tokens)
    else:
        token_ids = await engine.encode("", request.add_special_tokens)
    texts = None
    if request.return_token_strs:
        texts = await asyncio.to_thread(lambda of: [*map(of, token_ids)], engine.tokenizer.id_to_token)
    answer = {
        "count": len(token_ids),
        "max_model_len": engine.config.max_model_len,
        "tokens": token_ids,
        "token_strs": texts,
    }
    return web.Response(body=encode_json(answer), content_type="application/json")


async def post_detokenize(http_request: web.Request) -> web.Response:
    state = http_request.app[STATE]
    state.require_engine()
    request = parse_request(await read_body(http_request), DetokenizeRequest)
    engine, _ = state.require_model(request.model)
    if engine.tokenizer is None:
        raise RequestError("this server has no tokenizer")
    if request.tokens:
        check_token_ids(request.tokens, engine.config.vocab_size, "tokens")
    text = await engine.decode(request.tokens)
    return web.Response(body=encode_json({"prompt": text}), content_type="application/json")
