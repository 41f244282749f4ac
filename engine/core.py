"""The engine's loop: schedule, dispatch, resolve, update. No text and no tokenizer in here."""

import logging

from .compile_cache import COMPILES
from .errors import QueueFullError, RequestError
from .messages import AbortRequest, ChoiceOutput, EngineRequest, ErrorKind, FinishReason, StepOutputs, StepStats
from .model_runner import ModelRunner, StepHandle
from .scheduler import Scheduler
from .scheduler_output import SampledRows, SchedulerOutput

logger = logging.getLogger(__name__)


class StepFailedError(RuntimeError):
    """The device, or what is sent to it, failed in ``plan``; its cause says how."""

    def __init__(self, plan: SchedulerOutput) -> None:
        super().__init__("a step failed")
        self.plan = plan


class EngineCore:
    """Messages in, one ``StepOutputs`` a step out."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, *, async_scheduling: bool = True) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._async_scheduling = async_scheduling
        self._unread: StepHandle | None = None
        """A step that was dispatched before the results of the one before it were read."""
        self._pending: list[ChoiceOutput] = []
        """Outputs that arose between steps."""
        self._generation_tokens_shown = 0
        self._step_failures_total = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._pending)

    def handle(self, message: EngineRequest | AbortRequest) -> None:
        """Takes a message in. A request that is refused here comes back as an output with its error."""
        if isinstance(message, AbortRequest):
            self._pending += self.scheduler.abort(message)
            return
        try:
            self.scheduler.add_request(message)
        except (RequestError, QueueFullError) as error:
            self._pending.append(_refusal(message, error))

    def step(self) -> StepOutputs:
        """One turn of the loop: the results of one step, read after the next one was dispatched.

        Without work it only hands out what is pending.
        """
        outputs, self._pending = self._pending, []
        num_tokens = 0
        handle, self._unread = self._unread, None
        try:
            if handle is None or not handle.plan.is_live:  # all of its requests have ended: nobody needs the results
                handle = self._dispatch()
            if handle is not None:
                if self._async_scheduling:
                    self._unread = self._dispatch(ahead=True)
                outputs += self.scheduler.update(handle.plan, self._resolve(handle))
                num_tokens = handle.plan.num_tokens
        except StepFailedError as failure:
            outputs += self._retry(failure, handle)
        return StepOutputs(outputs=outputs, stats=self.stats(num_tokens))

    def _dispatch(self, *, ahead: bool = False) -> StepHandle | None:
        """Plans a step and sends it to the device; None when there is nothing to do, or nothing yet."""
        plan = self.scheduler.schedule(ahead=ahead)
        if plan is None:
            return None
        try:
            return self.runner.dispatch(plan)
        except Exception as error:
            raise StepFailedError(plan) from error

    def _resolve(self, handle: StepHandle) -> SampledRows:
        try:
            sampled = self.runner.resolve(handle)
        except Exception as error:
            raise StepFailedError(handle.plan) from error
        self.scheduler.isolation.survived(handle.plan)
        return sampled

    def _retry(self, failure: StepFailedError, handle: StepHandle | None) -> list[ChoiceOutput]:
        """After a step that failed: rebuilds the KV pool and queues the running requests again, with their tokens.

        Steps in flight are lost with it; nothing of them has gone out. An empty step shows whether the device works
        at all: if it does not, that error goes up and ends the engine, as does a failure that no request explains.
        """
        logger.error("a step failed; the KV cache is rebuilt and its requests run again", exc_info=failure.__cause__)
        self._step_failures_total += 1
        unread, self._unread = self._unread, None
        lost = [failure.plan, *(other.plan for other in (handle, unread) if other is not None)]
        self.runner.reset()
        self.runner.probe()
        ended = self.scheduler.recover(lost)
        for output in ended:
            logger.error("request %s is given up: its steps fail when it runs alone", output.request_id)
        return ended

    def recover(self) -> None:
        """After a step that failed or was interrupted: ends every request without a word and rebuilds the KV pool.

        The step may have consumed the device state, and its results are unknown, so no KV is kept.
        """
        for request in list(self.scheduler.requests):
            self.scheduler.finish(request, FinishReason.ABORT)
        self._pending.clear()
        self._unread = None
        self.runner.reset()
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes, on the device and in host memory; False while requests hold blocks."""
        return self.scheduler.kv.reset_cache()

    def stats(self, num_scheduled_tokens: int = 0) -> StepStats:
        scheduler = self.scheduler
        # Tokens past a stop string are taken back, but a counter must not fall.
        self._generation_tokens_shown = max(self._generation_tokens_shown, scheduler.generation_tokens_total)
        return StepStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.kv.pool.usage,
            num_scheduled_tokens=num_scheduled_tokens,
            prompt_tokens_total=scheduler.prompt_tokens_total,
            prompt_tokens_computed_total=scheduler.prompt_tokens_computed_total,
            generation_tokens_total=self._generation_tokens_shown,
            prefix_cache_queries_total=scheduler.kv.queries_total,
            prefix_cache_hits_total=scheduler.kv.hits_total - scheduler.kv.host_hits_total,
            external_prefix_cache_queries_total=scheduler.kv.host_queries_total,
            external_prefix_cache_hits_total=scheduler.kv.host_hits_total,
            num_preemptions_total=scheduler.num_preemptions_total,
            compiles_after_ready_total=COMPILES.after_ready,
            step_failures_total=self._step_failures_total,
        )


def _refusal(message: EngineRequest, error: RequestError | QueueFullError) -> ChoiceOutput:
    """One output, for all choices: the request has not come in."""
    return ChoiceOutput(
        request_id=message.request_id,
        index=0,
        token_ids=[],
        finish_reason=FinishReason.ERROR,
        error=str(error),
        error_kind=ErrorKind.INVALID if isinstance(error, RequestError) else ErrorKind.OVERLOADED,
        error_param=error.param if isinstance(error, RequestError) else None,
    )
