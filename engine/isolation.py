"""Which request made a step fail. A step says that it failed, not why; so its requests run alone, one after the other.

A request is given up only if it failed twice and the second time alone in its step: nobody pays for a neighbour.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from .request import Request
from .scheduler_output import SchedulerOutput

MAX_GROUP_FAILURES = 3
"""Failures of steps with several requests, none of which fails alone, in a row: then it is not the requests."""


class UnexplainedFailureError(RuntimeError):
    """Steps keep failing and no request is to blame: the engine has to end."""


class Isolation:
    """Requests under suspicion. Each runs alone until it has drawn a token, which clears it."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()
        self._num_group_failures = 0

    @property
    def suspect(self) -> Request | None:
        """The request that has to run alone now; None when nobody is under suspicion."""
        while self._queue and (self._queue[0].finished or not self._queue[0].suspected):
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def judge(self, lost: Iterable[SchedulerOutput]) -> Request | None:
        """Takes in that the steps ``lost`` failed, together; gives the request that is to blame, if it is clear.

        Call it while the requests of ``lost`` still hold what they held in the step. Raises UnexplainedFailureError.
        """
        involved = {id(row.request): row.request for plan in lost for row in plan.rows if not row.request.finished}
        requests = sorted(involved.values(), key=lambda request: request.queue_key)
        for request in requests:
            request.num_failures += 1
        if len(requests) == 1 and requests[0].num_failures > 1:
            self._num_group_failures = 0
            return requests[0]
        if len(requests) > 1:
            self._num_group_failures += 1
            if self._num_group_failures >= MAX_GROUP_FAILURES:
                raise UnexplainedFailureError(
                    f"{self._num_group_failures} steps of several requests failed, and each of the requests runs alone"
                )
        self._suspect(requests)
        return None

    def survived(self, plan: SchedulerOutput) -> None:
        """Takes in that a step gave its results."""
        if len(plan.rows) > 1:
            self._num_group_failures = 0

    def _suspect(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.suspected:
                request.suspected = True
                self._queue.append(request)
