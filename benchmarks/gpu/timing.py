"""How a chain of calls is timed.

``call`` takes the last call's result, so that the calls run one after the other. They are dispatched without waiting,
so that the host's work hides behind the device's, and the clock stops when the last one's result is there. One repeat
is as many calls as take ``target_s``; the figure is the median of the repeats, after calls that are not counted: the
first ones load modules and instantiate CUDA graphs. Calls that take long are repeated less often.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WARM_UP_CALLS = 3
LONG_CALL_S, LONG_REPEATS = 0.3, 3
"""A call that takes longer is repeated less often: its spread is small, and the check has minutes only."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    median_s: float
    spread: float
    """(largest - smallest) / median over the repeats."""
    calls: int
    """In one repeat."""

    def microseconds(self, per: int = 1) -> dict[str, float]:
        """As the values of a figure, of one of ``per`` operations in a call."""
        return {"microseconds": self.median_s / per * 1e6, "spread": self.spread, "calls": self.calls * per}


def time_chain(
    call: Callable[[Any], Any],
    carry: Any,
    wait: Callable[[Any], Any],
    *,
    smoke: bool,
    repeats: int = 7,
    target_s: float = 0.08,
) -> Timing:
    """Times ``carry = call(carry)``; ``wait(carry)`` returns when the device has finished it."""
    warm_up, repeats, target_s = (1, 2, 0.0) if smoke else (WARM_UP_CALLS, repeats, target_s)
    for _ in range(warm_up):
        carry = call(carry)
    wait(carry)
    began = time.perf_counter()
    carry = call(carry)
    wait(carry)
    one_s = time.perf_counter() - began
    calls = max(1, min(2000, round(target_s / one_s)))
    if one_s > LONG_CALL_S:
        repeats = min(repeats, LONG_REPEATS)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls):
            carry = call(carry)
        wait(carry)
        seconds.append((time.perf_counter() - began) / calls)
    median = statistics.median(seconds)
    return Timing(median, (max(seconds) - min(seconds)) / median, calls)
