"""The loop that dispatches step N+1 before it reads step N, against the plain one, over a device worked out by hand."""

import random
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import VOCAB, Harness, expected_tokens

from octavo.engine.kv_cache_manager import block_key
from octavo.engine.messages import AbortRequest, FinishReason

PROMPT = list(range(100, 110))
Key = tuple[str, int]


@dataclass
class Sent:
    """A request of the traffic; ``stop_at``: after how many tokens its text shows a stop string, by choice."""

    turn: int
    prompt: list[int]
    params: dict
    stops: frozenset[int] = frozenset()
    salt: str | None = None
    stop_at: dict[int, int] = field(default_factory=dict)

    def expected(self, choice: int) -> list[int]:
        params = self.params
        tokens = expected_tokens(
            self.prompt,
            params["max_tokens"],
            choice,
            seed=params["seed"] if params["temperature"] != 1.0 else 0,
            penalised=params["presence_penalty"] != 0.0,
            stops=self.stops,
            min_tokens=params["min_tokens"],
        )
        return tokens[: self.stop_at.get(choice, len(tokens))]


@dataclass
class Traffic:
    sent: dict[str, Sent]
    aborts: list[tuple[int, AbortRequest]]
    delay: int
    """Turns that pass before the core hears of a stop string."""
    options: dict

    @property
    def keys(self) -> list[Key]:
        return [(name, choice) for name, sent in self.sent.items() for choice in range(sent.params["n"])]


def draw_traffic(rng: random.Random, *, with_aborts: bool) -> Traffic:
    sent, aborts = {}, []
    for number in range(rng.randrange(1, 13)):
        n, max_tokens = rng.choice([1, 1, 1, 2, 3, 7]), rng.randrange(1, 14)
        stop_at = {choice: rng.randrange(1, 12) for choice in range(n) if rng.random() < 0.2}
        params = {
            "n": n,
            "max_tokens": max_tokens,
            "min_tokens": rng.choice([0, 0, rng.randrange(0, max_tokens + 1)]),
            "temperature": rng.choice([1.0, 0.5]),
            "seed": rng.randrange(1, 1000),
            "presence_penalty": rng.choice([0.0, 0.0, 1.0]),
            "logprobs": rng.choice([None, None, 2]),
            "prompt_logprobs": rng.choice([None, None, None, 2]),
            "stop": ["stop"] if stop_at else None,
        }
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
        stops = frozenset(rng.sample(range(VOCAB), 100)) if rng.random() < 0.4 else frozenset()
        sent[f"r{number}"] = Sent(rng.randrange(30), prompt, params, stops, rng.choice([None, None, "salt"]), stop_at)
        if with_aborts and rng.random() < 0.4:
            index = rng.choice([None, rng.randrange(n)])
            aborts.append((rng.randrange(50), AbortRequest(request_id=f"r{number}", index=index)))
    options = {
        "num_blocks": rng.choice([11, 12, 14, 18, 40]),
        "budget": rng.randrange(5, 24),
        "max_num_seqs": rng.choice([2, 5]),
        "caching": rng.random() < 0.7,
    }
    return Traffic(sent, aborts, rng.randrange(4), options)


