"""The benchmark of conversations that take turns: its sizes, its figures, and a small one over the scheduler."""

import importlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.engine.messages import StepStats

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
multi_turn = importlib.import_module("multi_turn")

SMALL = ["--conversations", "6", "--turns", "3", "--concurrency", "2", "--device-share", "0.5"]


@dataclass
class FakeLLM:
    """Answers with the last token plus one, and counts as computed what its mode would compute."""

    mode: str
    wrong: bool = False

    def __post_init__(self):
        self.config = SimpleNamespace(num_blocks=9)
        self.totals = StepStats()
        self.was_reset = False

    def reset_prefix_cache(self):
        self.was_reset = True
        return True

    def stats(self):
        return replace(self.totals)

    def generate(self, prompts, params, use_tqdm):
        assert not use_tqdm
        results = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            seen = len(ids) - 48 if self.mode == "on" else 0
            self.totals.prompt_tokens_total += len(ids)
            self.totals.prompt_tokens_computed_total += len(ids) - seen
            self.totals.external_prefix_cache_hits_total += seen
            answer = [ids[-1] + 1 + self.wrong] * params.max_tokens
            metrics = SimpleNamespace(first_token_time_s=multi_turn.time.monotonic() + 0.5)
            results.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer)], metrics=metrics))
        return results


def run(monkeypatch, *argv: str, wrong_mode: str | None = None) -> list[FakeLLM]:
    made = []

    def build(args, mode):
        made.append(FakeLLM(mode, wrong=mode == wrong_mode))
        return made[-1]

    monkeypatch.setattr(multi_turn, "build_llm", build)
    multi_turn.main([*SMALL, *argv])
    return made


def test_figures(monkeypatch, tmp_path, capsys):
    file = tmp_path / "figures.json"
    made = run(monkeypatch, "--output", str(file))
    assert [llm.mode for llm in made] == ["off", "on"]
    assert all(llm.was_reset for llm in made)
    document = json.loads(file.read_text())
    sent = 6 * (48 + (48 + 64) + (48 + 128))
    off, on = document["modes"]["off"], document["modes"]["on"]
    assert (off["prompt_tokens"], off["prompt_tokens_computed"], off["host_hit_tokens"]) == (sent, sent, 0)
    assert (on["prompt_tokens"], on["prompt_tokens_computed"]) == (sent, 6 * 3 * 48)
    assert on["host_hit_tokens"] == sent - 6 * 3 * 48
    assert 400 < off["ttft_p50_ms"] < 2000
    assert len(off["ttft_p50_ms_by_turn"]) == 3
    assert document["equal_conversations"] == {"off": 6, "on": 6}
    assert document["arguments"]["device_share"] == 0.5
    assert "from host" in capsys.readouterr().out


def test_other_texts_fail_the_run(monkeypatch):
    with pytest.raises(SystemExit, match="different texts"):
        run(monkeypatch, wrong_mode="on")


def test_no_two_conversations_begin_alike():
    messages = multi_turn.make_messages(20, 8, 48)
    assert len({texts[0][0] for texts in messages}) == 20
    assert {len(text) for texts in messages for text in texts} == {48}


@pytest.mark.parametrize("argv", [["--device-share", "0.1"], ["--turns", "0"], ["--modes", "both"]])
def test_what_cannot_run_is_refused(argv, capsys):
    with pytest.raises(SystemExit):
        multi_turn.parse_arguments(argv)
    assert "error" in capsys.readouterr().err


def test_the_device_has_its_share_of_the_working_set():
    args = multi_turn.parse_arguments([])
    assert multi_turn.blocks_of(args) == 8 * 64 // 16
    assert multi_turn.device_blocks(args) == 20 * 32 // 4
