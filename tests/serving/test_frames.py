"""Frames of plain text are put together from pieces; they must be the very bytes that encoding each chunk gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.messages import FinishReason
from octavo.engine.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.serving.chat import ChatBuilder
from octavo.serving.completions import CompletionBuilder
from octavo.serving.generation import Prompt, Usage
from octavo.serving.protocol.requests import ChatRequest, CompletionRequest, StreamOptions
from octavo.serving.protocol.responses import encode_json
from octavo.serving.streaming import FrameEncoder

MESSAGES = [{"role": "user", "content": "a"}]


def builder(api: str, options: dict):
    if api == "chat":
        return ChatBuilder(ChatRequest(messages=MESSAGES, **options), "id", "m\0any text\0", [1])
    request = CompletionRequest(prompt="a", **options)
    return CompletionBuilder(request, "id", "m\0any text\0", [Prompt([1], "a", None)] * 2, [("a", "a")] * 2)


def delta(index: int, text: str, **ending: object) -> CompletionOutput:
    logprobs = [{7: Logprob(-0.5, 1, text)}]
    return CompletionOutput(index, text, [7], logprobs=logprobs, **ending)


def output(*choices: CompletionOutput) -> RequestOutput:
    return RequestOutput("0", None, [1], list(choices))


def encoders(api: str, options: dict, stream_options: StreamOptions | None) -> tuple[FrameEncoder, FrameEncoder]:
    """One as it is, and one that encodes every chunk in full."""
    usages = Usage(prompt_tokens=1), Usage(prompt_tokens=1)
    quick, full = (FrameEncoder(builder(api, options), usage, stream_options) for usage in usages)
    full._only_text = False
    return quick, full


TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(['"', "\\", "\n", "\0any text\0", "é", "😀", "data: x\n\n"]))
STREAM_OPTIONS = [None, StreamOptions(include_usage=True), StreamOptions(continuous_usage_stats=True)]


@pytest.mark.parametrize("api", ["chat", "completions"])
@given(
    texts=st.lists(st.lists(TEXTS, min_size=1, max_size=3), min_size=1, max_size=5),
    options=st.sampled_from([{}, {"return_token_ids": True}, {"logprobs": 1}]),
    stream_options=st.sampled_from(STREAM_OPTIONS),
    prompt_index=st.integers(0, 1),
)
def test_pieces_give_the_same_bytes(api, texts, options, stream_options, prompt_index):
    if api == "chat" and "logprobs" in options:
        options = {"logprobs": True, "top_logprobs": 1}
    quick, full = encoders(api, {**options, "n": 3}, stream_options)
    assert quick.start() == full.start()
    for step in texts:
        news = output(*(delta(index, text) for index, text in enumerate(step)))
        assert quick.frames(prompt_index, news) == full.frames(prompt_index, news)
    end = output(delta(0, texts[0][0], finish_reason=FinishReason.STOP, stop_reason="x"), delta(1, "y"))
    assert quick.frames(prompt_index, end) == full.frames(prompt_index, end)
    assert quick.usage() == full.usage()


def test_plain_text_takes_the_quick_way():
    """A builder is asked once per choice, whatever follows; with log-probabilities each time."""
    for options, asked in (({}, 2), ({"logprobs": 0}, 10)):
        made = builder("completions", {**options, "n": 2})
        encoder = FrameEncoder(made, Usage(), None)
        calls = []
        original = made.chunks
        made.chunks = lambda *args, original=original, calls=calls: calls.append(args) or original(*args)
        for _ in range(5):
            for index in range(2):
                [frame] = encoder.frames(0, output(delta(index, "t")))
                assert frame.startswith(b"data: {")
        assert len(calls) == asked
    assert encode_json("t") in frame
