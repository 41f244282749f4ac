"""The scheduler against a device that can be worked out by hand (scheduler_harness.py)."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import VOCAB, Harness, expected_tokens, make_request

from octavo.engine.errors import RequestError
from octavo.engine.kv_cache_manager import KVCacheManager, block_key
from octavo.engine.messages import AbortRequest, FinishReason

PROMPT = list(range(100, 110))


def test_one_request_gives_its_tokens():
    harness = Harness()
    harness.add("a", PROMPT)
    assert harness.run()["a", 0] == expected_tokens(PROMPT, 8)
    assert harness.finished["a", 0] == "length"


def test_long_prompt_is_chunked_and_a_short_one_behind_it_finishes():
    harness = Harness(budget=8, max_num_seqs=4)
    long, short = list(range(33)), [5, 6]
    harness.add("long", long, max_tokens=4)
    harness.add("short", short, max_tokens=4)
    outputs = harness.run()
    assert outputs["long", 0] == expected_tokens(long, 4)
    assert outputs["short", 0] == expected_tokens(short, 4)


def test_stop_token_ends_a_choice_and_min_tokens_holds_it_back():
    tokens = expected_tokens(PROMPT, 8)
    stop = tokens[3]
    first = tokens.index(stop) + 1
    harness = Harness()
    harness.add("a", PROMPT, stops=frozenset([stop]))
    assert harness.run()["a", 0] == tokens[:first]
    assert harness.finished["a", 0] == "stop"
    held = Harness()
    held.add("a", PROMPT, stops=frozenset([stop]), min_tokens=first)
    assert held.run()["a", 0] == expected_tokens(PROMPT, 8, stops=frozenset([stop]), min_tokens=first) != tokens


def test_context_length_ends_a_choice():
    harness = Harness(max_model_len=12)
    harness.add("a", PROMPT, max_tokens=2)
    assert len(harness.run()["a", 0]) == 2
    for prompt, max_tokens in [(PROMPT, 3), ([1] * 12, 1)]:
        with pytest.raises(RequestError, match="12 tokens"):
            harness.add("b", prompt, max_tokens=max_tokens)


def test_what_can_never_fit_the_pool_is_refused():
    harness = Harness(num_blocks=4, max_model_len=100)
    with pytest.raises(RequestError, match="whole cache has 3"):
        harness.add("a", PROMPT, max_tokens=8)
    assert not harness.scheduler.has_work


def test_id_in_use_is_refused():
    harness = Harness()
    harness.add("a", PROMPT)
    with pytest.raises(RequestError, match="already in use"):
        harness.add("a", PROMPT)


def test_preemption_gives_the_same_tokens_and_spares_the_oldest():
    harness = Harness(num_blocks=10, max_num_seqs=4, budget=32)
    prompts = {name: [index * 10 + i for i in range(9)] for index, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        harness.add(name, prompt, max_tokens=16)
    oldest = next(harness.scheduler.requests)
    outputs = harness.run()
    assert harness.scheduler.num_preemptions_total > 0
    assert oldest.timing.num_preemptions == 0
    assert harness.most_preemptions < 5
    for name, prompt in prompts.items():
        assert outputs[name, 0] == expected_tokens(prompt, 16)


@pytest.mark.parametrize("caching", [True, False])
def test_a_resumed_request_whose_last_chunk_is_one_token_reads_it_from_the_host(caching):
    """The row's new state has no last token yet, although the place is past the prompt."""
    harness = Harness(num_blocks=32, budget=8, caching=caching)
    harness.add("a", PROMPT, max_tokens=20)
    while next(harness.scheduler.requests).num_tokens != 17:
        harness.step()
    harness.scheduler._preempt(harness.scheduler.running[0])
    harness.kv.pool.reset_cache()
    assert [harness.step().num_tokens for _ in range(3)] == [8, 8, 1]
    assert harness.run()["a", 0] == expected_tokens(PROMPT, 20)


