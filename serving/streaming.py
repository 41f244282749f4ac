"""One way to stream: the first output before the status, chunks, usage, end (rules R7 and R8)."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from aiohttp import web

from ..engine.outputs import CompletionOutput, RequestOutput
from .generation import Usage, aborted, check_finish
from .protocol.requests import StreamOptions
from .protocol.responses import encode_json
from .sse import EventStream, frame

logger = logging.getLogger(__name__)

Chunk = dict[str, Any]


class ChunkBuilder(Protocol):
    """Makes the chunks of one API; keeps what it needs from chunk to chunk."""

    def start(self) -> list[Chunk]:
        """Chunks before the first output."""
        ...

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[Chunk]:
        """Chunks of one output: at most one per choice."""
        ...

    def usage_chunk(self) -> Chunk:
        """A chunk with no choices, for the usage at the end."""
        ...


def has_news(choice: CompletionOutput, wants_logprobs: bool, wants_ids: bool) -> bool:
    """Whether a choice's delta is worth a chunk: empty content deltas are not sent."""
    return bool(choice.text or choice.finished or ((wants_logprobs or wants_ids) and choice.token_ids))


async def stream_response(
    request: web.Request,
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
    builder: ChunkBuilder,
    usage: Usage,
    options: StreamOptions | None,
    stall_timeout_s: float,
    count_choices: bool = True,
) -> web.StreamResponse:
    """Streams ``outputs``. Errors before the first output are raised, later ones end the stream as an event."""
    include_usage = options is not None and bool(options.include_usage)
    continuous = options is not None and bool(options.continuous_usage_stats)
    events = EventStream(request, stall_timeout_s)

    def encode(chunk: Chunk) -> bytes:
        if continuous:
            chunk["usage"] = usage.encode()
        elif include_usage:
            chunk["usage"] = None
        return frame(encode_json(chunk))

    pending: list[bytes] = []
    started = False
    try:
        async with aclosing(outputs):
            async for index, output in outputs:
                for choice in output.outputs:
                    check_finish(choice)
                usage.add(index, output, count_choices)
                if not started:
                    started = True
                    pending.extend(map(encode, builder.start()))
                pending.extend(map(encode, builder.chunks(index, output)))
                if pending:
                    await events.send(b"".join(pending))
                    pending.clear()
        if not started:
            raise aborted()
        if include_usage:
            await events.send(frame(encode_json(builder.usage_chunk() | {"usage": usage.encode()})))
        return await events.end()
    except ConnectionError as error:
        logger.info("stream dropped: %s", error)
        raise
    except Exception as error:
        return await events.fail(error)
