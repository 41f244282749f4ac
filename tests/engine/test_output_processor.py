"""OutputProcessor: one pipeline for every kind of output, statistics once per request, nothing kept after the end."""

import asyncio
import gc
import time
import weakref
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from octavo.engine.errors import EngineDeadError, RequestError
from octavo.engine.messages import (
    AbortRequest,
    ChoiceOutput,
    EngineRequest,
    FinishReason,
    RequestTiming,
    SampledLogprobs,
    StepOutputs,
    StepStats,
)
from octavo.engine.metrics import FinishedRequest, NullStatSink
from octavo.engine.output_collector import RequestOutputCollector
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.engine.sampling_params import OutputKind, SamplingParams
from octavo.engine.tokenizer import Tokenizer

CUMULATIVE, DELTA, FINAL_ONLY = OutputKind.CUMULATIVE, OutputKind.DELTA, OutputKind.FINAL_ONLY
END, STOP_WORD = 256, 257


def make_tokenizer() -> Tokenizer:
    """256 byte tokens and two special ones, "<|end|>" and "<|stop|>"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|end|>", "<|stop|>")])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>"))


TOKENIZER = make_tokenizer()
ID_OF_BYTE = {TOKENIZER.token_bytes(i)[0]: i for i in range(256)}


def ids_of(text: str | bytes) -> list[int]:
    return [ID_OF_BYTE[byte] for byte in (text.encode() if isinstance(text, str) else text)]


class Sink(NullStatSink):
    def __init__(self) -> None:
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.finished: list[FinishedRequest] = []

    def record_first_token(self, time_to_first_token_s: float) -> None:
        self.first.append(time_to_first_token_s)

    def record_inter_token(self, gap_s: float) -> None:
        self.gaps.append(gap_s)

    def record_finished(self, finished: FinishedRequest) -> None:
        self.finished.append(finished)


def make_request(request_id: str = "r", prompt: str = "p", **params: object) -> EngineRequest:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    stops = frozenset((END, *(sampling.stop_token_ids or ())))
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=ids_of(prompt),
        sampling_params=sampling,
        arrival_time_s=time.monotonic(),
        stop_token_ids=stops,
        eos_token_ids=frozenset((END,)),
    )


def sampled(token_id: int) -> SampledLogprobs:
    return SampledLogprobs(
        token_id=token_id,
        logprob=-0.5,
        rank=1,
        top_token_ids=[token_id, ID_OF_BYTE[0x78], END],
        top_logprobs=[-0.5, -2, -3],
    )


def news(token_ids: Sequence[int], finish: FinishReason | None = None, **more: object) -> ChoiceOutput:
    fields = {"request_id": "r", "index": 0, "logprobs": [sampled(i) for i in token_ids], **more}
    return ChoiceOutput(token_ids=list(token_ids), finish_reason=finish, **fields)  # type: ignore[arg-type]


def step(*outputs: ChoiceOutput) -> StepOutputs:
    return StepOutputs(outputs=list(outputs), stats=StepStats())


def run(
    request: EngineRequest, chunks: Sequence[Sequence[int]], end: FinishReason = FinishReason.LENGTH
) -> tuple[list[RequestOutput], list[AbortRequest]]:
    """All outputs when the ids come in these chunks, the last one with the end."""
    processor = OutputProcessor(TOKENIZER, NullStatSink())
    processor.add_request(request, "p")
    outputs: list[RequestOutput] = []
    aborts: list[AbortRequest] = []
    for place, chunk in enumerate(chunks):
        result = processor.process(step(news(chunk, end if place == len(chunks) - 1 else None)))
        outputs += result.request_outputs
        aborts += result.aborts
    assert processor.num_unfinished == 0
    return outputs, aborts


def whole(outputs: list[RequestOutput], kind: OutputKind) -> CompletionOutput:
    """What a client knows at the end."""
    if kind is not DELTA:
        return outputs[-1].outputs[0]
    parts = [output.outputs[0] for output in outputs]
    return CompletionOutput(
        index=0,
        text="".join(part.text for part in parts),
        token_ids=[i for part in parts for i in part.token_ids],
        cumulative_logprob=parts[-1].cumulative_logprob,
        logprobs=[entry for part in parts for entry in part.logprobs or []],
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )


TOKEN_IDS = st.lists(
    st.sampled_from([*ids_of("aabbbc"), *ids_of("é😀"), END, STOP_WORD, 9999]), min_size=1, max_size=25
)
STOPS = st.lists(st.sampled_from(["a", "ab", "bb", "abc", "bé", "😀a", "cccc", "\ufffd"]), max_size=3)


@settings(max_examples=300, deadline=None)
@given(
    ids=TOKEN_IDS,
    cuts=st.sets(st.integers(1, 24)),
    stop=STOPS,
    include=st.booleans(),
    skip=st.booleans(),
    min_tokens=st.integers(0, 4),
    end=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)
def test_streaming_or_not_makes_no_difference(
    ids: list[int], cuts: set[int], stop: list[str], include: bool, skip: bool, min_tokens: int, end: FinishReason
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    chunks = [ids[a:b] for a, b in pairwise(edges)]
    answers = []
    for kind, pieces in ((DELTA, [[i] for i in ids]), (DELTA, chunks), (CUMULATIVE, chunks), (FINAL_ONLY, [ids])):
        request = make_request(
            stop=stop, include_stop_str_in_output=include, skip_special_tokens=skip, min_tokens=min_tokens,
            max_tokens=50, logprobs=2, output_kind=kind,
        )  # fmt: skip
        outputs, _ = run(request, pieces, end)
        answer = whole(outputs, kind)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert (
            "".join(
                entry[i].decoded_token or "" for i, entry in zip(answer.token_ids, answer.logprobs or [], strict=True)
            )
            == answer.text
        )
        if kind is DELTA:
            assert all(output.outputs[0].text for output in outputs[:-1]), "no empty deltas"
        answers.append(answer)
    assert answers[0] == answers[1] == answers[2] == answers[3]
    if answers[0].stop_reason is None and end is FinishReason.LENGTH:
        assert answers[0].text == TOKENIZER.decode([i for i in ids if i < 9999], skip_special_tokens=skip)
        assert answers[0].token_ids == ids


def test_a_stop_string_ends_the_choice_and_tells_the_core() -> None:
    for include, text in ((False, "abc"), (True, "abcDEF")):
        request = make_request(stop=["DEF"], include_stop_str_in_output=include, output_kind=DELTA, logprobs=0)
        outputs, aborts = run_open(request, [ids_of(part) for part in ("ab", "cD", "E", "Fxyz", "more")])
        answer = whole(outputs, DELTA)
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (text, FinishReason.STOP, "DEF")
        assert answer.token_ids == ids_of("abcDEF"), "ids after the stop string are dropped"
        length = len(answer.token_ids)
        assert aborts == [AbortRequest(request_id="r", index=0, reason=FinishReason.STOP, num_output_tokens=length)]
        assert outputs[-1].finished


def run_open(request: EngineRequest, chunks: Sequence[Sequence[int]]) -> tuple[list[RequestOutput], list[AbortRequest]]:
    """As ``run``, without an end from the core."""
    processor = OutputProcessor(TOKENIZER, NullStatSink())
    processor.add_request(request, None)
    results = [processor.process(step(news(chunk))) for chunk in chunks]
    return [o for r in results for o in r.request_outputs], [a for r in results for a in r.aborts]


def test_no_abort_when_the_core_ended_it_too() -> None:
    request = make_request(stop=["bc"], output_kind=DELTA)
    outputs, aborts = run(request, [ids_of("abc")], FinishReason.LENGTH)
    assert not aborts
    assert (outputs[-1].outputs[0].text, outputs[-1].outputs[0].finish_reason) == ("a", FinishReason.STOP)


def test_held_text_comes_out_at_the_end() -> None:
    outputs, _ = run(make_request(stop=["DEFG"], output_kind=DELTA), [ids_of(c) for c in "abDEF"])
    assert [o.outputs[0].text for o in outputs] == ["a", "b", "DEF"]
    assert outputs[-1].outputs[0].finish_reason is FinishReason.LENGTH


def test_stop_strings_do_not_count_among_the_first_min_tokens() -> None:
    for min_tokens, text in ((0, ""), (1, "ab"), (2, "ab"), (3, "abab"), (4, "abab")):
        request = make_request(stop=["ab"], min_tokens=min_tokens)
        assert whole(run_open(request, [ids_of(c) for c in "abababab"])[0], CUMULATIVE).text == text


def test_held_text_comes_before_a_cut_character() -> None:
    cut = ids_of("xb" + "é")[:-1]
    assert whole(run(make_request(stop=["bé"]), [cut])[0], CUMULATIVE).text == "xb\ufffd"


def test_the_stop_token_is_counted_and_not_shown() -> None:
    for skip in (True, False):
        outputs, _ = run(make_request(skip_special_tokens=skip), [ids_of("ab"), [END]], FinishReason.STOP)
        answer = whole(outputs, CUMULATIVE)
        assert (answer.text, answer.token_ids) == ("ab", [*ids_of("ab"), END])
    ordinary = make_request(stop_token_ids=ids_of("b"))
    assert whole(run(ordinary, [ids_of("a"), ids_of("b")], FinishReason.STOP)[0], CUMULATIVE).text == "a"
    assert whole(run(ordinary, [ids_of("a"), ids_of("b")], FinishReason.LENGTH)[0], CUMULATIVE).text == "ab"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_is_a_special_token(include: bool) -> None:
    request = make_request(stop=["<|stop|>"], stop_token_ids=[STOP_WORD], include_stop_str_in_output=include)
    processor = OutputProcessor(TOKENIZER, NullStatSink())
    processor.add_request(request, None)
    last = news([*ids_of("a"), STOP_WORD], FinishReason.STOP, stop_reason=STOP_WORD)
    answer = processor.process(step(last)).request_outputs[0].outputs[0]
    assert answer.text == ("a<|stop|>" if include else "a")
    assert answer.stop_reason == "<|stop|>"


def test_without_text() -> None:
    request = make_request(detokenize=False, output_kind=DELTA, logprobs=1)
    for tokenizer in (TOKENIZER, None):
        processor = OutputProcessor(tokenizer, NullStatSink())
        processor.add_request(request, None)
        first = processor.process(step(news([1, 2]))).request_outputs[0].outputs[0]
        last = processor.process(step(news([END], FinishReason.STOP))).request_outputs[0].outputs[0]
        assert (first.text, first.token_ids, last.token_ids) == ("", [1, 2], [END])
        assert first.logprobs is not None
        assert first.logprobs[0][1].decoded_token is None
    with pytest.raises(RequestError, match="tokenizer"):
        OutputProcessor(None, NullStatSink()).add_request(make_request(stop=["x"]), None)


def test_logprobs_name_tokens_by_their_text() -> None:
    request = make_request(logprobs=3)
    emoji = ids_of("😀")
    answer = whole(run(request, [[*emoji, *ids_of("a")]])[0], CUMULATIVE)
    assert answer.logprobs is not None
    assert [entry[i].decoded_token for i, entry in zip(answer.token_ids, answer.logprobs, strict=True)] == [
        "",
        "",
        "",
        "😀",
        "a",
    ]
    assert answer.logprobs[4][END].decoded_token == "<|end|>"
    assert answer.logprobs[4][END].rank == 3
    assert answer.cumulative_logprob == pytest.approx(-2.5)
    assert len(whole(run(make_request(logprobs=0), [ids_of("a")])[0], CUMULATIVE).logprobs[0]) == 1  # type: ignore[index]
    assert whole(run(make_request(), [ids_of("a")])[0], CUMULATIVE).logprobs is None


def test_prompt_logprobs_come_once_in_a_stream_and_at_the_end_otherwise() -> None:
    prompt = "é<|end|>"
    for kind in (DELTA, CUMULATIVE):
        request = make_request(prompt="éx", prompt_logprobs=1, output_kind=kind)
        processor = OutputProcessor(TOKENIZER, NullStatSink())
        processor.add_request(request, prompt)
        first = news(
            ids_of("a"), prompt_logprobs=[sampled(i) for i in request.prompt_token_ids[1:]], num_cached_tokens=2
        )
        outputs = [
            processor.process(step(item)).request_outputs[0] for item in (first, news(ids_of("b"), FinishReason.LENGTH))
        ]
        entries = outputs[0].prompt_logprobs
        assert entries is not None
        assert entries[0] is None
        assert [
            entry[i].decoded_token for i, entry in zip(request.prompt_token_ids[1:], entries[1:], strict=True) if entry
        ] == ["é", "x"]
        assert (outputs[1].prompt_logprobs is None) == (kind is DELTA)
        assert [output.num_cached_tokens for output in outputs] == [2, 2]
        assert outputs[0].prompt == prompt


def test_choices_end_one_by_one() -> None:
    sink = Sink()
    processor = OutputProcessor(TOKENIZER, sink)
    processor.add_request(make_request(n=2, output_kind=DELTA, temperature=1.0), None)
    one = processor.process(step(news(ids_of("a"), index=1), news(ids_of("b"), FinishReason.LENGTH)))
    assert [(o.index, o.text, o.finished) for o in one.request_outputs[0].outputs] == [(0, "b", True), (1, "a", False)]
    assert not one.request_outputs[0].finished
    two = processor.process(step(news(ids_of("zz")), news(ids_of("c"), index=1), news(ids_of("c"), index=7)))
    assert [(o.index, o.text) for o in two.request_outputs[0].outputs] == [(1, "c")], "a finished choice says no more"
    three = processor.process(step(news([END], FinishReason.STOP, index=1)))
    assert three.request_outputs[0].finished
    assert [(o.index, o.text, o.token_ids) for o in three.request_outputs[0].outputs] == [(1, "", [END])]
    assert [f.num_generation_tokens for f in sink.finished] == [4]


def test_final_only_gives_all_choices_once() -> None:
    processor = OutputProcessor(TOKENIZER, NullStatSink())
    processor.add_request(make_request(n=2, output_kind=FINAL_ONLY, temperature=1.0), None)
    assert not processor.process(step(news(ids_of("a"), FinishReason.LENGTH))).request_outputs
    last = processor.process(step(news(ids_of("b"), FinishReason.LENGTH, index=1))).request_outputs[0]
    assert [o.text for o in last.outputs] == ["a", "b"]


def test_outputs_given_out_do_not_change_later() -> None:
    processor = OutputProcessor(TOKENIZER, NullStatSink())
    processor.add_request(make_request(logprobs=0), None)
    first = processor.process(step(news(ids_of("a")))).request_outputs[0].outputs[0]
    processor.process(step(news(ids_of("b"))))
    assert (first.text, first.token_ids, len(first.logprobs or [])) == ("a", ids_of("a"), 1)


def test_abort_and_failure_end_requests_once_with_their_text() -> None:
    sink = Sink()
    processor = OutputProcessor(TOKENIZER, sink)
    processor.add_request(make_request(stop=["bcd"]), None)
    processor.process(step(news(ids_of("abc"))))
    output = processor.abort("r")
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abc", FinishReason.ABORT)
    assert output.finished
    assert processor.abort("r") is None
    assert not processor.process(step(news(ids_of("d"), FinishReason.LENGTH))).request_outputs
    processor.add_request(make_request("s"), None)
    with pytest.raises(ValueError, match="in use"):
        processor.add_request(make_request("s"), None)
    failed = processor.fail_all(EngineDeadError("the device is gone"))
    assert [(o.request_id, o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in failed] == [
        ("s", FinishReason.ERROR, "the device is gone")
    ]
    assert [f.finish_reason for f in sink.finished] == [FinishReason.ABORT, FinishReason.ERROR]
    assert processor.num_unfinished == 0


def test_an_error_of_one_request_reaches_its_caller() -> None:
    processor = OutputProcessor(TOKENIZER, NullStatSink())
    processor.add_request(make_request(), None)
    answer = processor.process(step(news([], FinishReason.ERROR, error="logits are not finite"))).request_outputs[0]
    assert (answer.outputs[0].finish_reason, answer.outputs[0].stop_reason) == (
        FinishReason.ERROR,
        "logits are not finite",
    )


def test_statistics_are_recorded_once_per_request() -> None:
    sink = Sink()
    processor = OutputProcessor(TOKENIZER, sink)
    for name in ("a", "b"):
        processor.add_request(make_request(name, n=2, temperature=1.0, max_tokens=9), None)
    for _ in range(3):
        processor.process(step(*(news(ids_of("x"), request_id=r, index=i) for r in "ab" for i in (0, 1))))
    timing = RequestTiming(first_scheduled_time_s=time.monotonic(), num_preemptions=3)
    processor.process(step(news(ids_of("xy"), FinishReason.LENGTH, request_id="a", timing=timing)))
    assert not sink.finished
    processor.process(step(news([END], FinishReason.STOP, request_id="a", index=1)))
    assert (len(sink.first), len(sink.gaps)) == (2, 4 * 2 + 3)
    done = sink.finished[0]
    assert (done.request_id, done.n, done.max_tokens, done.num_generation_tokens) == ("a", 2, 9, 9)
    assert done.max_num_generation_tokens == 5
    assert (done.num_prompt_tokens, done.num_preemptions, done.finish_reason) == (1, 3, FinishReason.STOP)
    assert done.time_to_first_token_s is not None
    assert 0 <= done.time_to_first_token_s <= done.e2e_latency_s
    assert done.time_per_output_token_s is not None
    assert done.time_per_output_token_s <= done.decode_time_s
    processor.abort("b")
    assert [f.request_id for f in sink.finished] == ["a", "b"]


def test_a_request_without_tokens_has_no_first_token_time() -> None:
    sink = Sink()
    processor = OutputProcessor(TOKENIZER, sink)
    processor.add_request(make_request(), None)
    processor.abort("r")
    assert sink.first == []
    assert sink.finished[0].time_to_first_token_s is None
    assert sink.finished[0].time_per_output_token_s is None


def test_nothing_of_a_finished_request_is_kept() -> None:
    processor = OutputProcessor(TOKENIZER, NullStatSink())
    request = make_request()
    processor.add_request(request, None)
    state = weakref.ref(processor._requests["r"].choices[0].stream)
    processor.process(step(news(ids_of("a"), FinishReason.LENGTH)))
    gc.collect()
    assert state() is None


def test_cost_per_token() -> None:
    processor = OutputProcessor(TOKENIZER, NullStatSink())
    rows, steps = 32, 50
    for row in range(rows):
        processor.add_request(make_request(str(row), output_kind=DELTA, stop=["zzz"], max_tokens=99), None)
    start = time.process_time()
    for _ in range(steps):
        processor.process(step(*(news(ids_of("a"), request_id=str(row), logprobs=None) for row in range(rows))))
    assert (time.process_time() - start) / (rows * steps) < 150e-6


# One slot per client


def take_all(kind: OutputKind, every: int) -> tuple[str, list[int], int]:
    """A client that takes an output after every few of them."""
    processor = OutputProcessor(TOKENIZER, NullStatSink())
    processor.add_request(make_request(output_kind=kind, logprobs=0), None)
    collector = RequestOutputCollector(kind)
    taken: list[RequestOutput] = []
    text = ids_of("abcdefg")
    for place, token_id in enumerate(text):
        end = FinishReason.LENGTH if place == len(text) - 1 else None
        for output in processor.process(step(news([token_id], end))).request_outputs:
            collector.put(output)
        if place % every == 0 and (output := collector.get_nowait()) is not None:
            taken.append(output)
    if (output := collector.get_nowait()) is not None:
        taken.append(output)
    assert taken[-1].finished
    answer = whole(taken, kind)
    return answer.text, answer.token_ids, len(answer.logprobs or [])


@pytest.mark.parametrize("every", [1, 3, 100])
def test_a_slow_client_gets_the_same(every: int) -> None:
    for kind in (DELTA, CUMULATIVE, FINAL_ONLY):
        assert take_all(kind, every) == ("abcdefg", ids_of("abcdefg"), 7)


def test_merging_keeps_choices_apart() -> None:
    processor = OutputProcessor(TOKENIZER, NullStatSink())
    processor.add_request(make_request(n=2, output_kind=DELTA, temperature=1.0), None)
    collector = RequestOutputCollector(DELTA)
    for item in (news(ids_of("a")), news(ids_of("x"), index=1), news(ids_of("b"), FinishReason.LENGTH)):
        collector.put(processor.process(step(item)).request_outputs[0])
    merged = collector.get_nowait()
    assert merged is not None
    assert [(o.index, o.text, o.finished) for o in merged.outputs] == [(0, "ab", True), (1, "x", False)]
    assert collector.get_nowait() is None


async def test_the_client_waits_and_hears_of_failure() -> None:
    collector = RequestOutputCollector(DELTA)
    output = RequestOutput("r", None, [])
    asyncio.get_running_loop().call_later(0.01, collector.put, output)
    assert await asyncio.wait_for(collector.get(), 5) is output
    collector.put(output)
    collector.fail(EngineDeadError("gone"))
    assert await collector.get() is output, "what was made before the failure comes first"
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="gone"):
            await collector.get()
