"""Requests that wait to run. No operation costs more than the logarithm of their number, also from the middle.

The order is that of ``Request.queue_key``: priority, arrival, choice. Under the policy "fcfs" all priorities are 0.
A key never changes, so a request that was preempted comes back to the front of its class: whoever ran arrived before
all of its class that still wait.
"""

import heapq
from collections.abc import Iterator

from .request import Request

POLICIES = ("fcfs", "priority")

_Entry = tuple[tuple[int, int, int], int, Request]
"""(queue key, number of the entry, request): the number keeps entries of one request apart."""


class RequestQueue:
    """A heap. A request that leaves from the middle (its client hung up) leaves its entry behind until that comes up.

    When most entries are such, the heap is built anew, which keeps the cost low on average.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._live: dict[int, int] = {}
        """id of a request in here -> number of its entry."""
        self._num_entries = 0
        self.num_prompt_tokens = 0
        """Of all requests in here."""

    def push(self, request: Request) -> None:
        """Queues a request that is not in here, for the first time or again."""
        assert id(request) not in self._live, f"{request} is queued twice"
        self._num_entries += 1
        self._live[id(request)] = self._num_entries
        heapq.heappush(self._heap, (request.queue_key, self._num_entries, request))
        self.num_prompt_tokens += request.num_prompt_tokens

    def first(self) -> Request:
        """The next to run; there has to be one."""
        while not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def remove(self, request: Request) -> None:
        """Takes out one that is in here."""
        del self._live[id(request)]
        self.num_prompt_tokens -= request.num_prompt_tokens
        if len(self._heap) > 2 * len(self._live) + 8:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def __contains__(self, request: Request) -> bool:
        return id(request) in self._live

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they will run; sorts all of them."""
        return (entry[2] for entry in sorted(filter(self._is_live, self._heap), key=lambda entry: entry[:2]))

    def _is_live(self, entry: _Entry) -> bool:
        return self._live.get(id(entry[2])) == entry[1]
