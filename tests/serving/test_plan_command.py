"""``octavo plan`` from the command line: options, exit codes, and one real plan where the CUDA plug-in is."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from octavo.engine.args import EngineArgs
from octavo.engine.errors import ConfigError
from octavo.serving import cli, plan


@pytest.fixture
def planner(monkeypatch):
    """Stands in for the planner, which imports jax; remembers what it was asked."""
    asked = SimpleNamespace(args=None, target=None, all_layers=None, problem=None, error=None)

    def make_plan(args, target, progress, *, all_layers):
        asked.args, asked.target, asked.all_layers = args, target, all_layers
        if asked.error:
            raise ConfigError(asked.error)
        return SimpleNamespace(problem=asked.problem)

    monkeypatch.setattr(plan, "_load", lambda module: SimpleNamespace(make_plan=make_plan))
    monkeypatch.setattr(plan, "format_plan", lambda made: f"the plan, problem {made.problem}")
    return asked


def test_defaults(planner, capsys):
    assert cli.main(["plan", "llama-3-8b"]) == 0
    assert planner.args == EngineArgs(model="llama-3-8b")
    assert (planner.target, planner.all_layers) == ("h200", False)
    assert capsys.readouterr().out == "the plan, problem None\n"


def test_options(planner):
    options = "--target h100 -tp 2 --max_model_len 4k --max-num-seqs 8 --max-num-batched-tokens 1K --dtype half"
    more = "--block-size 32 --kv-cache-dtype fp8 --gpu-memory-utilization 0.8 --attention-backend xla --swap-space 2"
    overrides = ["--hf-overrides", '{"num_hidden_layers": 2}', "--quantization", "fp8", "--all-layers"]
    assert cli.main(["plan", "--model", "m", *options.split(), *more.split(), *overrides]) == 0
    assert (planner.target, planner.all_layers) == ("h100", True)
    assert planner.args == EngineArgs(
        model="m",
        tensor_parallel_size=2,
        max_model_len=4000,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        dtype="half",
        block_size=32,
        kv_cache_dtype="fp8",
        gpu_memory_utilization=0.8,
        attention_backend="xla",
        swap_space=2.0,
        quantization="fp8",
        hf_overrides={"num_hidden_layers": 2},
    )


def test_a_model_that_does_not_fit_is_exit_code_1(planner):
    planner.problem = "too large"
    assert cli.main(["plan", "m"]) == 1


@pytest.mark.parametrize("argv", [["m", "--model", "n"], ["--no-such-option"], ["m", "--max-num-seqs", "many"]])
def test_wrong_usage_is_exit_code_2(planner, argv):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["plan", *argv])
    assert exit_.value.code == 2


def test_errors_are_one_sentence_and_exit_code_2(planner, capsys):
    planner.error = "no such target"
    with pytest.raises(SystemExit) as exit_:
        cli.main(["plan", "m"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith("octavo plan: error: no such target")


def run_octavo(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "octavo", "plan", *argv], capture_output=True, text=True, timeout=280)


def test_the_real_planner_names_what_is_wrong(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    result = run_octavo(str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert "config.json lacks hidden_size" in result.stderr or "vocab_size" in result.stderr
    result = run_octavo("nosuchmodel")
    assert result.returncode == 2
    assert "'nosuchmodel' is neither a file, a folder nor a preset; known: llama-3-8b, " in result.stderr
    result = run_octavo("qwen3-0.6b", "--target", "tpu")
    assert result.returncode == 2
    assert "target 'tpu' is unknown; known: h200, h100, rtx4090" in result.stderr


def test_a_whole_plan_or_what_it_lacks(tmp_path):
    """A folder with nothing but a config.json; where nothing can be compiled, one sentence says what to install."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--target", "h100")
    options += ("--attention-backend", "xla", "--swap-space", "0.5", "--kv-cache-dtype", "fp8")
    result = run_octavo(str(tmp_path), *options)
    if result.returncode == 2:
        assert "in Octavo's source folder, pip install '.[cuda12]'" in result.stderr
        assert "Traceback" not in result.stderr
        return
    assert result.returncode == 0, result.stderr
    for part in (
        "in bfloat16, KV cache in float8_e4m3fn, on NVIDIA H100 80GB",
        "attention: xla (asked for)",
        "host tier             0.50 GiB",
        "65,536 blocks of 16 tokens = 1,048,576 tokens",
        "steps, compiled with all 2 layers:\ndecode[8x8]: ",
        "command buffers: 1\n",
        "It fits.",
    ):
        assert part in result.stdout, result.stdout
