"""Notices an engine that lives but does not get on: work exists and no figure has changed for too long (rule R25)."""

import time
from collections.abc import Callable

from ..engine.messages import StepStats


class ProgressWatch:
    """``stuck`` is true from ``timeout_s`` seconds without progress until there is some."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._figures: tuple[int, ...] = ()
        self._changed_s = clock()
        self.stuck = False

    def update(self, stats: StepStats, stalled_s: float = 0.0) -> None:
        """Takes a reading; once a second is enough. ``stalled_s``: how long the core has given no sign of life."""
        figures = (
            stats.prompt_tokens_computed_total,
            stats.generation_tokens_total,
            stats.num_preemptions_total,
            stats.num_running,
            stats.num_waiting,
        )
        now_s = self._clock()
        if figures != self._figures or not (stats.num_running or stats.num_waiting):
            self._figures, self._changed_s = figures, now_s
        self.stuck = max(now_s - self._changed_s, stalled_s) > self._timeout_s
