"""Both loops of the core on a tiny real model: the same texts, tokens and log-probabilities."""

import pytest
from conftest_paths import CACHE_FOLDER
from tiny_model import add_tokenizer, tiny_model

from octavo import LLM, SamplingParams
from octavo.engine.messages import AbortRequest

PROMPTS = ["the rest of it", "one and all", "no", "he said to her that the end is near", "in a house by the sea", "x"]
OPTIONS = {
    "block_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 20,
    "compile_cache_dir": str(CACHE_FOLDER / "engine"),
}


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """The plain loop, then the other, over a pool that is too small for all."""
    folder = str(add_tokenizer(tiny_model(tmp_path_factory.mktemp("tiny"))))
    return [LLM(folder, async_scheduling=False, **OPTIONS), LLM(folder, **OPTIONS)]


def mixed_params() -> list[SamplingParams]:
    """A dozen requests that differ in all that the next token depends on."""
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    drawn = SamplingParams(temperature=1.2, seed=5, max_tokens=20)
    return [
        greedy,
        greedy.clone(ignore_eos=True, max_tokens=40),
        greedy.clone(repetition_penalty=1.3, ignore_eos=True),
        greedy.clone(presence_penalty=1.5, frequency_penalty=0.5, ignore_eos=True),
        greedy.clone(logprobs=3, prompt_logprobs=2),
        greedy.clone(logit_bias={7: 5.0}, min_tokens=6),
        drawn,
        drawn.clone(n=3, seed=6, top_p=0.9),
        drawn.clone(n=11, seed=7, max_tokens=6),
        drawn.clone(stop=["e", "a"], seed=8, ignore_eos=True),
        drawn.clone(stop_token_ids=list(range(20, 60)), min_tokens=4, seed=9),
        drawn.clone(presence_penalty=1.0, top_k=50, min_p=0.01, seed=10, stop=["t"], include_stop_str_in_output=True),
    ]


def answers(llm: LLM) -> list[list]:
    params = mixed_params()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    return [
        [output.prompt_logprobs]
        + [(c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs]
        for output in llm.generate(prompts, params, use_tqdm=False)
    ]


def without_floats(value):
    """Log-probabilities may differ in the last bits with the shape of the step; the tokens named must not."""
    if isinstance(value, dict):
        return list(value)
    return [without_floats(one) for one in value] if isinstance(value, list | tuple) else value


def test_both_loops_give_equal_texts(loops):
    plain, ahead = (answers(llm) for llm in loops)
    assert without_floats(ahead) == without_floats(plain)
    reasons = {choice[2] for answer in ahead for choice in answer[1:]}
    assert reasons == {"stop", "length"}
    for llm in loops:
        llm._core.scheduler.check_integrity()
        assert llm._core.stats().kv_cache_usage == 0.0
        assert llm._core.stats().num_preemptions_total > 0
    made = [llm._core.scheduler.generation_tokens_total for llm in loops]
    assert made[0] == made[1] == sum(len(choice[1]) for answer in ahead for choice in answer[1:])
    assert loops[0]._core.stats().prompt_tokens_total == loops[1]._core.stats().prompt_tokens_total


def test_the_option_chooses_the_loop(loops):
    for llm, ahead in zip(loops, (False, True), strict=True):
        core = llm._core
        request, text = llm._inputs.make_request("9999", PROMPTS[0], SamplingParams(max_tokens=8))
        llm._outputs.add_request(request, text)
        core.handle(request)
        core.step()
        assert (core._unread is not None) is ahead
        core.handle(AbortRequest(request_id="9999"))
        llm._outputs.abort("9999")
        while core.has_work:
            core.step()


def test_a_wrong_last_token_would_be_seen(loops, monkeypatch):
    """The mutation: steps that are sent ahead take another token than the row's last one."""
    llm = loops[1]
    expected = answers(loops[0])
    dispatch, runner = llm._core.runner.dispatch, llm._core.runner

    def mutated(plan):
        if any(row.request.num_output_placeholders > 1 for row in plan.rows):
            state = runner._state
            runner._state = type(state)(**{**vars(state), "last_tokens": state.last_tokens + 1})
        return dispatch(plan)

    monkeypatch.setattr(runner, "dispatch", mutated)
    assert without_floats(answers(llm)) != without_floats(expected)
    monkeypatch.undo()
    assert llm.reset_prefix_cache()
    assert without_floats(answers(llm)) == without_floats(expected)