class Play:
    """Traffic through one of the loops, with what its callers have seen."""

    def __init__(self, traffic: Traffic, *, ahead: bool) -> None:
        self.traffic = traffic
        self.harness = Harness(**traffic.options, ahead=ahead)
        self.stopped: dict[Key, int] = {}
        self.aborted: set[Key] = set()
        self._due: list[tuple[int, AbortRequest]] = list(traffic.aborts)
        shown = 0
        for turn in count():
            for name, sent in traffic.sent.items():
                if sent.turn == turn:
                    self.harness.add(name, sent.prompt, stops=sent.stops, salt=sent.salt, **sent.params)
            self._deliver(turn)
            self.harness.step()
            self._look_for_stop_strings(turn)
            before, shown = shown, self.harness.core.stats().generation_tokens_total
            assert before <= shown, "a counter fell"
            if not (self.harness.core.has_work or self._due) and turn > 30:
                break
            assert turn < 2000, "no end in sight"

    def _deliver(self, turn: int) -> None:
        for abort in [abort for when, abort in self._due if when <= turn]:
            live = {(r.request_id, r.index) for r in self.harness.scheduler.requests}
            self.harness.core.handle(abort)
            left = {(r.request_id, r.index) for r in self.harness.scheduler.requests}
            self.aborted |= live - left if abort.num_output_tokens is None else set()
        self._due = [(when, abort) for when, abort in self._due if when > turn]

    def _look_for_stop_strings(self, turn: int) -> None:
        for name, sent in self.traffic.sent.items():
            for choice, length in sent.stop_at.items():
                key = name, choice
                made = len(self.harness.outputs.get(key, []))
                if key in self.stopped or key in self.aborted or made < length:
                    continue
                self.stopped[key] = length
                if key not in self.harness.finished or made > length:
                    abort = AbortRequest(
                        request_id=name, index=choice, reason=FinishReason.STOP, num_output_tokens=length
                    )
                    self._due.append((turn + self.traffic.delay, abort))

    def streamed(self, key: Key) -> list[int]:
        """What the caller gets: nothing past a stop string."""
        return self.harness.outputs.get(key, [])[: self.stopped.get(key)]

    def check_end(self) -> None:
        """Everything is back, and only what was streamed is counted and kept."""
        harness = self.harness
        harness.scheduler.check_integrity()
        assert not harness.scheduler.has_work
        assert harness.kv.pool.num_free == harness.kv.pool.num_usable
        keys = self.traffic.keys
        assert harness.scheduler.generation_tokens_total == sum(len(self.streamed(key)) for key in keys)
        kept = self._blocks_that_may_be_cached()
        for key, block in harness.kv.pool._cached.items():
            assert key in kept, "the prefix cache keeps tokens that nobody got"
            assert harness.device.pool[block.block_id].tolist() == kept[key], "a findable block was overwritten"

    def _blocks_that_may_be_cached(self) -> dict[bytes, list[int]]:
        size, kept = self.harness.kv.block_size, {}
        for name, choice in self.traffic.keys:
            sent, parent = self.traffic.sent[name], b""
            tokens = sent.prompt + self.streamed((name, choice))
            cut = (name, choice) in self.stopped or (name, choice) in self.aborted
            for start in range(0, (len(tokens) - (not cut)) // size * size, size):
                parent = block_key(parent, tokens[start : start + size], sent.salt)
                kept[parent] = tokens[start : start + size]
        return kept


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), with_aborts=st.booleans())
def test_both_loops_give_the_same_tokens_and_accounts(seed, with_aborts):
    """Arrivals, stop ids and strings, aborts, preemption by a tiny pool, seeds, penalties, min_tokens, n, the cache."""
    traffic = draw_traffic(random.Random(seed), with_aborts=with_aborts)
    plain, ahead = Play(traffic, ahead=False), Play(traffic, ahead=True)
    for play in (plain, ahead):
        play.check_end()
        for name, choice in traffic.keys:
            key, expected = (name, choice), traffic.sent[name].expected(choice)
            found = play.streamed(key)
            if key in play.aborted:
                assert found == expected[: len(found)]
                continue
            assert found == expected
            logprobs = play.harness.logprobs[key][: len(found)]
            wanted = found if traffic.sent[name].params["logprobs"] is not None else []
            assert [entry.token_id for entry in logprobs] == [-entry.logprob for entry in logprobs] == wanted
    totals = [play.harness.scheduler for play in (plain, ahead)]
    assert totals[0].prompt_tokens_total == totals[1].prompt_tokens_total
    if not traffic.aborts:
        assert totals[0].generation_tokens_total == totals[1].generation_tokens_total
    assert plain.harness.runner.num_ahead == 0


def test_random_traffic_reaches_what_it_is_for():
    """Over the seeds 0..59: preemption, steps ahead, wasted draws, stop strings found late, cache hits."""
    plays = [Play(draw_traffic(random.Random(seed), with_aborts=False), ahead=True) for seed in range(60)]
    runners = [play.harness.runner for play in plays]
    assert sum(play.harness.scheduler.num_preemptions_total for play in plays) > 20
    assert sum(play.harness.kv.hits_total for play in plays) > 100
    assert sum(len(play.stopped) for play in plays) > 40
    late = [len(play.harness.outputs[key]) > length for play in plays for key, length in play.stopped.items()]
    assert sum(late) > 10
    num_steps = sum(runner.num_steps for runner in runners)
    assert sum(runner.num_ahead for runner in runners) > 0.8 * num_steps


