"""Prompts and sampling options against the model: ids, context and stop ids, refused before the engine sees them."""

from types import SimpleNamespace
from typing import Any

import pytest

from octavo.engine.args import EngineArgs
from octavo.engine.config import EngineConfig
from octavo.engine.errors import ConfigError, RequestError
from octavo.engine.input_processor import InputProcessor, default_sampling_params
from octavo.engine.messages import EngineRequest
from octavo.engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

CONFIG: Any = SimpleNamespace(
    vocab_size=300,
    max_logprobs=20,
    max_model_len=64,
    block_size=16,
    num_blocks=100,
    eos_token_ids=frozenset({1, 2}),
)


def make(prompt: Any, **options: Any) -> EngineRequest:
    return InputProcessor(CONFIG, None).make_request("r", prompt, SamplingParams(**options))[0]


@pytest.mark.parametrize(
    "prompt",
    [
        [300],
        [-1],
        [[-1]],
        [],
        "",
        [1.5],
        [True],
        ["1"],
        7,
        None,
        b"ab",
        {"text": "a"},
        {"prompt_token_ids": "ab"},
        {"prompt_token_ids": {"prompt": "ab"}},
    ],
)
def test_what_is_no_list_of_known_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError):
        make(prompt, max_tokens=1)
    assert make([0, 299], max_tokens=1).prompt_token_ids == [0, 299]


def test_a_text_with_a_token_that_only_the_tokenizer_has_is_refused() -> None:
    """As text-only Gemma 3: its tokenizer has an image token one past the embeddings."""
    tokenizer: Any = SimpleNamespace(
        eos_token_ids=frozenset(), encode=lambda text: {"": [], "hi": [5, 299, 7]}.get(text, [5, 300, 7])
    )
    processor = InputProcessor(CONFIG, tokenizer)
    params = SamplingParams(max_tokens=1)
    assert processor.make_request("r", "hi", params)[0].prompt_token_ids == [5, 299, 7]
    for prompt in ("<image>", {"prompt": "<image>"}):
        with pytest.raises(RequestError, match="300 is not a token id; this model has ids 0 to 299"):
            processor.make_request("r", prompt, params)
    with pytest.raises(RequestError, match="empty"):
        processor.make_request("r", "", params)


@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"),
    [
        (63, None, 1),
        (63, 1, 1),
        (63, 2, "64|63"),
        (63, 64, "64|63"),
        (64, None, "64"),
        (64, 1, "64"),
        (65, None, "64.*65|65.*64"),
        (1, None, 63),
    ],
)
def test_the_context_is_never_exceeded_and_never_cut(length: int, max_tokens: int | None, expected: int | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(RequestError, match=expected) as caught:
            make([5] * length, max_tokens=max_tokens)
        assert "-" not in str(caught.value), "no negative number of tokens"
    else:
        request = make([5] * length, max_tokens=max_tokens)
        assert request.sampling_params.max_tokens == expected
        assert len(request.prompt_token_ids) == length


def test_min_tokens_can_hold_back_every_id_that_stops() -> None:
    """The device has room for so many ids; more would leave some that could end the output early."""
    own = list(range(10, 10 + MAX_STOP_TOKEN_IDS - 2))
    request = make([5], stop_token_ids=own, min_tokens=1)
    assert request.stop_token_ids == frozenset(own) | {1, 2}
    assert len(request.stop_token_ids) == MAX_STOP_TOKEN_IDS
    with pytest.raises(RequestError, match="stop_token_ids") as caught:
        make([5], stop_token_ids=[*own, 200], min_tokens=1)
    assert caught.value.param == "stop_token_ids"
    assert make([5], stop_token_ids=[*own, 200], min_tokens=1, ignore_eos=True).eos_token_ids == frozenset()
    assert len(make([5], stop_token_ids=[*own, 200]).stop_token_ids) == MAX_STOP_TOKEN_IDS + 1


def test_ids_of_options_are_checked_against_the_vocabulary() -> None:
    for options in ({"stop_token_ids": [300]}, {"logit_bias": {300: 1.0}}):
        with pytest.raises(RequestError, match="vocabulary of 300"):
            make([5], **options)


def test_min_tokens_must_fit_the_rest_of_the_context() -> None:
    assert make([5] * 4, max_tokens=None, min_tokens=60).sampling_params.max_tokens == 60
    with pytest.raises(RequestError, match="min_tokens"):
        make([5] * 4, max_tokens=None, min_tokens=61)


def test_sampling_defaults_are_the_models_under_the_operators() -> None:
    own = {"temperature": 0.6, "top_k": 20}
    assert default_sampling_params(own, "auto", None) == own
    assert default_sampling_params(own, "vllm", None) == {}
    override = {"temperature": 0.2, "max_new_tokens": 7}
    assert default_sampling_params(own, "auto", override) == {"temperature": 0.2, "top_k": 20, "max_tokens": 7}
    assert default_sampling_params(own, "vllm", override) == {"temperature": 0.2, "max_tokens": 7}


def test_defaults_that_no_request_could_have_are_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="top_p"):
        default_sampling_params({"top_p": 0.0}, "auto", None)
    assert default_sampling_params({"top_p": 0.0}, "vllm", None) == {}
    assert default_sampling_params({"top_p": 0.0}, "auto", {"top_p": 1.0}) == {"top_p": 1.0}


@pytest.mark.parametrize("salt", ["", "x" * 1025, 7, b"x", "\ud800"])
def test_a_salt_that_cannot_be_hashed_is_refused_before_the_engine(salt: Any) -> None:
    processor = InputProcessor(CONFIG, None)
    with pytest.raises(RequestError, match="cache_salt") as caught:
        processor.make_request("r", [5], SamplingParams(), cache_salt=salt)
    assert caught.value.param == "cache_salt"
    assert processor.make_request("r", [5], SamplingParams(), cache_salt="größe")[0].cache_salt == "größe"


def test_a_small_budget_alone_lowers_the_number_of_rows() -> None:
    model = {"context_len": 64, "model_path": "m", "model_name": "m", "vocab_size": 300, "eos_token_ids": frozenset()}
    for args, rows in [({}, 64), ({"max_num_batched_tokens": 32}, 32), ({"max_num_batched_tokens": 600}, 64)]:
        config = EngineConfig.from_args(EngineArgs(**args)).resolve(platform="cpu", **model)
        assert (config.max_num_seqs, config.max_num_batched_tokens) == (rows, args.get("max_num_batched_tokens", 512))
    refused = EngineConfig.from_args(EngineArgs(max_num_batched_tokens=32, max_num_seqs=33))
    with pytest.raises(ConfigError, match="max_num_seqs 33"):
        refused.resolve(platform="cpu", **model)
