"""One merging slot between the engine's loop and one client: a slow client costs no queue (rule R23)."""

import asyncio

from .outputs import CompletionOutput, RequestOutput
from .sampling_params import OutputKind


def merge_outputs(old: RequestOutput, new: RequestOutput, kind: OutputKind) -> RequestOutput:
    """One output that says what ``old`` and then ``new`` said: deltas are joined, others replaced."""
    if kind is not OutputKind.DELTA:
        return new
    merged = {output.index: output for output in old.outputs}
    for output in new.outputs:
        earlier = merged.get(output.index)
        merged[output.index] = output if earlier is None else _join(earlier, output)
    return RequestOutput(
        request_id=new.request_id,
        prompt=new.prompt,
        prompt_token_ids=new.prompt_token_ids,
        outputs=list(merged.values()),
        finished=new.finished,
        prompt_logprobs=old.prompt_logprobs if new.prompt_logprobs is None else new.prompt_logprobs,
        num_cached_tokens=new.num_cached_tokens,
        metrics=new.metrics,
    )


def _join(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        index=new.index,
        text=old.text + new.text,
        token_ids=old.token_ids + new.token_ids,
        cumulative_logprob=new.cumulative_logprob,
        logprobs=None if new.logprobs is None else (old.logprobs or []) + new.logprobs,
        finish_reason=new.finish_reason,
        stop_reason=new.stop_reason,
    )


class RequestOutputCollector:
    """Holds at most one output, merged of all that the client has not taken yet. For one reader on one event loop."""

    def __init__(self, kind: OutputKind) -> None:
        self._kind = kind
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        self._output = output if self._output is None else merge_outputs(self._output, output, self._kind)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """The next ``get`` after the output that is waiting, and every later one, raises ``error``."""
        self._error = error
        self._wake()

    def get_nowait(self) -> RequestOutput | None:
        """What is waiting, or None. Raises the error given to ``fail``."""
        output, self._output = self._output, None
        if output is None and self._error is not None:
            raise self._error
        return output

    async def get(self) -> RequestOutput:
        """Waits for the next output. Raises the error given to ``fail``."""
        while (output := self.get_nowait()) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return output

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
