"""Requests that wait to run, in the order of the scheduling policy. No operation costs more with a longer queue.

A request's ``queue_key`` is (priority, number of arrival, choice). It never changes, so a request that was preempted
comes back to the front of its class: whoever ran arrived before all of its class that still wait.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from .request import Request

POLICIES = ("fcfs", "priority")


class RequestQueue(Protocol):
    """Holds a request at most once; ``first`` and ``pop`` need one to be there, ``remove`` needs its own."""

    num_prompt_tokens: int
    """Of all requests in here."""

    def push(self, request: Request) -> None:
        """Queues a request that has just arrived."""
        ...

    def requeue(self, request: Request) -> None:
        """Queues one that ran, or was about to: it comes first in its class."""
        ...

    def first(self) -> Request: ...

    def pop(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they will run."""
        ...


class FCFSQueue:
    """First come, first served. All operations take constant time, from the middle too (a client that hangs up)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()
        self.num_prompt_tokens = 0

    def push(self, request: Request) -> None:
        self._requests[id(request)] = request
        self.num_prompt_tokens += request.num_prompt_tokens

    def requeue(self, request: Request) -> None:
        self.push(request)
        self._requests.move_to_end(id(request), last=False)

    def first(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        request = self.first()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        del self._requests[id(request)]
        self.num_prompt_tokens -= request.num_prompt_tokens

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


_Entry = tuple[tuple[int, int, int], int, Request]
"""(queue key, number of the entry, request): the number keeps entries of one request apart."""


class PriorityQueue:
    """The lowest priority value first, then the earliest arrival: a heap, O(log n) for each operation.

    A request removed from the middle leaves its entry in the heap until it comes up; when most entries are such, the
    heap is built anew, which keeps the average cost.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._live: dict[int, int] = {}
        """id of the request -> number of its entry."""
        self._num_entries = 0
        self.num_prompt_tokens = 0

    def push(self, request: Request) -> None:
        self._num_entries += 1
        self._live[id(request)] = self._num_entries
        heapq.heappush(self._heap, (request.queue_key, self._num_entries, request))
        self.num_prompt_tokens += request.num_prompt_tokens

    def requeue(self, request: Request) -> None:
        self.push(request)

    def first(self) -> Request:
        while not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Request:
        request = self.first()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        del self._live[id(request)]
        self.num_prompt_tokens -= request.num_prompt_tokens
        if len(self._heap) > 2 * len(self._live) + 8:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return (entry[2] for entry in sorted(filter(self._is_live, self._heap), key=lambda entry: entry[:2]))

    def _is_live(self, entry: _Entry) -> bool:
        return self._live.get(id(entry[2])) == entry[1]


def make_queue(policy: str) -> RequestQueue:
    """An empty queue for one of ``POLICIES``."""
    return PriorityQueue() if policy == "priority" else FCFSQueue()
