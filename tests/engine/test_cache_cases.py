"""The prefix cache and the padding on a real model, where engines of this kind have gone wrong before."""

import numpy as np
import pytest
from conftest_paths import CACHE_FOLDER
from tiny_model import tiny_model

from octavo import LLM, SamplingParams

BLOCK = 4
NUM_BLOCKS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(11 * i + 31 * salt + 5) % 290 + 3 for i in range(length)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    """A pool of 19 blocks, so that two prompts of 30 tokens fill most of it."""
    return LLM(
        str(tiny_model(tmp_path_factory.mktemp("cases"))),
        skip_tokenizer_init=True,
        compile_cache_dir=str(CACHE_FOLDER / "engine"),
        block_size=BLOCK,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=NUM_BLOCKS,
    )


def run(llm: LLM, *prompts: list[int], params: SamplingParams = GREEDY) -> list[tuple]:
    """(tokens, their log-probabilities) of each prompt, all at once."""
    choices = [output.outputs[0] for output in llm.generate(list(prompts), params, use_tqdm=False)]
    return [
        (
            tuple(choice.token_ids),
            [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)],
        )
        for choice in choices
    ]


def fresh(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> tuple:
    """Alone, with nothing in the cache."""
    llm.reset_prefix_cache()
    [result] = run(llm, prompt, params=params)
    llm.reset_prefix_cache()
    return result


def assert_same(result: tuple, expected: tuple) -> None:
    assert result[0] == expected[0]
    np.testing.assert_allclose(result[1], expected[1], atol=1e-4)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 8 * BLOCK])
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(llm, length, max_tokens):
    params = GREEDY.clone(max_tokens=max_tokens)
    prompt = prompt_of(length)
    cold = fresh(llm, prompt, params)
    run(llm, prompt, params=params)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    assert output.num_cached_tokens == (length - 1) // BLOCK * BLOCK
    assert_same(run(llm, prompt, params=params)[0], cold)


def test_every_way_to_meet_a_prefix_gives_the_same(llm):
    """Cold, again, continued, twice in one batch, and while the first is still in its prompt (40 tokens, 32 a step)."""
    prompt = prompt_of(24)
    longer = prompt + prompt_of(9, salt=3)
    cold, cold_longer = fresh(llm, prompt), fresh(llm, longer)
    assert_same(run(llm, prompt)[0], cold)
    assert_same(run(llm, prompt)[0], cold)
    assert_same(run(llm, longer)[0], cold_longer)
    llm.reset_prefix_cache()
    for result in run(llm, prompt, prompt):
        assert_same(result, cold)
    long = prompt_of(40, salt=5)
    cold_long = fresh(llm, long)
    for result in run(llm, long, long):
        assert_same(result, cold_long)


def test_a_resent_prompt_after_churn_gives_the_first_answer(llm):
    """Twenty rounds with twice the pool in between: no block is found under a key that it no longer has."""
    prompts = [prompt_of(25, salt) for salt in range(3)]
    cold = [fresh(llm, prompt) for prompt in prompts]
    for turn in range(20):
        fillers = [prompt_of(30, salt=100 + 7 * turn + i) for i in range(5)]
        run(llm, *fillers)
        place = turn % 3
        assert_same(run(llm, prompts[place])[0], cold[place])


def test_memory_that_nobody_wrote_does_not_matter(llm):
    """Padding rows, unused entries and the rest of a block: with NaN in all of it, one to nine requests are right."""
    prompts = [prompt_of(1 + 3 * i, salt=i) for i in range(9)]
    cold = [fresh(llm, prompt) for prompt in prompts]
    for count in range(1, 10):
        llm.reset_prefix_cache()
        poison(llm)
        for result, expected in zip(run(llm, *prompts[:count]), cold, strict=False):
            assert_same(result, expected)
    llm._core.runner.reset()
    llm.reset_prefix_cache()


def test_a_poisoned_block_that_is_read_would_be_seen(llm):
    """The mutation: the same NaN in a block that a request does use."""
    prompt = prompt_of(24)
    cold = fresh(llm, prompt)
    run(llm, prompt)
    poison(llm)
    [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert tuple(output.outputs[0].token_ids) != cold[0]
    llm._core.runner.reset()
    llm.reset_prefix_cache()


def poison(llm: LLM) -> None:
    """Every slot of the pool, the null block's too, becomes NaN."""
    state = llm._core.runner._state
    llm._core.runner._state = type(state)(**{**vars(state), "kv": [pool * np.nan for pool in state.kv]})
