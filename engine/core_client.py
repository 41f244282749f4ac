"""The core in a thread of its own: messages go in, one batch of outputs a step comes out.

Nothing but serialisable messages crosses, so that a process can take the thread's place.
"""

import logging
import queue
import threading
from collections.abc import Callable

from .core import EngineCore
from .errors import EngineDeadError
from .messages import AbortRequest, EngineRequest, StepOutputs, StepStats

logger = logging.getLogger(__name__)

Message = EngineRequest | AbortRequest


class CoreThread:
    """Runs the loop of a core; ``on_outputs`` and ``on_death`` are called from its thread."""

    def __init__(
        self,
        core: EngineCore,
        on_outputs: Callable[[StepOutputs], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._core = core
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="octavo-core", daemon=True)
        self.dead_error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        """Hands a message to the core. Raises EngineDeadError once the loop has ended."""
        if self.dead_error is not None:
            raise EngineDeadError(f"the engine has stopped: {self.dead_error}") from self.dead_error
        self._inbox.put(message)

    def stats(self) -> StepStats:
        """Figures of this moment; plain reads of counters, safe from any thread."""
        return self._core.stats()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the loop after the step it is in."""
        self._inbox.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._take_messages():
                if self._core.has_work:
                    self._on_outputs(self._core.step())
            self.dead_error = EngineDeadError("the engine was shut down")
        except BaseException as error:
            logger.exception("the engine loop failed")
            self.dead_error = error
            self._on_death(error)

    def _take_messages(self) -> bool:
        """Takes in what has arrived, waiting while there is nothing to do; False to end."""
        block = not self._core.has_work
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if message is None:
                return False
            self._core.handle(message)
            block = False
