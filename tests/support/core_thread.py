"""A core in a thread of the test's own process, so that a test can look into it and make it fail."""

import asyncio
import queue
import threading
from contextlib import suppress

from octavo.engine.core import EngineCore
from octavo.engine.errors import EngineDeadError
from octavo.engine.launch import launch_core
from octavo.engine.messages import StepStats
from octavo.engine.wire import decode, encode


class CoreThread:
    """An ``engine.core_client.CoreClient``. All that crosses goes through the wire's codec."""

    identity = "0"

    def __init__(self) -> None:
        self.core: EngineCore | None = None
        self.dead_error: BaseException | None = None
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="core", daemon=True)

    def begin(self, config) -> None:
        pass

    async def start(self, config, frontend, on_outputs, on_death):
        self._loop = asyncio.get_running_loop()
        self._on_outputs, self._on_death = on_outputs, on_death
        self.core, config = await asyncio.to_thread(launch_core, config, frontend.resolved, frontend.vocab_size)
        self._thread.start()
        return config

    def send(self, message) -> None:
        if self.dead_error is not None:
            raise EngineDeadError(f"the engine has stopped: {self.dead_error}") from self.dead_error
        self._inbox.put(decode(encode(message)))

    async def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()

    def stats(self) -> StepStats:
        return self.core.stats() if self.core is not None else StepStats()

    def stalled_s(self) -> float:
        return 0.0

    def stop(self) -> None:
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _run(self) -> None:
        try:
            while self._take_messages():
                if self.core.has_work:
                    self._post(self._on_outputs, decode(encode(self.core.step())))
            self.dead_error = EngineDeadError("the engine was shut down")
        except BaseException as error:
            self.dead_error = error
            self._post(self._on_death, error)

    def _post(self, call, argument) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, argument)

    def _take_messages(self) -> bool:
        block = not self.core.has_work
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if message is None:
                return False
            self.core.handle(message)
            block = False
