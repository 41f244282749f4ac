"""From checked prompts to outputs: one bounded, merged stream whose closing aborts what is left."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ..engine.messages import FinishReason
from ..engine.outputs import CompletionOutput, RequestOutput
from ..engine.sampling_params import SamplingParams
from .errors import ApiError, unavailable
from .protocol.responses import usage
from .state import ServerState, new_id

_QUEUE_OUTPUTS = 64
"""Most outputs that wait for the writer; beyond that each request waits in the engine's own merging slot."""


def aborted() -> ApiError:
    """For an engine that, told to abort a request, ended it without any output."""
    return unavailable("the request was aborted before it began")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and how to go on from it. ``text`` is None when ids were given."""

    token_ids: list[int]
    text: str | None
    sampling_params: SamplingParams


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request, counted from ids and never from chunks."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)

    def add(self, prompt_index: int, output: RequestOutput, count_choices: bool = True) -> None:
        if output.num_cached_tokens:
            self.cached_tokens[prompt_index] = max(self.cached_tokens.get(prompt_index, 0), output.num_cached_tokens)
        if count_choices:
            for choice in output.outputs:
                self.completion_tokens += len(choice.token_ids)

    def encode(self) -> dict[str, Any]:
        return usage(self.prompt_tokens, self.completion_tokens, sum(self.cached_tokens.values()))


def check_finish(choice: CompletionOutput) -> None:
    """Raises ApiError 500 for a choice that the engine gave up; its stop_reason says why."""
    if choice.finish_reason == FinishReason.ERROR:
        raise ApiError(500, f"the engine could not finish this request: {choice.stop_reason or 'no reason is known'}")


async def generate(
    state: ServerState, prompts: Sequence[Prompt], *, priority: int = 0, cache_salt: str | None = None
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(prompt index, output) as they come. Close it (``aclosing``) to abort what has not finished.

    Raises what the engine raises: RequestError, QueueFullError, EngineDeadError.
    """
    engine = state.require_engine()
    base_id = new_id()
    ids = [f"{base_id}-{index}" for index in range(len(prompts))]
    with state.admit(engine, sum(prompt.sampling_params.n for prompt in prompts)):
        iterators = [
            engine.generate(item.token_ids, item.sampling_params, request_id, priority=priority, cache_salt=cache_salt)
            for item, request_id in zip(prompts, ids, strict=True)
        ]
        state.active_ids.update(ids)
        try:
            async with aclosing(_merge(iterators)) as merged:
                async for indexed in merged:
                    yield indexed
        finally:
            state.active_ids.difference_update(ids)


async def collect(outputs: AsyncIterator[tuple[int, RequestOutput]], num_prompts: int) -> dict[int, RequestOutput]:
    """prompt index -> the output, with all its choices, of requests that ask for FINAL_ONLY."""
    results: dict[int, RequestOutput] = {}
    async for index, output in outputs:
        for choice in output.outputs:
            check_finish(choice)
        results[index] = output
    if len(results) < num_prompts:
        raise aborted()
    return results


async def _merge(
    iterators: Sequence[AsyncIterator[RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    if len(iterators) == 1:
        try:
            async for output in iterators[0]:
                yield 0, output
        finally:
            await _close(iterators[0])
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(_QUEUE_OUTPUTS)
    pumps = [asyncio.create_task(_pump(index, iterator, queue)) for index, iterator in enumerate(iterators)]
    try:
        unfinished = len(pumps)
        while unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        # A pump that was cancelled before its first step has closed nothing.
        for iterator in iterators:
            await _close(iterator)


async def _pump(
    index: int,
    iterator: AsyncIterator[RequestOutput],
    queue: "asyncio.Queue[tuple[int, RequestOutput] | Exception | None]",
) -> None:
    try:
        async for output in iterator:
            await queue.put((index, output))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)


async def _close(iterator: AsyncIterator[RequestOutput]) -> None:
    aclose = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()
