"""IncrementalDetokenizer and StopMatcher: the text does not depend on how it is cut into ids and pieces."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from octavo.engine.detokenizer import ByteLevelDetokenizer, WindowDetokenizer, create_detokenizer
from octavo.engine.gguf_tokenizer import build_gguf_tokenizer
from octavo.engine.stop_strings import StopMatcher
from octavo.engine.tokenizer import Tokenizer


def make_byte_tokenizer() -> Tokenizer:
    """256 byte tokens by code point of the alphabet, a merged "ab" (256), and the special "<|end|>" (257)."""
    backend = Backend(
        models.BPE(
            vocab={char: i for i, char in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"])},
            merges=[("a", "b")],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>"))


BYTES = make_byte_tokenizer()
ID_OF_BYTE = {BYTES.token_bytes(i)[0]: i for i in range(256)}
END = 257


def byte_ids(data: bytes) -> list[int]:
    return [ID_OF_BYTE[byte] for byte in data]


def make_sentencepiece_tokenizer() -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "b", "▁a", "▁ab", "."]
    metadata = {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.scores": [-float(i) for i in range(len(tokens))],
        "ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }
    return Tokenizer(build_gguf_tokenizer(metadata, "test")[0])


PIECES = make_sentencepiece_tokenizer()


def run(detokenizer: object, ids: list[int]) -> list[str]:
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]  # type: ignore[attr-defined]


def test_bytes_wait_for_the_whole_character() -> None:
    detokenizer = create_detokenizer(BYTES, [])
    assert isinstance(detokenizer, ByteLevelDetokenizer)
    assert run(detokenizer, byte_ids("a😀é".encode())) == ["a", "", "", "", "😀", "", "é", ""]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_cut_character_is_one_replacement(cut: int) -> None:
    detokenizer = create_detokenizer(BYTES, [])
    assert "".join(run(detokenizer, byte_ids("x😀".encode()[: 1 + cut]))) == "x\ufffd"


@given(st.binary(max_size=40), st.binary(max_size=8))
def test_any_bytes_are_what_utf8_says(data: bytes, prompt: bytes) -> None:
    ids = byte_ids(data)
    assert "".join(run(create_detokenizer(BYTES, []), ids)) == data.decode("utf-8", "replace")
    assert "".join(run(create_detokenizer(BYTES, []), ids)) == BYTES.decode(ids)
    detokenizer = create_detokenizer(BYTES, byte_ids(prompt))
    for token_id in ids:
        peeked = detokenizer.peek(token_id)
        assert peeked == detokenizer.push(token_id)


def test_the_prompts_incomplete_end_is_completed() -> None:
    emoji = byte_ids("😀".encode())
    assert "".join(run(create_detokenizer(BYTES, emoji[:2]), emoji[2:])) == "😀"


def test_special_tokens_are_left_out_or_shown() -> None:
    ids = [*byte_ids(b"a"), END, *byte_ids(b"b"), 5000]
    assert run(create_detokenizer(BYTES, []), ids) == ["a", "", "b", "", ""]
    assert run(create_detokenizer(BYTES, [], skip_special_tokens=False), ids) == ["a", "<|end|>", "b", "", ""]


def test_sentencepiece_keeps_the_space_after_the_prompt() -> None:
    prompt, answer = PIECES.encode("ab."), [PIECES.token_to_id("▁ab"), PIECES.token_to_id(".")]
    detokenizer = create_detokenizer(PIECES, prompt)
    assert isinstance(detokenizer, WindowDetokenizer)
    assert run(detokenizer, answer) == [" ab", ".", ""]
    assert run(create_detokenizer(PIECES, []), answer) == ["ab", ".", ""]


@given(st.text(alphabet="ab .é漢😀", max_size=30), st.text(alphabet="ab .é", max_size=6))
def test_window_gives_the_text_of_all_ids(text: str, prompt: str) -> None:
    ids, before = PIECES.encode(text, add_special_tokens=False), PIECES.encode(prompt)
    parts: list[str] = []
    detokenizer = create_detokenizer(PIECES, before)
    for token_id in ids:
        peeked = detokenizer.peek(token_id)
        parts.append(detokenizer.push(token_id))
        assert peeked == parts[-1]
    parts.append(detokenizer.flush())
    whole = PIECES.decode([*before, *ids])
    assert "".join(parts) == whole[len(PIECES.decode(before)) :]
    assert not any("\ufffd" in part for part in parts)


def test_window_gives_up_on_bytes_that_are_no_character() -> None:
    bad = [3 + 0xFF] * 12
    parts = run(create_detokenizer(PIECES, []), [*bad, PIECES.token_to_id("a"), 9999, PIECES.token_to_id("▁a")])
    assert "".join(parts).endswith("a a")
    assert any(parts[: len(bad)]), "nothing may be held for ever"
    assert run(create_detokenizer(PIECES, []), [3 + 0xE2, 3 + 0x82])[-1] != "", "the cut tail comes at the end"


def test_spaces_between_added_tokens_can_be_left_out() -> None:
    backend = Backend(models.WordLevel(vocab={"x": 0, "y": 1}, unk_token="x"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("<a>", special=True), AddedToken("<b>", special=True)])
    words = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    ids = [0, 2, 3, 1]
    shown = [
        "".join(run(create_detokenizer(words, [], skip_special_tokens=False, spaces_between_special_tokens=s), ids))
        for s in (True, False)
    ]
    assert shown == ["x <a> <b> y", "x <a><b> y"]


def test_a_long_run_costs_the_same_per_token() -> None:
    for tokenizer, ids in ((BYTES, [END] * 20_000), (BYTES, byte_ids(b"\xff") * 20_000), (PIECES, [0, 258] * 5_000)):
        detokenizer = create_detokenizer(tokenizer, [])
        start = time.process_time()
        for token_id in ids:
            detokenizer.push(token_id)
        assert (time.process_time() - start) / len(ids) < 100e-6


# Stop strings


def expected(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """By the definition: the stop string complete first, of several the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


