"""``AsyncLLM``: many requests at once, each an async iterator; what the server runs on.

The text is made here; the model runs in the core's process (``core_client``). This module never imports jax.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from .args import EngineArgs
from .config import EngineConfig
from .core_client import CoreClient, OwnCore
from .errors import EngineDeadError, RequestError
from .frontend import open_model
from .input_processor import InputProcessor, Prompt, default_sampling_params
from .messages import AbortRequest, StepOutputs, StepStats
from .metrics import NullStatSink, StatSink
from .output_collector import RequestOutputCollector
from .output_processor import OutputProcessor
from .outputs import RequestOutput
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
TEXT_THREADS = 2
"""Threads for tokenising and templates, off the event loop (rule R24)."""


class AsyncLLM:
    """An engine beside an event loop. ``await start()`` first; then ``generate`` from that loop.

    ``config``, ``tokenizer`` and ``default_sampling_params`` are there once ``start`` has returned. ``core`` is the
    core to use; None starts one, in a process that ends with this one at the latest.
    """

    def __init__(self, args: EngineArgs, *, stat_sink: StatSink | None = None, core: CoreClient | None = None) -> None:
        self._args = args
        self._config = EngineConfig.from_args(args)
        self._stat_sink = stat_sink or NullStatSink()
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="octavo-text")
        self._core: CoreClient = core or OwnCore()
        self._started = False
        self._collectors: dict[str, RequestOutputCollector] = {}
        self._engine_ids: dict[str, str] = {}
        """The caller's id -> the engine's own (rule R22)."""
        self._aborted: set[str] = set()
        """Engine ids of open requests that were aborted, perhaps before the core heard of them."""
        self._ids = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self._death: BaseException | None = None
        self._closed = False
        self.tokenizer: Tokenizer | None = None
        self.default_sampling_params: dict[str, Any] = {}

    # ---- life -------------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def ready(self) -> bool:
        """Loaded, warm and alive."""
        return self._started and self.dead_error is None

    @property
    def dead_error(self) -> BaseException | None:
        return self._death or self._core.dead_error

    async def start(self) -> None:
        """Starts the core and waits until it has loaded the model and is warm. Raises ConfigError."""
        self._loop = asyncio.get_running_loop()
        args, core = self._args, self._core
        try:
            core.begin(self._config)
            frontend = await self._in_pool(
                lambda: open_model(
                    self._config, skip_tokenizer=args.skip_tokenizer_init, chat_template=args.chat_template
                )
            )
            self.default_sampling_params = default_sampling_params(
                frontend.resolved.config.sampling_defaults, args.generation_config, args.override_generation_config
            )
            self._config = await core.start(self._config, frontend, self._take_outputs, self._fail_all)
        except BaseException:
            core.stop()
            raise
        self.tokenizer = frontend.tokenizer
        self._inputs = InputProcessor(self._config, frontend.tokenizer)
        self._outputs = OutputProcessor(frontend.tokenizer, self._stat_sink)
        self._started = True

    def shutdown(self) -> None:
        """Ends the engine; requests still open get EngineDeadError. May be called from any thread, and again."""
        self._closed = True
        self._core.stop()
        if self._started:
            self._on_loop(self._fail_all, EngineDeadError("the engine was shut down"))
        self._pool.shutdown(wait=False)

    async def wait_drained(self, timeout_s: float) -> bool:
        """Waits until no request is open; False if some are left after ``timeout_s`` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return self._idle.is_set()
        return True

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine cannot serve."""
        if not self.ready:
            raise EngineDeadError("the engine is not running") from self.dead_error

    def stats(self) -> StepStats:
        return self._core.stats()

    def stalled_s(self) -> float:
        """Seconds since the core has done anything: finished a step or, without work, looked for some."""
        return self._core.stalled_s()

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False, and nothing done, while requests hold blocks."""
        return await self._running_core().reset_prefix_cache()

    # ---- requests ---------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request, as ``sampling_params.output_kind`` says; leaving the iterator early aborts.

        ``request_id`` is the caller's label, unique among open requests. Raises RequestError for
        what cannot be served, QueueFullError when too many wait, and EngineDeadError when the engine ends.
        """
        core = self._running_core()
        if not isinstance(sampling_params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {type(sampling_params).__name__}")
        if request_id in self._engine_ids:
            raise RequestError(f"request id {request_id!r} is already in use", "request_id")
        engine_id = f"{core.identity}-{next(self._ids)}"
        collector = RequestOutputCollector(sampling_params.output_kind)
        self._open(request_id, engine_id, collector)
        finished = False
        try:
            request, text = await self._in_pool(
                lambda: self._inputs.make_request(
                    engine_id, prompt, sampling_params, priority=priority, cache_salt=cache_salt
                )
            )
            self._outputs.add_request(request, text)
            if engine_id in self._aborted:
                self._abort_here(engine_id)
            else:
                core.send(request)
            while not finished:
                output = await collector.get()
                finished = output.finished
                output.request_id = request_id
                yield output
        finally:
            self._close(request_id, engine_id, abort=not finished)

    async def abort(self, request_id: str) -> None:
        """Ends a request by the caller's id; its iterator ends with finish reason abort. Unknown ids are ignored."""
        engine_id = self._engine_ids.get(request_id)
        if engine_id is None:
            return
        self._aborted.add(engine_id)
        self._tell_core(AbortRequest(request_id=engine_id))
        self._abort_here(engine_id)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self._need_tokenizer()
        return await self._in_pool(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def decode(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._need_tokenizer()
        return await self._in_pool(lambda: tokenizer.decode(token_ids, skip_special_tokens=False))

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation under the model's chat template. Raises RequestError."""
        tokenizer = self._need_tokenizer()
        return await self._in_pool(lambda: tokenizer.render_chat(messages, **options))

    # ---- inside -----------------------------------------------------------------------------

    async def _in_pool(self, work: Callable[[], Result]) -> Result:
        """Runs ``work`` in a text thread. Raises EngineDeadError if it has not begun by the time of a shutdown."""

        def guarded() -> Result:
            if self._closed:
                raise EngineDeadError("the engine was shut down")
            return work()

        try:
            future = asyncio.get_running_loop().run_in_executor(self._pool, guarded)
        except RuntimeError as error:  # the pool takes no more
            raise EngineDeadError("the engine was shut down") from error
        return await future

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        """Calls on the loop's thread. A loop that is closed has nobody left who waits."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    def _running_core(self) -> CoreClient:
        if self.dead_error is not None:
            raise EngineDeadError(f"the engine has stopped: {self.dead_error}") from self.dead_error
        if not self._started:
            raise EngineDeadError("the engine has not been started")
        return self._core

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer: send token ids")
        return self.tokenizer

    def _open(self, request_id: str, engine_id: str, collector: RequestOutputCollector) -> None:
        self._engine_ids[request_id] = engine_id
        self._collectors[engine_id] = collector
        self._idle.clear()

    def _close(self, request_id: str, engine_id: str, *, abort: bool) -> None:
        self._collectors.pop(engine_id, None)
        self._engine_ids.pop(request_id, None)
        self._aborted.discard(engine_id)
        if not self._collectors:
            self._idle.set()
        if abort:
            self._tell_core(AbortRequest(request_id=engine_id))
            self._outputs.abort(engine_id)

    def _abort_here(self, engine_id: str) -> None:
        """Ends a request on this side of the core; its iterator gets what there was."""
        final = self._outputs.abort(engine_id)
        collector = self._collectors.get(engine_id)
        if final is not None and collector is not None:
            collector.put(final)

    def _tell_core(self, abort: AbortRequest) -> None:
        with suppress(EngineDeadError):
            self._core.send(abort)

    def _take_outputs(self, outputs: StepOutputs) -> None:
        """Passes one step's outputs on. Where that fails they are lost, so the engine ends: nobody waits for ever."""
        if self._death is not None:
            return
        try:
            processed = self._outputs.process(outputs)
        except Exception as error:
            logger.exception("a step's outputs could not be processed")
            self._fail_all(error)
            self._core.stop()
            return
        for abort in processed.aborts:
            self._tell_core(abort)
        for request_id, refusal in processed.refusals.items():
            if (refused := self._collectors.get(request_id)) is not None:
                refused.fail(refusal)
        for output in processed.request_outputs:
            collector = self._collectors.get(output.request_id)
            if collector is not None:
                collector.put(output)

    def _fail_all(self, error: BaseException) -> None:
        self._death = self._death or error
        if not self._started:
            return
        for collector in self._collectors.values():
            collector.fail(EngineDeadError(f"the engine has stopped: {error}"))
        self._outputs.fail_all(error)