def both(**options) -> list[Harness]:
    return [Harness(**options, ahead=ahead) for ahead in (False, True)]


def test_every_step_but_the_first_is_dispatched_before_the_one_before_it_is_read():
    """Chunks of prompts, admissions into a full batch, n above 1 and decodes alike."""
    plain, ahead = both(num_blocks=64, budget=8, max_num_seqs=8)
    for harness in (plain, ahead):
        for i in range(6):
            harness.add(f"r{i}", list(range(i, i + 4 * i + 2)), max_tokens=5, n=1 + i % 2)
        harness.run()
    assert ahead.outputs == plain.outputs
    assert ahead.runner.num_ahead == ahead.num_steps - 1
    assert ahead.runner.num_draws == ahead.scheduler.generation_tokens_total, "an end by length wastes nothing"


def test_an_arrival_joins_the_step_after_the_one_in_flight():
    harness = Harness(num_blocks=64, ahead=True)
    harness.add("a", PROMPT, max_tokens=20)
    for _ in range(3):
        harness.step()
    harness.add("b", PROMPT, max_tokens=2)
    plans = [[row.request.request_id for row in harness.step().rows] for _ in range(3)]
    assert plans == [["a"], ["a", "b"], ["a", "b"]]


def test_a_stop_that_was_not_foreseen_wastes_one_draw():
    stop = expected_tokens(PROMPT, 8)[4]
    for harness, wasted in zip(both(), (0, 1), strict=True):
        harness.add("a", PROMPT, stops=frozenset([stop]))
        assert harness.run()["a", 0] == expected_tokens(PROMPT, 8)[:5]
        assert harness.scheduler.generation_tokens_total == 5
        assert harness.runner.num_draws == 5 + wasted
        assert harness.finished["a", 0] == "stop"


def test_the_row_and_blocks_of_a_wasted_draw_serve_the_next_request_at_once():
    """One row and hardly a block to spare: the next owner's step follows the wasted one on the device."""
    stop = expected_tokens(PROMPT, 8)[4]
    harness = Harness(num_blocks=6, max_num_seqs=1, ahead=True)
    harness.add("a", PROMPT, stops=frozenset([stop]))
    for i in range(3):
        harness.add(f"b{i}", [i] * 13, max_tokens=6)
    outputs = harness.run()
    for i in range(3):
        assert outputs[f"b{i}", 0] == expected_tokens([i] * 13, 6)


def test_preemption_waits_for_tokens_in_flight():
    """No token is drawn twice or lost, and the step in flight is read before anybody has to go."""
    plain, ahead = both(num_blocks=10, budget=32)
    for harness in (plain, ahead):
        for i in range(4):
            harness.add(f"r{i}", [i * 10 + j for j in range(9)], max_tokens=16)
        preempt = harness.scheduler._preempt

        def checked(request, preempt=preempt):
            assert request.num_output_placeholders == 0
            preempt(request)

        harness.scheduler._preempt = checked
        harness.run()
        assert harness.scheduler.num_preemptions_total > 0
        assert harness.runner.num_draws == harness.scheduler.generation_tokens_total == 4 * 16
    assert ahead.outputs == plain.outputs
    assert 0.6 * ahead.num_steps < ahead.runner.num_ahead < ahead.num_steps - 1


def test_an_end_that_frees_what_is_short_spares_a_preemption():
    """The blocks do not suffice for the next step, but the one in flight is somebody's last."""
    harness = Harness(num_blocks=6, block_size=4, ahead=True)
    harness.add("a", [1] * 7, max_tokens=2)
    harness.add("b", [2] * 8, max_tokens=8)
    outputs = harness.run()
    assert harness.scheduler.num_preemptions_total == 0
    assert outputs["b", 0] == expected_tokens([2] * 8, 8)


