"""Who waits, in what order, and for how long: priorities, bounded preemptions, bounded waiting, limits of the queue."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, expected_tokens, make_request

from octavo.engine import request_queue, scheduler
from octavo.engine.admission import QueueLimits
from octavo.engine.block_budget import MAX_PREEMPTIONS
from octavo.engine.errors import QueueFullError, RequestError
from octavo.engine.messages import AbortRequest, ErrorKind, FinishReason
from octavo.engine.request import Request
from octavo.engine.request_queue import RequestQueue

PROMPT = list(range(100, 110))


def send(harness: Harness, name: str, prompt=PROMPT, priority: int = 0, **params) -> None:
    harness.scheduler.add_request(replace(make_request(name, prompt, **params), priority=priority))


def waiting(number: int, priority: int = 0) -> Request:
    return Request(replace(make_request(f"r{number}", [1, 2]), priority=priority), 0, 0, number)


# ---- the queue ------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove", "again"]), st.integers(-2, 2)), max_size=60))
def test_the_queue_is_a_sorted_list(moves):
    queue, model, gone = RequestQueue(), [], []
    for number, (move, value) in enumerate(moves):
        if move == "push":
            request = waiting(number, value)
        elif move == "again" and gone:
            request = gone.pop(value % len(gone))
        elif move in ("pop", "remove") and model:
            request = queue.first() if move == "pop" else model[value % len(model)]
            assert move == "remove" or request is model[0]
            queue.remove(request)
            model.remove(request)
            gone.append(request)
            continue
        else:
            continue
        queue.push(request)
        model = sorted([*model, request], key=lambda one: one.queue_key)
        assert list(queue) == model
        assert len(queue) == len(model)
        assert queue.num_prompt_tokens == 2 * len(model)
        assert request in queue


def test_leaving_from_the_middle_of_a_long_queue_costs_no_search(monkeypatch):
    """10,000 wait and all leave in a random order: entries are looked at a few times each, not once for each other."""
    queue = RequestQueue()
    requests = [waiting(number, number % 3) for number in range(10_000)]
    for request in requests:
        queue.push(request)
    random.Random(1).shuffle(requests)
    looks = 0
    is_live = RequestQueue._is_live

    def counted(self, entry):
        nonlocal looks
        looks += 1
        return is_live(self, entry)

    monkeypatch.setattr(RequestQueue, "_is_live", counted)
    for request in requests:
        queue.remove(request)
    assert looks < 4 * len(requests)
    assert not queue
    assert len(queue._heap) < 10


def test_one_request_is_not_queued_twice():
    queue, request = RequestQueue(), waiting(1)
    queue.push(request)
    with pytest.raises(AssertionError, match="twice"):
        queue.push(request)


# ---- priorities -----------------------------------------------------------------------------


def test_the_lower_value_runs_earlier_then_the_earlier_arrival():
    harness = Harness(max_num_seqs=1)
    for name, priority in [("a", 5), ("b", 0), ("c", 5), ("d", -3), ("e", 0)]:
        send(harness, name, priority=priority, max_tokens=2)
    harness.run()
    assert [name for name, _ in harness.finished] == ["d", "b", "e", "a", "c"]


def test_the_victim_is_the_least_urgent_and_youngest():
    """The pool holds two and a half of the three requests at their ends."""
    for priorities, victim in [((0, 0, 0), "c"), ((0, 7, 1), "b"), ((9, 9, -1), "b")]:
        harness = Harness(num_blocks=14, budget=40)
        for name, priority in zip("abc", priorities, strict=True):
            send(harness, name, [*PROMPT, ord(name)], priority, max_tokens=12)
        victims = set()
        while harness.scheduler.has_work:
            harness.step()
            victims |= {one.request_id for one in harness.scheduler.requests if one.timing.num_preemptions}
        assert victims == {victim}
        assert all(harness.outputs[name, 0] == expected_tokens([*PROMPT, ord(name)], 12) for name in "abc")


def test_a_preempted_request_waits_in_front_of_its_class_and_behind_more_urgent_ones():
    harness = Harness(num_blocks=10, budget=40, max_num_seqs=2)
    send(harness, "old", max_tokens=20)
    send(harness, "young", max_tokens=16)
    while not harness.scheduler.num_preemptions_total:
        harness.step()
    send(harness, "later", max_tokens=2)
    send(harness, "urgent", priority=-1, max_tokens=2)
    assert [one.request_id for one in harness.scheduler.waiting] == ["urgent", "young", "later"]
    harness.run()


# ---- nobody starves -------------------------------------------------------------------------


class Traffic:
    """Random arrivals over a tiny pool."""

    def __init__(self, seed: int, *, classes: int, ahead: bool) -> None:
        rng = random.Random(seed)
        self.harness = Harness(
            num_blocks=rng.choice([11, 13, 17]),
            budget=rng.randrange(5, 20),
            max_num_seqs=rng.choice([3, 5]),
            caching=rng.random() < 0.5,
            ahead=ahead,
        )
        self.sent: dict[str, tuple[list[int], int, int, int]] = {}
        self.first_scheduled: list[Request] = []
        """In the order of their first admission; choice 0 of each."""
        self.longest_wait = 0
        """Most turns that a request of the most urgent class needed, for each turn that those before it may take."""
        arrivals = sorted(rng.randrange(60) for _ in range(16))
        turn = 0
        while self.harness.core.has_work or arrivals:
            while arrivals and arrivals[0] <= turn:
                arrivals.pop(0)
                prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
                shape = prompt, rng.randrange(1, 20), rng.randrange(classes), rng.choice([1, 1, 1, 2])
                name = f"r{len(self.sent)}"
                self.sent[name] = shape
                send(self.harness, name, prompt, shape[2], max_tokens=shape[1], n=shape[3])
            before = {id(one) for one in self.harness.scheduler.requests if one.admissions}
            everyone = list(self.harness.scheduler.requests)
            self.harness.step()
            new = [one for one in everyone if one.admissions and id(one) not in before and one.index == 0]
            self.first_scheduled += sorted(new, key=lambda one: one.queue_key)
            turn += 1
            assert turn <= self.bound(), "somebody waits longer than all the work there is"

    def bound(self) -> int:
        """Turns that all that was sent may take, one after the other, each computed anew after each preemption."""
        work = sum((len(prompt) + length + 2) * n for prompt, length, _, n in self.sent.values())
        return 60 + (MAX_PREEMPTIONS + 1) * work

    def check(self) -> None:
        for name, (prompt, length, _, n) in self.sent.items():
            for choice in range(n):
                assert self.harness.outputs[name, choice] == expected_tokens(prompt, length, choice)
        for one in self.first_scheduled:
            assert one.finished
        in_class: dict[int, list[int]] = {}
        for one in self.first_scheduled:
            in_class.setdefault(one.source.priority, []).append(one.queue_key[1])
        assert len(self.first_scheduled) == len(self.sent)
        assert all(order == sorted(order) for order in in_class.values()), "one was overtaken in its class"
        assert self.harness.most_preemptions <= MAX_PREEMPTIONS


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), classes=st.sampled_from([1, 3]), ahead=st.booleans())
def test_waiting_and_preemptions_are_bounded(seed, classes, ahead):
    """All finish within the turns that their work may take; in a class none overtakes; preemptions have a limit."""
    Traffic(seed, classes=classes, ahead=ahead).check()


def preemptions_under_waves_of_urgent_requests() -> int:
    """Each wave comes when the request that nobody waits for has just got to run again, and wants nearly all."""
    harness = Harness(num_blocks=20, budget=80, max_num_seqs=3, max_model_len=80)
    send(harness, "poor", priority=5, max_tokens=30)
    (poor,) = harness.scheduler.requests
    waves, admissions = 0, 0
    while harness.core.has_work:
        harness.step()
        if poor.admissions > admissions and waves < 8:
            admissions = poor.admissions
            prompt = [waves] * (4 * (harness.kv.pool.num_free - 1) - 1)
            send(harness, f"urgent{waves}", prompt, max_tokens=8)
            waves += 1
    assert len(harness.outputs["poor", 0]) == 30
    return harness.scheduler.num_preemptions_total


def test_waves_of_urgent_requests_preempt_a_bounded_number_of_times(monkeypatch):
    """And without the promise they would do it each time."""
    assert preemptions_under_waves_of_urgent_requests() == MAX_PREEMPTIONS
    monkeypatch.setattr(scheduler, "keeps_promises", lambda kv, running, request: True)
    assert preemptions_under_waves_of_urgent_requests() > MAX_PREEMPTIONS


def test_a_queue_that_serves_the_youngest_first_is_seen(monkeypatch):
    monkeypatch.setattr(request_queue.heapq, "heappush", lambda heap, entry: heap.insert(0, entry))
    caught = 0
    for seed in range(20):
        try:
            Traffic(seed, classes=1, ahead=False).check()
        except AssertionError:
            caught += 1
    assert caught > 10


def test_a_request_often_preempted_comes_back_when_all_before_it_fit_to_their_ends():
    """Then it may be longer than what the others leave, and still it is not thrown out once more."""
    harness = Harness(num_blocks=12, budget=40, max_num_seqs=3)
    send(harness, "old", max_tokens=24)
    send(harness, "poor", max_tokens=20)
    (poor,) = (one for one in harness.scheduler.requests if one.request_id == "poor")
    poor.timing.num_preemptions = MAX_PREEMPTIONS
    harness.scheduler._num_promised = 1
    while poor.admissions == 0:
        harness.step()
        old = harness.outputs.get(("old", 0), [])
        assert len(old) <= 24
    assert ("old", 0) in harness.finished, "9 and 8 blocks at the end do not fit 11"
    harness.run()
    assert poor.timing.num_preemptions == MAX_PREEMPTIONS


def test_more_urgent_arrivals_wait_while_they_would_push_out_a_promised_one():
    harness = Harness(num_blocks=12, budget=40, max_num_seqs=3)
    send(harness, "poor", priority=5, max_tokens=20)
    (poor,) = harness.scheduler.requests
    poor.timing.num_preemptions = MAX_PREEMPTIONS
    harness.scheduler._num_promised = 1
    harness.step()
    send(harness, "urgent", priority=0, max_tokens=20)
    send(harness, "small", priority=1, max_tokens=2)
    harness.run()
    assert harness.scheduler.num_preemptions_total == 0
    assert next(name for name, _ in harness.finished) == "poor"


# ---- limits ---------------------------------------------------------------------------------


def test_no_more_choices_wait_than_allowed():
    harness = Harness(max_num_seqs=2)
    harness.scheduler.limits = QueueLimits(max_num_reqs=3)
    send(harness, "a", max_tokens=4)
    send(harness, "b", n=3, max_tokens=4)
    with pytest.raises(QueueFullError, match="4 choices run or wait"):
        send(harness, "c", n=2)
    send(harness, "d", max_tokens=4)
    with pytest.raises(QueueFullError):
        send(harness, "e")
    with pytest.raises(RequestError, match="at most 5"):
        send(harness, "f", n=6)
    harness.run()
    assert len(harness.finished) == 5, "nothing that was taken is lost"
    send(harness, "g", max_tokens=4)
    harness.run()


def test_no_more_prompt_tokens_wait_than_allowed():
    harness = Harness(max_num_seqs=1)
    harness.scheduler.limits = QueueLimits(max_num_tokens=15)
    send(harness, "long", list(range(20)), max_tokens=4)
    with pytest.raises(QueueFullError, match="20 prompt tokens wait and this request has 10"):
        send(harness, "a", max_tokens=4)
    harness.step()
    send(harness, "a", max_tokens=4)
    send(harness, "b", [1, 2, 3, 4, 5], max_tokens=4)
    with pytest.raises(QueueFullError):
        send(harness, "c", [1])
    harness.scheduler.abort(AbortRequest(request_id="a"))
    send(harness, "c", [1], max_tokens=4)
    harness.take([])
    outputs = harness.run()
    assert {name for name, _ in outputs} == {"long", "b", "c"}


def test_the_core_tells_refusals_apart():
    harness = Harness(max_num_seqs=1)
    harness.scheduler.limits = QueueLimits(max_num_reqs=0)
    for name in ("a", "a", "b"):
        harness.core.handle(make_request(name, PROMPT))
    harness.core.handle(make_request("c", PROMPT, n=2))
    outputs = {output.request_id: output for output in harness.core.step().outputs if output.error}
    assert {name: (one.error_kind, one.error_param) for name, one in outputs.items()} == {
        "a": (ErrorKind.INVALID, "request_id"),
        "b": (ErrorKind.OVERLOADED, None),
        "c": (ErrorKind.INVALID, "n"),
    }
    assert all(one.finish_reason is FinishReason.ERROR and not one.token_ids for one in outputs.values())