def test_two_half_loaded_prompts_do_not_block_each_other():
    harness = Harness(num_blocks=11, budget=8, max_num_seqs=4)
    prompts = {"a": list(range(24)), "b": list(range(50, 74))}
    for name, prompt in prompts.items():
        harness.add(name, prompt, max_tokens=10)
    outputs = harness.run()
    assert {name: outputs[name, 0] for name in prompts} == {n: expected_tokens(p, 10) for n, p in prompts.items()}


def test_many_short_ones_behind_a_long_one_all_finish_with_few_preemptions():
    harness = Harness(num_blocks=14, budget=8, max_num_seqs=6)
    harness.add("long", list(range(30)), max_tokens=10)
    for i in range(30):
        harness.add(f"s{i}", [i, i + 1, i + 2], max_tokens=5)
    harness.run()
    assert len(harness.finished) == 31
    assert harness.most_preemptions < 5


def test_a_repeated_prompt_hits_all_but_its_last_block():
    for length, hit in [(16, 12), (17, 16), (15, 12), (4, 0)]:
        harness = Harness(num_blocks=32)
        prompt = list(range(length))
        for name in "ab":
            harness.add(name, prompt, max_tokens=2)
            harness.run()
        assert harness.outputs["b", 0] == harness.outputs["a", 0] == expected_tokens(prompt, 2)
        assert harness.kv.hits_total == hit, length
        assert harness.kv.queries_total == 2 * length


def test_a_resent_prompt_after_churn_gives_the_same_answer():
    harness = Harness(num_blocks=12)
    expected = expected_tokens(PROMPT, 8)
    for turn in range(20):
        harness.add(f"p{turn}", PROMPT)
        harness.add(f"f{turn}", [turn] * 20, max_tokens=8)
        outputs = harness.run()
        assert outputs[f"p{turn}", 0] == expected


def test_salts_separate_callers():
    harness = Harness(num_blocks=32)
    hits = []
    for name, salt in [("a", "x"), ("b", "x"), ("c", "y"), ("d", None)]:
        before = harness.kv.hits_total
        harness.add(name, PROMPT, salt=salt)
        harness.run()
        hits.append(harness.kv.hits_total - before)
    assert hits == [0, 8, 0, 0]


def test_block_keys_depend_on_everything_before():
    first, second = block_key(b"", [1, 2], None), block_key(b"", [3, 4], None)
    keys = {
        first,
        second,
        block_key(first, [3, 4], None),
        block_key(first, [1, 2], None),
        block_key(b"", [1, 2], "salt"),
        block_key(b"", [1, 2, 3, 4], None),
        block_key(b"", [1 + (2 << 32)], None),
    }
    assert len(keys) == 7


def test_prompt_logprobs_read_no_cache_and_come_once():
    harness = Harness(num_blocks=32, budget=4)
    harness.add("a", PROMPT, max_tokens=2)
    harness.run()
    harness.add("b", PROMPT, max_tokens=2, prompt_logprobs=0)
    collected = []
    scheduler, update = harness.scheduler, harness.scheduler.update
    scheduler.update = lambda *args: collected.extend(outputs := update(*args)) or outputs
    harness.run()
    assert harness.kv.hits_total == 0
    with_logprobs = [output for output in collected if output.prompt_logprobs is not None]
    assert len(with_logprobs) == 1
    assert [entry.token_id for entry in with_logprobs[0].prompt_logprobs] == PROMPT[1:]
    assert [entry.logprob for entry in with_logprobs[0].prompt_logprobs] == [-float(t) for t in PROMPT[1:]]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [8, 10])
def test_choices_share_one_prompt_computation(length, caching):
    harness = Harness(num_blocks=32, max_num_seqs=5, caching=caching)
    prompt = PROMPT[:length]
    harness.add("a", prompt, n=4, max_tokens=6)
    outputs = harness.run()
    assert harness.scheduler.prompt_tokens_computed_total == length
    for choice in range(4):
        assert outputs["a", choice] == expected_tokens(prompt, 6, choice)


def test_more_choices_than_rows_run_in_parts():
    harness = Harness(num_blocks=14, max_num_seqs=2)
    harness.add("a", PROMPT, n=9, max_tokens=5)
    outputs = harness.run()
    assert [outputs["a", choice] for choice in range(9)] == [expected_tokens(PROMPT, 5, c) for c in range(9)]


