"""SamplingParams: exact types, closed ranges, sentinels, sizes; one error type that names the field."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.engine.errors import RequestError
from octavo.engine.sampling_params import (
    GREEDY_EPSILON,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    OutputKind,
    SamplingParams,
)

NUMBERS = ["presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p"]
INTEGERS = ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"]
BOOLS = [
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
]


def refused(**options: Any) -> str:
    """The message of the RequestError, which must name the field given last."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    name = list(options)[-1]
    assert caught.value.param == name
    assert name in str(caught.value) or name == "stop"
    assert len(str(caught.value)) < 250
    return str(caught.value)


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.seed) == (16, 0, None, None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), None)
    assert params.output_kind is OutputKind.CUMULATIVE
    assert not params.greedy
    assert not params.uses_penalties


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_refuse_what_is_no_finite_number_in_range(name: str) -> None:
    for value in (math.nan, math.inf, -math.inf, 1e9, -1e9, "1", None, True, False, [1.0], 10**400, -(10**5000)):
        refused(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_refuse_bools_floats_and_texts(name: str) -> None:
    for value in (True, False, 2.0, 0.01, math.nan, "2", [2], np.float64(1), 2**63, -(2**63) - 1, 10**5000):
        refused(**{name: value})


@pytest.mark.parametrize("name", BOOLS)
def test_bools_are_bools(name: str) -> None:
    for value in (0, 1, "true", None, [], 1.0):
        refused(**{name: value})
    for value in (True, False):
        assert getattr(SamplingParams(**{name: value}), name) is value


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("presence_penalty", [-2, 2, 0.5], [-2.01, 2.01]),
        ("frequency_penalty", [-2, 2, 0.5], [-2.01, 2.01]),
        ("repetition_penalty", [1e-4, 1.1, 1e4], [0, -1, 1e-5, 1e-300, 1.01e4]),
        ("temperature", [0, 5e-324, 1e-12, 0.7, 2], [-1e-9, 2.01]),
        ("top_p", [1e-9, 0.9, 1], [0, -0.1, 1.0001]),
        ("min_p", [0, 0.5, 1], [-1e-9, 1.0001]),
        ("top_k", [-1, 0, 1, 2**31 - 1], [-2, 2**31]),
        ("seed", [0, -1, 2**32, 2**63 - 1, -(2**63)], []),
        ("n", [1, MAX_CHOICES], [0, -1, MAX_CHOICES + 1]),
        ("max_tokens", [1, 2**31 - 1, None], [0, -1, 2**31]),
        ("min_tokens", [0, 16], [-1]),
        ("logprobs", [None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
        ("prompt_logprobs", [None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
    ],
)
def test_ranges_are_closed_and_nothing_else_is_taken(name: str, inside: list[Any], outside: list[Any]) -> None:
    for value in inside:
        kept = getattr(SamplingParams(**{name: value}), name)
        assert kept == (0 if (name, value) == ("top_k", -1) else value)
        assert isinstance(kept, float) == (name in NUMBERS)
    for value in outside:
        assert f"{value}" in refused(**{name: value})


def test_both_ways_of_no_top_k_are_the_same() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) == SamplingParams()
    assert SamplingParams(top_k=1) != SamplingParams()


def test_zero_logprobs_is_not_none() -> None:
    assert SamplingParams(logprobs=0).logprobs == 0
    assert SamplingParams(prompt_logprobs=0).prompt_logprobs == 0
    assert SamplingParams(logprobs=0) != SamplingParams()


@pytest.mark.parametrize("temperature", [0, 0.0, 5e-324, 1e-12, 1e-6, GREEDY_EPSILON / 2])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).greedy
    assert not SamplingParams(temperature=GREEDY_EPSILON).greedy
    assert "temperature" in refused(temperature=temperature, n=2)


@pytest.mark.parametrize("change", [{"repetition_penalty": 1.1}, {"presence_penalty": -1}, {"frequency_penalty": 1}])
def test_each_penalty_counts_as_used(change: dict[str, float]) -> None:
    assert SamplingParams(**change).uses_penalties


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    message = refused(max_tokens=4, min_tokens=5)
    assert "5" in message
    assert "4" in message
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4
    assert SamplingParams(max_tokens=None, min_tokens=5000).min_tokens == 5000


def test_stop_becomes_a_tuple_of_texts() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=[]).stop == ()
    assert len(SamplingParams(stop=["x" * MAX_STOP_STRING_CHARS] * MAX_STOP_STRINGS).stop or ()) == MAX_STOP_STRINGS
    for value in ("", [""], [None], ["a", 1], 5, b"ab", {"a"}, {"a": 1}, ["x"] * (MAX_STOP_STRINGS + 1)):
        refused(stop=value)
    refused(stop="x" * (MAX_STOP_STRING_CHARS + 1))
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)
    assert SamplingParams(stop=[], detokenize=False).stop == ()