def test_a_row_whose_next_token_needs_the_host_falls_back_alone():
    harness = Harness(num_blocks=32, ahead=True)
    for name in "ab":
        harness.add(name, PROMPT, max_tokens=8)
    next(r for r in harness.scheduler.requests if r.request_id == "a").needs_host_token = True
    plans = []
    while harness.scheduler.has_work:
        plans.append({row.request.request_id for row in harness.step().rows})
    assert harness.outputs["a", 0] == harness.outputs["b", 0] == expected_tokens(PROMPT, 8)
    assert [{"b"} <= plan for plan in plans[:8]] == [True] * 8
    assert [{"a"} <= plan for plan in plans[:8]] == [True, False] * 4
    alone = Harness(ahead=True)
    alone.add("a", PROMPT, max_tokens=8)
    next(alone.scheduler.requests).needs_host_token = True
    assert alone.run()["a", 0] == expected_tokens(PROMPT, 8)
    assert alone.runner.num_ahead == 0


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_tokens_past_a_stop_string_leave_no_trace(delay):
    """Also when the choice has ended by its length before the core hears of the stop string."""
    params = {"n": 1, "max_tokens": 10, "min_tokens": 0, "temperature": 1.0, "seed": 1, "presence_penalty": 0.0}
    sent = Sent(0, PROMPT, {**params, "logprobs": None, "prompt_logprobs": None, "stop": ["stop"]}, stop_at={0: 7})
    for ahead in (False, True):
        play = Play(Traffic({"a": sent}, [], delay, {"num_blocks": 32}), ahead=ahead)
        play.check_end()
        assert play.streamed(("a", 0)) == expected_tokens(PROMPT, 10)[:7]
        assert play.harness.scheduler.generation_tokens_total == 7
        assert len(play.harness.kv.pool._cached) == (len(PROMPT) + 7) // 4


def test_a_block_that_another_request_holds_stays_findable():
    harness = Harness(num_blocks=32, ahead=True)
    harness.add("a", PROMPT, max_tokens=20, stop=["stop"])
    while len(harness.outputs.get(("a", 0), [])) < 10:
        harness.step()
    again = PROMPT + harness.outputs["a", 0]
    harness.add("b", again, max_tokens=4)
    harness.step()
    harness.core.handle(AbortRequest(request_id="a", index=0, reason=FinishReason.STOP, num_output_tokens=1))
    harness.step()
    held = next(r for r in harness.scheduler.requests if r.request_id == "b").blocks
    assert [block.key is not None for block in held[:4]] == [True] * 4
    harness.run()
    assert harness.outputs["b", 0] == expected_tokens(again, 4)


def test_a_prompt_of_the_step_in_flight_is_found_by_the_next_one():
    """A burst with one system prompt computes it once, although nothing has been read yet."""
    harness = Harness(num_blocks=40, budget=16, ahead=True)
    shared = list(range(16))
    for i in range(3):
        harness.add(f"r{i}", [*shared, i] if i else shared, max_tokens=3)
    harness.step()
    assert harness.runner.num_steps == 2
    assert harness.kv.hits_total == 2 * len(shared)
    outputs = harness.run()
    assert [outputs[f"r{i}", 0] for i in (1, 2)] == [expected_tokens([*shared, i], 3) for i in (1, 2)]


def test_choices_released_from_forking_find_the_prompt_of_the_step_in_flight():
    computed = []
    for harness in both(num_blocks=40, max_num_seqs=2, block_size=4):
        harness.add("a", PROMPT, n=5, max_tokens=3)
        harness.run()
        computed.append(harness.scheduler.prompt_tokens_computed_total)
    assert computed[0] == computed[1] == len(PROMPT) + 3 * (len(PROMPT) % 4)


def test_a_row_that_is_not_finite_ends_while_its_next_step_is_in_flight():
    harness = Harness(ahead=True)
    harness.add("good", PROMPT)
    harness.add("bad", [1, 2, 3, 4, 5], max_tokens=6)
    harness.bad_rows.add("bad")
    assert harness.run()["good", 0] == expected_tokens(PROMPT, 8)
    assert harness.finished["bad", 0] == "error"
    assert harness.outputs["bad", 0] == []
    assert block_key(b"", [1, 2, 3, 4], None) not in harness.kv.pool._cached


def test_aborts_while_a_step_is_in_flight_leave_nothing():
    harness = Harness(num_blocks=32, ahead=True)
    harness.add("a", PROMPT, max_tokens=20)
    for _ in range(3):
        harness.step()
    before = list(harness.outputs["a", 0])
    harness.core.handle(AbortRequest(request_id="a"))
    assert not harness.scheduler.has_work
    assert harness.kv.pool.num_free == harness.kv.pool.num_usable
    harness.add("b", PROMPT, max_tokens=3)
    assert harness.run()["b", 0] == expected_tokens(PROMPT, 3)
    assert harness.outputs["a", 0] == before
    assert harness.scheduler.generation_tokens_total == len(before) + 3