def feed(pieces: list[str], stop: list[str], include: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stop, include)
    out = ""
    for place, piece in enumerate(pieces):
        text, found = matcher.push(piece)
        out += text
        if found is not None:
            return out, found
        # Nothing more is held back than could still become a stop string.
        held = "".join(pieces[: place + 1])[len(out) :]
        assert held == "" or any(len(held) < len(s) and s.startswith(held) for s in stop)
    return out + matcher.flush(), None


TEXTS = st.lists(st.text(alphabet="abc", max_size=4), max_size=10)
WORDS = st.text(alphabet="ab", min_size=1, max_size=5)


@settings(max_examples=300)
@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=10), st.lists(WORDS, min_size=1, max_size=4), st.booleans()
)
def test_pieces_make_no_difference(pieces: list[str], stop: list[str], include: bool) -> None:
    text = "".join(pieces)
    assert feed(pieces, stop, include) == expected(text, stop, include)
    assert feed(list(text), stop, include) == expected(text, stop, include)


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["DEFG", "ZZZZZZZZZZ"])
    assert matcher.push("abcD") == ("abc", None)
    assert matcher.push("E") == ("", None)
    assert matcher.push("x") == ("DEx", None)
    assert matcher.push("aaaa") == ("aaaa", None)
    assert matcher.push("DEF") == ("", None)
    assert matcher.flush() == "DEF"
    assert matcher.push("G") == ("G", None), "after a flush nothing is half found"


def test_a_stop_string_across_pieces_never_shows() -> None:
    assert feed(["abcD", "EFG", "HIJxyz"], ["DEFGHIJ"], False) == ("abc", "DEFGHIJ")
    assert feed(["abcD", "EFG", "HIJxyz"], ["DEFGHIJ"], True) == ("abcDEFGHIJ", "DEFGHIJ")


def test_nearly_a_stop_string_over_and_over_stays_cheap() -> None:
    matcher = StopMatcher(["a" * 1023 + "b"] * 4)
    start = time.process_time()
    for _ in range(5000):
        matcher.push("aaa")
    assert (time.process_time() - start) / 5000 < 500e-6