def test_stop_token_ids_become_a_tuple_of_integers() -> None:
    assert SamplingParams(stop_token_ids=[3, 1]).stop_token_ids == (3, 1)
    assert SamplingParams(stop_token_ids=()).stop_token_ids == ()
    SamplingParams(stop_token_ids=[1] * MAX_STOP_TOKEN_IDS)
    for value in (5, "12", [1.0], [True], ["1"], [None], np.array([1, 2]), {1}, [1] * (MAX_STOP_TOKEN_IDS + 1)):
        refused(stop_token_ids=value)


def test_logit_bias_maps_ids_to_floats_within_100() -> None:
    assert SamplingParams(logit_bias={5: 1, 7: -100.0}).logit_bias == {5: 1.0, 7: -100.0}
    assert SamplingParams(logit_bias={}).logit_bias is None
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0))
    for value in (
        *([], [[1, 2]], "x", 5, {"x": 5}, {"1": 5}, {True: 5}, {1.0: 5}),
        *({1: 1e9}, {1: 100.1}, {1: math.nan}, {1: math.inf}, {1: True}, {1: "5"}, {1: None}, {1: 10**5000}),
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0),
    ):
        refused(logit_bias=value)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    SamplingParams(stop_token_ids=[0, 299], logit_bias={0: 1, 299: 1}).check_vocabulary(300)
    for options in (
        {"stop_token_ids": [300]},
        {"stop_token_ids": [-1]},
        {"logit_bias": {300: 5}},
        {"logit_bias": {-1: 5}},
        {"logit_bias": {10**5000: 5}},
    ):
        with pytest.raises(RequestError, match="outside the vocabulary of 300 tokens") as caught:
            SamplingParams(**options).check_vocabulary(300)
        assert caught.value.param == next(iter(options))


def test_output_kind_is_checked() -> None:
    assert SamplingParams(output_kind=OutputKind.DELTA).output_kind is OutputKind.DELTA
    for value in (1, "delta", None):
        refused(output_kind=value)


def test_a_clone_is_checked_again_and_the_original_stays() -> None:
    params = SamplingParams(top_k=-1, stop="a", logit_bias={1: 2})
    assert params.clone(temperature=0).greedy
    assert params.clone() == params
    assert not params.greedy
    with pytest.raises(RequestError, match="temperature"):
        params.clone(temperature=math.nan)
    with pytest.raises(AttributeError):
        params.temperature = 0.0  # type: ignore[misc]


def test_a_round_trip_through_a_message_changes_nothing() -> None:
    params = SamplingParams(
        n=3, temperature=0.5, top_k=-1, seed=-1, stop=["a"], stop_token_ids=[1], logit_bias={2: 3}, logprobs=0
    )
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params


def test_a_huge_value_is_not_echoed_whole() -> None:
    assert len(refused(temperature="9" * 100_000)) < 250
    assert "too long" in refused(top_k=10**5000)
    assert "too long" in refused(top_p=[10**5000])
