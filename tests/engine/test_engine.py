"""The whole engine on a tiny random model: the same tokens however they are computed."""

import itertools
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny_llm import make_llm
from tiny_model import tiny_model

from octavo import RequestError, SamplingParams
from octavo.engine import frontend
from octavo.engine.args import EngineArgs
from octavo.engine.compile_cache import COMPILES
from octavo.engine.config import EngineConfig
from octavo.engine.errors import ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % 290 + 3 for j in range(3 + 5 * i % 37)] for i in range(16)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def llm(folder):
    return make_llm(folder)


@pytest.fixture(scope="session")
def alone(folder):
    """Each prompt's greedy tokens, alone on an engine without prefix caching."""
    engine = make_llm(folder, enable_prefix_caching=False)
    return [tokens_of(engine.generate([prompt], GREEDY, use_tqdm=False))[0] for prompt in PROMPTS]


def tokens_of(outputs):
    return [choice.token_ids for output in outputs for choice in output.outputs]


def test_alone_gives_varied_tokens(alone):
    assert all(len(tokens) == 12 for tokens in alone)
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


def test_a_batch_that_joins_and_leaves_gives_the_same(llm, alone):
    params = [GREEDY.clone(max_tokens=1 + i * 5 % 12) for i in range(16)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert tokens_of(outputs) == [tokens[: p.max_tokens] for tokens, p in zip(alone, params, strict=True)]
    llm._core.scheduler.check_integrity()


def test_chunks_of_eight_give_the_same(folder, alone):
    engine = make_llm(folder, max_num_batched_tokens=8)
    assert tokens_of(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_gives_the_same(folder, alone, caching):
    engine = make_llm(folder, num_gpu_blocks_override=20, max_model_len=64, enable_prefix_caching=caching)
    assert tokens_of(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone
    assert engine._core.stats().num_preemptions_total > 0
    engine._core.scheduler.check_integrity()


def test_prefix_hits_give_the_same(llm, alone):
    llm.reset_prefix_cache()
    first = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    second = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert tokens_of(first) == tokens_of(second) == alone
    for prompt, output in zip(PROMPTS, second, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // 4 * 4


def test_a_wrong_cache_would_be_seen(llm, alone):
    """The mutation: the pool's content matters for every later token."""
    llm.reset_prefix_cache()
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    state = llm._core.runner._state
    llm._core.runner._state = type(state)(
        **{**vars(state), "kv": [pool * 0.5 for pool in state.kv]},
    )
    assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) != alone
    llm.reset_prefix_cache()


def test_every_bucket_border_gives_the_same(llm, alone):
    for count in (1, 2, 3, 4, 5, 8, 9):
        llm.reset_prefix_cache()
        assert tokens_of(llm.generate(PROMPTS[:count], GREEDY, use_tqdm=False)) == alone[:count]
    for length in (1, 31, 32, 33, 64, 65):
        prompt = [(5 * i) % 290 + 3 for i in range(length)]
        results = set()
        for company in ([], PROMPTS[:3]):
            llm.reset_prefix_cache()
            results.add(tuple(tokens_of(llm.generate([prompt, *company], GREEDY, use_tqdm=False))[0]))
        assert len(results) == 1, length


def test_a_long_shared_prefix_gives_the_same(folder):
    """Long enough for the loop that reads a shared prefix once for all rows, in prefill and in decode."""
    engine = make_llm(folder, max_model_len=192, num_gpu_blocks_override=300, enforce_eager=True)
    common = [(11 * i) % 290 + 3 for i in range(150)]
    prompts = [[*common, *PROMPTS[i][: 5 + i]] for i in (2, 3, 4)]
    expected = []
    for prompt in prompts:
        engine.reset_prefix_cache()
        expected += tokens_of(engine.generate([prompt], GREEDY, use_tqdm=False))
    engine.reset_prefix_cache()
    assert tokens_of(engine.generate(prompts, GREEDY, use_tqdm=False)) == expected
    outputs = engine.generate(prompts, GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == expected
    assert all(output.num_cached_tokens >= 148 for output in outputs)


def test_seeded_sampling_is_the_same_alone_and_in_company(llm):
    params = SamplingParams(temperature=1.3, top_p=0.95, top_k=40, seed=7, max_tokens=10, ignore_eos=True)
    (expected,) = tokens_of(llm.generate([PROMPTS[5]], params, use_tqdm=False))
    others = [SamplingParams(temperature=1.0, max_tokens=1 + i, ignore_eos=True) for i in range(12)]
    outputs = llm.generate([*PROMPTS[:12], PROMPTS[5]], [*others, params], use_tqdm=False)
    assert tokens_of(outputs)[-1] == expected
    assert tokens_of(llm.generate([PROMPTS[5]], params.clone(seed=8), use_tqdm=False)) != [expected]


def test_seeded_penalised_sampling_survives_preemption(folder):
    params = [
        SamplingParams(
            temperature=1.0, seed=i, max_tokens=14, ignore_eos=True, repetition_penalty=1.3, presence_penalty=1.0
        )
        for i in range(16)
    ]
    roomy = make_llm(folder, enable_prefix_caching=False)
    tight = make_llm(folder, num_gpu_blocks_override=20, max_model_len=64)
    expected = tokens_of(roomy.generate(PROMPTS, params, use_tqdm=False))
    assert tokens_of(tight.generate(PROMPTS, params, use_tqdm=False)) == expected
    assert tight._core.stats().num_preemptions_total > 0
    plain = [p.clone(repetition_penalty=1.0, presence_penalty=0.0) for p in params]
    assert tokens_of(roomy.generate(PROMPTS, plain, use_tqdm=False)) != expected


def test_choices_differ_repeat_and_share_the_prompt(llm):
    llm.reset_prefix_cache()
    before = llm._core.stats()
    params = SamplingParams(temperature=1.5, seed=1, n=4, max_tokens=6, ignore_eos=True)
    first = tokens_of(llm.generate([PROMPTS[6]], params, use_tqdm=False))
    after = llm._core.stats()
    assert after.prompt_tokens_computed_total - before.prompt_tokens_computed_total == len(PROMPTS[6])
    assert after.generation_tokens_total - before.generation_tokens_total == 24
    assert len({tuple(tokens) for tokens in first}) == 4
    assert tokens_of(llm.generate([PROMPTS[6]], params, use_tqdm=False)) == first


def test_choice_is_what_its_prefix_would_give(llm):
    """A forked choice's later tokens come from its own copied block: greedy continuation of its text agrees."""
    params = SamplingParams(temperature=1.5, seed=3, n=3, max_tokens=2, ignore_eos=True, logprobs=1)
    (output,) = llm.generate([PROMPTS[4][:6]], params, use_tqdm=False)
    for choice in output.outputs:
        longer = [*PROMPTS[4][:6], choice.token_ids[0]]
        llm.reset_prefix_cache()
        (check,) = llm.generate([longer], GREEDY.clone(max_tokens=1, logprobs=1), use_tqdm=False)
        best = check.outputs[0].token_ids[0]
        found = {token: entry.logprob for token, entry in choice.logprobs[1].items() if entry.rank == 1}
        assert found.get(best) == pytest.approx(check.outputs[0].logprobs[0][best].logprob, abs=1e-4)


def test_prompt_logprobs_do_not_depend_on_chunks_or_cache(folder, llm):
    params = GREEDY.clone(max_tokens=2, prompt_logprobs=2)
    chunked = make_llm(folder, max_num_batched_tokens=8)
    results = [engine.generate(PROMPTS[:9], params, use_tqdm=False) for engine in (llm, llm, chunked)]
    for outputs in zip(*results, strict=True):
        for output in outputs:
            assert output.prompt_logprobs[0] is None
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        values = [[entry[t].logprob for entry, t in rest(output)] for output in outputs]
        np.testing.assert_allclose(values[0], values[1], atol=1e-4)
        np.testing.assert_allclose(values[0], values[2], atol=1e-4)


def rest(output):
    return zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)


def test_prompt_logprobs_agree_with_generated_ones(llm):
    (made,) = llm.generate([PROMPTS[3]], GREEDY.clone(logprobs=0), use_tqdm=False)
    choice = made.outputs[0]
    whole = [*PROMPTS[3], *choice.token_ids]
    (scored,) = llm.generate([whole], GREEDY.clone(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    generated = [entry[t].logprob for entry, t in zip(choice.logprobs, choice.token_ids, strict=True)]
    tail = list(rest(scored))[len(PROMPTS[3]) - 1 :]
    np.testing.assert_allclose([entry[t].logprob for entry, t in tail], generated, atol=1e-4)


def test_bias_min_tokens_and_stop_ids(llm, alone):
    (plain,) = tokens_of(llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False))
    assert plain == alone[2]
    (forced,) = tokens_of(llm.generate([PROMPTS[2]], GREEDY.clone(logit_bias={77: 100.0}), use_tqdm=False))
    assert forced == [77] * 12
    stop = plain[4]
    first = plain.index(stop) + 1
    stopping = GREEDY.clone(stop_token_ids=[stop])
    (output,) = llm.generate([PROMPTS[2]], stopping, use_tqdm=False)
    assert output.outputs[0].token_ids == plain[:first]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    (held,) = llm.generate([PROMPTS[2]], stopping.clone(min_tokens=12), use_tqdm=False)
    assert stop not in held.outputs[0].token_ids
    assert len(held.outputs[0].token_ids) == 12


def test_state_of_a_row_does_not_outlive_its_request(llm, alone):
    """Bias, penalties and stop ids of a former owner leave nothing behind."""
    loud = GREEDY.clone(logit_bias={77: 100.0}, frequency_penalty=2.0, repetition_penalty=1.8)
    for _ in range(2):
        llm.generate(PROMPTS[:8], loud, use_tqdm=False)
        assert tokens_of(llm.generate(PROMPTS[:8], GREEDY, use_tqdm=False)) == alone[:8]


def test_eos_of_the_model_ends_a_choice(llm, alone):
    (output,) = llm.generate([PROMPTS[1]], GREEDY.clone(ignore_eos=False, logit_bias={2: 100.0}), use_tqdm=False)
    assert output.outputs[0].token_ids == [2]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_no_compile_after_ready_and_no_donation_warning(llm):
    mixed = [
        GREEDY,
        SamplingParams(temperature=1.0, seed=2, n=3, max_tokens=5, logprobs=3),
        SamplingParams(temperature=0.7, top_k=5, top_p=0.5, min_p=0.1, max_tokens=7, prompt_logprobs=1),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, logit_bias={3: -5.0}, min_tokens=4, logprobs=0),
    ]
    before = COMPILES.total
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in (1, 2, 3, 5, 8, 11, 16):
            llm.generate(PROMPTS[:count], [mixed[i % 4] for i in range(count)], use_tqdm=False)
    assert COMPILES.total == before


def test_the_pool_is_aliased_whole_in_every_program(llm):
    programs = llm._core.runner.programs
    spec = llm._core.runner._spec.kv
    pool_bytes = spec.bytes_per_block * spec.num_blocks
    shape = ",".join(map(str, spec.layer_shape))
    compiled = [programs.step(bucket) for bucket in llm._core.runner.buckets.all]
    for program in [*compiled, programs.write_row(), programs.copy_blocks()]:
        assert program.memory_analysis().alias_size_in_bytes >= pool_bytes
        copies = [line for line in program.as_text().splitlines() if f"f32[{shape}]" in line and " copy(" in line]
        assert not copies


def test_logits_that_are_not_finite_fail_the_request_alone(tmp_path):
    folder = tiny_model(tmp_path / "inf")
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][5] = np.inf
    save_file(tensors, folder / "model.safetensors")
    engine = make_llm(folder)
    bad, good = engine.generate([[7, 5, 9], [7, 8, 9]], GREEDY, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert good.outputs[0].finish_reason == "length"
    (again,) = engine.generate([[7, 8, 9]], GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == good.outputs[0].token_ids


def make_fail(monkeypatch, runner, error, consumed) -> set[int]:
    """The numbers of reads that fail; ``consumed``: the device state is gone then."""
    resolve, steps, failing = runner.resolve, itertools.count(), set()

    def fail(handle):
        if next(steps) in failing:
            for array in jax.tree.leaves(runner._state) if consumed else ():
                array.delete()
            raise error
        return resolve(handle)

    monkeypatch.setattr(runner, "resolve", fail)
    return failing


@pytest.mark.parametrize("consumed", [False, True])
def test_a_step_that_fails_changes_no_token(llm, alone, monkeypatch, consumed):
    failures = llm._core.stats().step_failures_total
    make_fail(monkeypatch, llm._core.runner, RuntimeError, consumed).update((3, 30))
    assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone
    assert llm._core.stats().step_failures_total == failures + 2
    assert COMPILES.after_ready == 0


@pytest.mark.parametrize("consumed", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_call_after_an_error_or_an_interrupt_works(llm, alone, monkeypatch, error, consumed):
    """An interrupt, or a device that fails from some step on."""
    failing = make_fail(monkeypatch, llm._core.runner, error, consumed)
    failing.update(range(3, 100))
    with pytest.raises(error):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    failing.clear()
    assert not llm._core.has_work
    assert llm._outputs.num_unfinished == 0
    assert llm._core.stats().kv_cache_usage == 0.0
    assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone


def test_calls_from_several_threads_give_what_they_give_alone(llm, alone):
    """Without taking turns, one thread would step another's requests and drop their outputs."""
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(llm.generate, [prompt], GREEDY, use_tqdm=False) for prompt in PROMPTS]
    assert [tokens_of(call.result()) for call in calls] == [[tokens] for tokens in alone]


def test_bad_prompts_are_refused_before_anything_runs(llm):
    for prompt in ([], [300], [-1], [1.5], [True], "text", {"prompt": "text"}, {"tokens": [1]}, [[1]], 7):
        with pytest.raises(RequestError):
            llm.generate([PROMPTS[0], prompt], GREEDY, use_tqdm=False)
        assert not llm._core.has_work
        assert llm._outputs.num_unfinished == 0


def test_prompts_that_are_no_list_are_refused(llm):
    for prompts in (None, 5, {1, 2}):
        with pytest.raises(RequestError):
            llm.generate(prompts, GREEDY, use_tqdm=False)


def test_context_limits_are_refused_with_both_numbers(llm):
    for length, max_tokens in [(96, None), (95, 2), (97, 1)]:
        with pytest.raises(RequestError, match=r"96 tokens.*\d+ tokens"):
            llm.generate([[5] * length], GREEDY.clone(max_tokens=max_tokens), use_tqdm=False)
    (output,) = llm.generate([[5] * 95], GREEDY.clone(max_tokens=None), use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")


def test_options_that_cannot_be_served_are_refused(folder):
    for options, match in [
        ({"swap_space": -4.0}, "swap_space"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"quantization": "awq"}, "quantization"),
        ({"attention_backend": "mosaic"}, "attention_backend"),
        ({"max_model_len": 1000}, "max_model_len"),
        ({"num_gpu_blocks_override": 10}, "does not fit"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"dtype": "int8"}, "dtype"),
        ({"block_size": 5}, "block_size"),
    ]:
        with pytest.raises(ConfigError, match=match):
            make_llm(folder, **options)


def test_a_context_that_was_not_asked_for_shrinks_to_the_pool(folder):
    engine = make_llm(folder, max_model_len=None, num_gpu_blocks_override=11, enforce_eager=True)
    assert engine.config.max_model_len == 40


def test_eager_compiles_on_first_use_only_and_says_so(folder, alone, caplog):
    caplog.set_level("INFO", "octavo")
    engine = make_llm(folder, enforce_eager=True)
    before = COMPILES.total
    caplog.clear()
    assert tokens_of(engine.generate(PROMPTS[:1], GREEDY, use_tqdm=False)) == alone[:1]
    used = COMPILES.total
    assert used > before
    assert sum("met for the first time" in text for text in caplog.messages) > 1
    engine.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert COMPILES.total == used


def test_the_models_revision_is_not_asked_of_another_tokenizer(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(frontend, "find_model", lambda options: SimpleNamespace(path=folder))
    monkeypatch.setattr(frontend.Tokenizer, "load", lambda *args, revision, **options: asked.append(revision))
    for tokenizer in (None, "some/other", str(folder)):
        args = EngineArgs(model=str(folder), revision="v2", tokenizer=tokenizer)
        frontend.open_model(EngineConfig.from_args(args))
    assert asked == [None, None, "v2"]
