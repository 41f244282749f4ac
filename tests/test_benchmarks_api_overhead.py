"""The measurement of the API process: it counts every token, and tells when frames were merged."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from tiny_model import add_tokenizer, tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
api_overhead = importlib.import_module("api_overhead")


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_small_run(tmp_path, capsys, api):
    """All three processes. The client itself checks that every stream is whole and every token came."""
    model = add_tokenizer(tiny_model(tmp_path / "model"))
    output = tmp_path / "figures.json"
    arguments = ["--model", str(model), "--api", api, "--streams", "8", "--tokens", "30", "--repeat", "1"]
    assert api_overhead.main([*arguments, "--output", str(output)]) == 0
    [round_] = json.loads(output.read_text())["rounds"]
    for which in ("api", "ceiling"):
        assert round_[which]["frames_per_s"] == round_[which]["tokens_per_s"] > 0
    chunk, same = (json.loads(round_[which]["frame"].removeprefix("data: ")) for which in ("api", "ceiling"))
    [choice] = chunk["choices"]
    assert (choice["delta"]["content"] if api == "chat" else choice["text"]) == "~"
    assert choice["finish_reason"] is None
    assert same == chunk | {"id": same["id"], "created": same["created"]}, "the very same frames"
    table = capsys.readouterr().out
    for title in ("api: tokens/s", "ceiling: CPU s / 1,000 tokens", "api / ceiling"):
        assert title in table


def figures(tokens_per_s: float, merged_share: float) -> dict[str, float]:
    return {
        "tokens_per_s": tokens_per_s,
        "frames_per_s": tokens_per_s * (1 - merged_share),
        "merged_share": merged_share,
        "cpu_s_per_1000_tokens": 0.03,
        "cpu_share": 0.7,
    }


@pytest.mark.parametrize(
    ("tokens_per_s", "merged_share", "message"),
    [(12_000, 0.0, ""), (12_000, 0.01, "frames were merged: 1.00%"), (9_000, 0.0, "below 10,000 tokens/s")],
)
def test_what_makes_it_fail(monkeypatch, capsys, tokens_per_s, merged_share, message):
    rounds = [{"api": figures(tokens_per_s, merged_share), "ceiling": figures(40_000, 0.0)}]
    monkeypatch.setattr(api_overhead, "measure", lambda args: rounds)
    assert api_overhead.main(["--at-least", "10000"]) == (1 if message else 0)
    assert message in capsys.readouterr().err
