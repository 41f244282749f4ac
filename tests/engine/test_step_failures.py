"""Steps that fail: their requests run again and get the same tokens, and only the one to blame is given up."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import FakeRunner, Harness, expected_tokens

from octavo.engine import isolation
from octavo.engine.isolation import UnexplainedFailureError
from octavo.engine.messages import AbortRequest, ErrorKind

PROMPT = list(range(100, 110))


class DeviceError(RuntimeError):
    pass


class FlakyRunner(FakeRunner):
    """Steps fail when they are sent or when they are read; what the pool held is gone then."""

    def __init__(self, device):
        super().__init__(device)
        self.poison: dict[str, int] = {}
        """Request id -> output tokens from which on each of its steps fails."""
        self.bad_pairs: list[set[str]] = []
        """Requests whose steps fail when they run together."""
        self.transient: set[int] = set()
        """Numbers of steps of several requests that fail once."""
        self.at_dispatch = False
        self.gone = False
        self.num_failed = self.num_resets = 0

    def _check(self, plan, number):
        ids = {row.request.request_id for row in plan.rows}
        done = {row.request.request_id: row.start + row.num_tokens - row.request.num_prompt_tokens for row in plan.rows}
        poisoned = any(done[one] >= self.poison[one] for one in ids & self.poison.keys())
        once = len(plan.rows) > 1 and number in self.transient
        if once or poisoned or any(pair <= ids for pair in self.bad_pairs):
            self.num_failed += 1
            raise DeviceError("RESOURCE_EXHAUSTED")

    def dispatch(self, plan):
        if self.at_dispatch:
            self._check(plan, self.num_steps + 1)
        return super().dispatch(plan)

    def resolve(self, handle):
        if not self.at_dispatch:
            self._check(handle.plan, handle.number)
        return super().resolve(handle)

    def reset(self):
        if self.gone:
            raise DeviceError("the device is gone")
        self.num_resets += 1
        self.forget()
        self.device.pool[:] = -1
        self.device.tables[:] = 0

    def probe(self):
        pass


def make(**options) -> tuple[Harness, FlakyRunner]:
    harness = Harness(**options)
    runner = FlakyRunner(harness.device)
    harness.runner = harness.core.runner = runner
    return harness, runner


def run(harness: Harness) -> None:
    harness.run()
    harness.kv.reset_cache()
    harness.scheduler.check_integrity()
    assert harness.scheduler._num_promised == 0
    assert harness.scheduler.isolation.suspect is None


@pytest.mark.parametrize("at_dispatch", [False, True], ids=["read", "sent"])
@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
def test_a_step_that_fails_once_changes_no_token(ahead, at_dispatch):
    for number in range(1, 12):
        harness, runner = make(ahead=ahead)
        runner.transient, runner.at_dispatch = {number}, at_dispatch
        for name in "abc":
            harness.add(name, [*PROMPT, ord(name)], max_tokens=6, n=2 if name == "b" else 1)
        run(harness)
        for name in "abc":
            for choice in range(2 if name == "b" else 1):
                expected = expected_tokens([*PROMPT, ord(name)], 6, choice)
                assert harness.outputs[name, choice] == expected
                assert harness.finished[name, choice] == "length"
        assert runner.num_resets == runner.num_failed


@pytest.mark.parametrize("position", [-5, 0, 1, 4])
@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
def test_the_request_to_blame_fails_alone(position, ahead):
    """In its prompt, at its first token, later; whoever ran beside it gets all of its tokens."""
    harness, runner = make(ahead=ahead, num_blocks=30)
    runner.poison = {"bad": position}
    for name in ("a", "bad", "c", "d"):
        harness.add(name, [*PROMPT, len(name)], max_tokens=8)
    run(harness)
    for name in "acd":
        assert harness.outputs[name, 0] == expected_tokens([*PROMPT, 1], 8)
    assert harness.finished["bad", 0] == "error"
    assert harness.outputs["bad", 0] == expected_tokens([*PROMPT, 3], max(0, position))
    assert runner.num_failed == 2


def test_the_error_says_what_kind_it_is():
    harness, runner = make()
    runner.poison = {"bad": 0}
    harness.add("bad", PROMPT)
    outputs = []
    while harness.core.has_work:
        outputs += harness.core.step().outputs
    (output,) = outputs
    assert output.error_kind is ErrorKind.FAILED
    assert "whenever this request runs" in output.error
    assert runner.num_failed == 2, "one failure may be chance: it runs once more"


def test_several_to_blame_are_all_found():
    harness, runner = make(num_blocks=40, max_num_seqs=8)
    runner.poison = {"b1": 0, "b2": 3, "b3": -3, "b4": 0}
    for name in ("a", "b1", "b2", "c", "b3", "b4", "d"):
        harness.add(name, PROMPT, max_tokens=8)
    run(harness)
    assert {name for name, _ in harness.finished if harness.finished[name, 0] == "error"} == set(runner.poison)
    assert all(harness.outputs[name, 0] == expected_tokens(PROMPT, 8) for name in "acd")


def test_an_aborted_suspect_ends_the_isolation():
    harness, runner = make()
    runner.transient = {2}
    harness.add("a", PROMPT)
    harness.add("b", PROMPT)
    while not runner.num_failed:
        harness.step()
    suspect = harness.scheduler.isolation.suspect
    harness.core.handle(AbortRequest(request_id=suspect.request_id))
    other = "b" if suspect.request_id == "a" else "a"
    run(harness)
    assert harness.finished == {(suspect.request_id, 0): "abort", (other, 0): "length"}
    assert harness.outputs[other, 0] == expected_tokens(PROMPT, 8)


def test_a_failure_that_no_request_explains_ends_the_engine():
    harness, runner = make()
    runner.bad_pairs = [{"a", "b"}]
    harness.add("a", PROMPT, max_tokens=20)
    harness.add("b", PROMPT, max_tokens=20)
    with pytest.raises(UnexplainedFailureError):
        run(harness)
    assert runner.num_failed == isolation.MAX_GROUP_FAILURES


def test_a_device_that_is_gone_ends_the_engine():
    for broken in ("reset", "probe"):
        harness, runner = make()
        runner.transient = {2}

        def fail():
            raise DeviceError("gone")

        setattr(runner, broken, fail)
        harness.add("a", PROMPT)
        harness.add("b", PROMPT)
        with pytest.raises(DeviceError):
            run(harness)


class RandomPlay:
    """Arrivals over a tiny pool, n, preemption, failures by chance and by poison."""

    def __init__(self, seed: int, *, ahead: bool, at_dispatch: bool) -> None:
        rng = random.Random(seed)
        self.harness, self.runner = make(
            num_blocks=14, budget=rng.randrange(5, 20), ahead=ahead, caching=rng.random() < 0.7
        )
        self.runner.at_dispatch = at_dispatch
        number = 0
        for _ in range(5):  # far enough apart that each has been worked off before the next
            number += rng.randrange(30, 60)
            self.runner.transient.add(number)
        self.sent = {}
        for index in range(10):
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
            self.sent[f"r{index}"] = (rng.randrange(40), prompt, rng.randrange(1, 12), rng.choice([1, 1, 2, 5]))
            if rng.random() < 0.15:
                self.runner.poison[f"r{index}"] = rng.randrange(-3, 6)
        turn = 0
        while self.harness.core.has_work or turn < 41:
            for name, (when, prompt, max_tokens, n) in self.sent.items():
                if when == turn:
                    self.harness.add(name, prompt, max_tokens=max_tokens, n=n)
            self.harness.step()
            turn += 1
            assert turn < 3000, "no end in sight"

    def check(self) -> None:
        harness = self.harness
        for name, (_, prompt, max_tokens, n) in self.sent.items():
            for choice in range(n):
                expected, found = expected_tokens(prompt, max_tokens, choice), harness.outputs.get((name, choice), [])
                if name in self.runner.poison:
                    assert found == expected[: len(found)], "a token came twice, or was lost"
                else:
                    assert (found, harness.finished[name, choice]) == (expected, "length")
        assert harness.kv.pool.num_free == harness.kv.pool.num_usable


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), ahead=st.booleans(), at_dispatch=st.booleans())
def test_random_failures_take_nothing_from_the_innocent(seed, ahead, at_dispatch):
    RandomPlay(seed, ahead=ahead, at_dispatch=at_dispatch).check()


def test_random_failures_reach_what_they_are_for():
    plays = [RandomPlay(seed, ahead=seed % 2 == 0, at_dispatch=seed % 3 == 0) for seed in range(20)]
    assert sum(play.runner.num_failed for play in plays) > 80
    assert sum("error" in play.harness.finished.values() for play in plays) > 8
    assert sum(play.harness.scheduler.num_preemptions_total for play in plays) > 10


def test_without_isolation_an_innocent_request_would_fail(monkeypatch):
    """The check can fail: blaming whoever failed twice, alone or not, takes a neighbour along."""

    def judge(self, lost):
        requests = [row.request for plan in lost for row in plan.rows if not row.request.finished]
        for request in requests:
            request.num_failures += 1
        return next((request for request in requests if request.num_failures > 1), None)

    monkeypatch.setattr(isolation.Isolation, "judge", judge)
    with pytest.raises((AssertionError, KeyError)):
        test_the_request_to_blame_fails_alone(4, False)