def test_a_row_that_is_not_finite_fails_alone():
    harness = Harness()
    harness.add("good", PROMPT)
    harness.add("bad", [1, 2, 3], n=2)
    harness.bad_rows.add("bad")
    outputs = harness.run()
    assert outputs["good", 0] == expected_tokens(PROMPT, 8)
    assert harness.finished["bad", 0] == harness.finished["bad", 1] == "error"
    harness.bad_rows.clear()
    harness.add("again", [1, 2, 3, 4, 5])
    assert harness.run()["again", 0] == expected_tokens([1, 2, 3, 4, 5], 8)


def test_finish_is_idempotent_and_unknown_ids_are_ignored():
    harness = Harness()
    harness.add("a", PROMPT)
    harness.step()
    (request,) = harness.scheduler.requests
    for _ in range(2):
        harness.scheduler.finish(request, FinishReason.ABORT)
    assert harness.scheduler.abort(AbortRequest(request_id="a")) == []
    assert harness.scheduler.abort(AbortRequest(request_id="never")) == []
    harness.scheduler.check_integrity()
    assert not harness.scheduler.has_work


def test_check_integrity_sees_a_lost_row():
    harness = Harness()
    harness.add("a", PROMPT)
    harness.step()
    harness.scheduler.running[0].row = 3
    with pytest.raises(AssertionError):
        harness.scheduler.check_integrity()


def test_blocks_for_rounds_up():
    kv = KVCacheManager(8, 4)
    assert [kv.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_seeds_differ_between_requests_and_repeat_with_the_engine_seed():
    def seeds():
        harness = Harness()
        for i in range(3):
            harness.scheduler.add_request(make_request(f"r{i}", PROMPT))
        return [request.seed for request in harness.scheduler.requests]

    assert len(set(seeds())) == 3
    assert seeds() == seeds()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(11, 24),
    budget=st.integers(5, 24),
    caching=st.booleans(),
    ahead=st.booleans(),
)
def test_random_traffic_keeps_accounts_and_answers(seed, num_blocks, budget, caching, ahead):
    """Arrivals, stops, aborts of requests and of single choices, n > 1, preemption, planned ahead or not."""
    rng = random.Random(seed)
    harness = Harness(num_blocks=num_blocks, max_num_seqs=5, budget=budget, caching=caching, ahead=ahead)
    sent, aborted, now = {}, set(), 0
    while now < 40 or harness.scheduler.has_work:
        if now < 40 and rng.random() < 0.5:
            name = f"r{now}"
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
            n, max_tokens = rng.choice([1, 1, 1, 2, 3, 7]), rng.randrange(1, 12)
            logprobs = rng.choice([None, None, 2])
            stops = frozenset(rng.sample(range(VOCAB), 100)) if rng.random() < 0.3 else frozenset()
            harness.add(name, prompt, n=n, max_tokens=max_tokens, prompt_logprobs=logprobs, stops=stops)
            sent[name] = (prompt, n, max_tokens, stops)
        if sent and rng.random() < 0.1:
            name = rng.choice(list(sent))
            index = rng.choice([None, 0, rng.randrange(7)])
            outputs = harness.scheduler.abort(AbortRequest(request_id=name, index=index))
            aborted |= {(output.request_id, output.index) for output in outputs}
            harness.take(outputs)
            harness.scheduler.check_integrity()
        if harness.scheduler.has_work:
            harness.step()
        now += 1
        assert now < 3000
    assert harness.kv.pool.num_free == harness.kv.pool.num_usable
    for name, (prompt, n, max_tokens, stops) in sent.items():
        for choice in range(n):
            expected = expected_tokens(prompt, max_tokens, choice, stops=stops)
            found = harness.outputs.get((name, choice), [])
            if (name, choice) in aborted:
                assert found == expected[: len(found)]
            else:
                assert found == expected
                assert harness.finished[name, choice] == ("stop" if expected[-1] in stops else "length")
