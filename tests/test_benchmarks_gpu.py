"""The GPU check: its parts at tiny sizes without a GPU, what becomes of parts that fail or hang, and its arithmetic."""

import importlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
gpu_check = importlib.import_module("gpu_check")
parts = importlib.import_module("gpu.parts")
report = importlib.import_module("gpu.report")
timing = importlib.import_module("gpu.timing")
batches = importlib.import_module("gpu.batches")
correctness = importlib.import_module("gpu.correctness")
throughput = importlib.import_module("gpu.throughput")
grouped = importlib.import_module("gpu.grouped_matmul")

ABSENT = ("msgspec", "zmq", "gguf", "aiohttp", "prometheus_client", "tokenizers", "torch", "transformers")
"""What a machine with a GPU need not have."""
BLOCKER = f"""
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Blocker())
"""
OURS = [part.name for part in parts.PARTS if not part.needs and part.in_smoke]
RIVALS = [part.name for part in parts.PARTS if part.needs]


@pytest.fixture
def bare_environment(tmp_path):
    """The variables of a process that cannot import what ``ABSENT`` names."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    probe = subprocess.run([sys.executable, "-c", "import msgspec"], env=environment, capture_output=True, timeout=60)
    assert probe.returncode != 0, "the blocker does not block"
    return environment


@pytest.mark.timeout(600)  # half a minute of work, on a machine that may be busy
def test_every_part_runs_at_tiny_sizes_with_jax_alone(bare_environment, tmp_path):
    output = tmp_path / "check.json"
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--smoke", "--time-limit", "540", "--output", output]
    done = subprocess.run(command, env=bare_environment, capture_output=True, text=True, timeout=560)
    document = json.loads(output.read_text(encoding="utf-8"))
    failed = {name: part for name, part in document["parts"].items() if part["status"] not in ("ok", "skipped")}
    assert not failed, json.dumps(failed, indent=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: part["status"] for name, part in document["parts"].items()} == {
        **dict.fromkeys(OURS, "ok"),
        **dict.fromkeys(RIVALS, "skipped"),
    }
    assert document["smoke"] is True
    assert document["device"]["platform"] == "cpu"
    assert "NOT A GPU" in done.stdout
    for name in OURS:
        part = document["parts"][name]
        assert part["device"]["platform"] == "cpu"
        assert 0 < part["seconds"] <= part["limit_s"] + 5
        assert part["figures"]
        for figure in part["figures"]:
            assert f"{name} " in done.stdout
            check_plausible(figure)
    by_name = {figure["name"]: figure for part in document["parts"].values() for figure in part["figures"]}
    assert by_name["5 requests"]["compiles_while_running"] == 0
    assert by_name["llama-3-8b 2 rows"]["floor_microseconds"] > 0
    assert sum("worst_error" in figure for figure in document["parts"]["correctness"]["figures"]) >= 3
    experts = document["parts"]["grouped_matmul"]["figures"]
    assert {"mosaic", "loop", "ragged_dot"} == {figure["implementation"] for figure in experts}


def check_plausible(figure):
    if "skipped" in figure:
        assert "JAX >= 0.11.2" in figure["skipped"]
        return
    numbers = {key: value for key, value in figure.items() if isinstance(value, float)}
    assert numbers
    for key, value in numbers.items():
        assert math.isfinite(value), key
        assert value >= 0, key
    assert numbers.get("microseconds", 1.0) > 0
    if "fraction_of_ceiling" in figure:
        assert figure["fraction_of_ceiling"] * figure["microseconds"] == pytest.approx(figure["floor_microseconds"])


def test_without_a_gpu_nothing_is_measured_and_the_part_is_named(tmp_path, capsys):
    output = tmp_path / "new folder" / "check.json"
    assert gpu_check.main(["--parts", "ceilings", "--output", str(output)]) == 1
    part = json.loads(output.read_text(encoding="utf-8"))["parts"]["ceilings"]
    assert part["status"] == "failed"
    assert "no GPU: this process computes on cpu" in part["reason"]
    assert not any("microseconds" in figure for figure in part["figures"])
    assert "ceilings  FAILED" in capsys.readouterr().out


def test_a_part_past_its_limit_is_ended_and_named(tmp_path, capsys):
    output = tmp_path / "check.json"
    assert gpu_check.main(["--smoke", "--time-limit", "0.05", "--parts", "ceilings", "--output", str(output)]) == 1
    part = json.loads(output.read_text(encoding="utf-8"))["parts"]["ceilings"]
    assert part["status"] == "timed out"
    assert "stopped at its limit" in part["reason"]
    assert "ceilings  TIMED OUT" in capsys.readouterr().out


def write_then(rest):
    """The command of a part that has one figure and then does something."""
    script = f"""
import subprocess, sys, time
from pathlib import Path
from gpu.parts import Report
report = Report(Path(sys.argv[1]), device={{"platform": "cpu"}})
report.add("first", microseconds=1.0)
{rest}
"""
    return [sys.executable, "-c", script]


def test_what_a_part_had_before_it_hung_is_kept_and_its_children_end(tmp_path):
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(6); open({str(mark)!r}, 'w')"
    hang = f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    began = time.monotonic()
    outcome = gpu_check.run_part(write_then(hang), 4.0)
    assert time.monotonic() - began < 20
    assert outcome["status"] == "timed out"
    assert [figure["name"] for figure in outcome["figures"]] == ["first"]
    time.sleep(3)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ("sys.exit(3)", "status 3"),
        ("import os; os.kill(os.getpid(), 11)", "status -11"),
        ("with report.guard('second'):\n    raise ValueError('broken')\nsys.exit(report.failed)", "ValueError: broken"),
    ],
)
def test_a_part_that_fails_keeps_its_figures_and_says_why(rest, reason):
    outcome = gpu_check.run_part(write_then(rest), 60.0)
    assert outcome["status"] == "failed"
    assert reason in outcome["reason"]
    assert outcome["figures"][0] == {"name": "first", "microseconds": 1.0}


def test_limits_fit_the_whole_and_options_are_checked(capsys):
    assert sum(part.limit_s for part in parts.PARTS) <= gpu_check.TIME_LIMIT_S == 420
    for arguments, complaint in ((["--parts", "all"], "--parts"), (["--time-limit", "0"], "--time-limit")):
        with pytest.raises(SystemExit) as refused:
            gpu_check.parse_arguments(arguments)
        assert refused.value.code == 2
        assert complaint in capsys.readouterr().err


def test_shares_of_the_ceiling_by_hand():
    found = {
        "ceilings": {
            "figures": [
                {"name": "copy", "terabytes_per_s": 4.0},
                {"name": "elementwise", "terabytes_per_s": 3.0},
                {"name": "matmul", "teraflops_per_s": 800.0},
            ]
        },
        "attention": {
            "figures": [
                {"name": "a", "implementation": "mosaic", "bytes": 4_000_000, "flops": 1, "microseconds": 2.0},
                {"name": "b", "implementation": "mosaic", "bytes": 1, "flops": 1_600_000_000, "microseconds": 8.0},
            ]
        },
        "rival": {"figures": [{"name": "a", "implementation": "torch", "microseconds": 4.0}, {"name": "c"}]},
    }
    report.add_fractions(found)
    ours, rival = found["attention"]["figures"], found["rival"]["figures"]
    assert [figure["fraction_of_ceiling"] for figure in ours] == pytest.approx([0.5, 0.25])
    assert rival[0]["fraction_of_ceiling"] == pytest.approx(0.25)
    assert "fraction_of_ceiling" not in rival[1]


def test_without_ceilings_there_are_no_shares():
    found = {"attention": {"figures": [{"name": "a", "bytes": 1, "flops": 1, "microseconds": 2.0}]}}
    report.add_fractions(found)
    assert "fraction_of_ceiling" not in found["attention"]["figures"][0]


def test_bytes_and_products_of_a_call_by_counting():
    heads = batches.Heads(num_heads=4, num_kv_heads=2, head_dim=8)
    rows = [(3, 5), (1, 7)]
    pairs = sum(1 for q, n in rows for i in range(q) for key in range(n) if key <= n - q + i)
    assert heads.flops(rows) == pairs * 4 * 4 * 8
    assert heads.bytes(rows) == (5 + 7) * 2 * 2 * 8 * 2 + (3 + 1) * 2 * 4 * 8 * 2


def test_a_batch_poisons_exactly_what_no_row_has():
    rows = [(1, 5), (2, 33)]
    batch = batches.make_batch(rows, batches.Heads(2, 1, 8), dtype="float32", num_pools=2, poison=True)
    tables = np.asarray(batch.tables)
    for pool in batch.pools:
        written = ~np.isnan(np.asarray(pool)).any(axis=(1, 2, 4))
        assert written.sum() == 5 + 33
        for row, (_, seq_len) in enumerate(rows):
            assert all(written[tables[row, key // 16], key % 16] for key in range(seq_len))
    assert not np.array_equal(batch.pools[0], batch.pools[1], equal_nan=True)
    assert batch.starts.tolist() == [0, 1, 3]
    assert not np.isnan(np.asarray(batch.q)).any()


def test_a_wrong_result_fails_its_case(tmp_path):
    case = correctness.SMOKE_CASES[0]
    wanted = correctness.reference(case, correctness.make_case_batch(case))
    found = parts.Report(tmp_path / "result.json")
    correctness._compare(found, case, "xla", jnp.asarray(wanted), wanted)
    assert not found.failed
    wrong = wanted.copy()
    wrong[0, 1] *= 1.05
    correctness._compare(found, case, "xla", jnp.asarray(wrong), wanted)
    assert found.failed
    assert "off by 0.05" in found.figures[-1]["error"]
    assert correctness.worst_error(np.full((1, 2), np.nan), np.ones((1, 2))) == math.inf


def test_rows_of_experts_and_what_they_cost_by_counting():
    """The last token is padding. Each row is a product with its expert's weights, which are read once."""
    shape = grouped.Shape("small", num_experts=7, experts_per_token=3, hidden=16, ffn=8)
    case = grouped.Case(shape, 4)
    sizes = case.group_sizes()
    assert sizes.sum() == 3 * 3
    assert sizes.max() <= 3
    rows, _ = grouped.make_rows(case)
    assert np.isnan(np.asarray(rows, np.float32)).all(axis=1).tolist() == [False] * 9 + [True] * 3
    touched = sum(1 for size in sizes if size)
    weights = 3 * 16 * 8
    assert case.work(sizes) == {"flops": 9 * 2 * weights, "bytes": 2 * (touched * weights + 9 * 2 * 16)}
    assert grouped.edge_rows(np.cumsum([0, 3, 1, 0, 2])).tolist() == [0, 2, 3, 4, 5]


def test_an_experts_result_that_is_anothers_fails():
    (case,) = grouped.SMOKE_CASES[grouped.TINY]
    rows, ends = grouped.make_rows(case)
    experts, edges = grouped.make_experts(case.shape, 0), grouped.edge_rows(ends)
    wanted = np.asarray(grouped.reference(rows, *experts, jnp.asarray(ends), jnp.asarray(edges)))
    gate_up, down = (np.asarray(weight, np.float32) for weight in experts)
    for row, found in zip(edges, wanted, strict=True):
        expert = np.searchsorted(ends, row, side="right")
        gate, up = np.split(gate_up[expert] @ np.asarray(rows[row], np.float32), 2)
        assert down[expert] @ (gate / (1 + np.exp(-gate)) * up) == pytest.approx(found, abs=1e-4)
    found = np.asarray(grouped.of(case)["loop"](rows, *experts, jnp.asarray(ends)), np.float32)[edges]
    assert "error" not in grouped.compare(case, "loop", found, wanted)
    sizes = np.roll(np.diff(ends, prepend=0), 1)
    moved = np.asarray(grouped.reference(rows, *experts, jnp.asarray(sizes.cumsum()), jnp.asarray(edges)))
    assert "error" in grouped.compare(case, "loop", moved, wanted)


def test_a_chain_takes_its_own_results_and_the_median_counts():
    seen = []

    def call(carry):
        seen.append(carry)
        time.sleep(0.002)
        return carry + 1

    measured = timing.time_chain(call, 0, lambda carry: None, smoke=False, repeats=3, target_s=0.01)
    assert seen == list(range(len(seen)))
    assert measured.median_s >= 0.002
    assert 1 <= measured.calls <= 5
    assert measured.microseconds(per=4)["microseconds"] == pytest.approx(measured.median_s / 4 * 1e6)


def test_the_workload_is_uniform_between_its_ends():
    requests = throughput.workload(256, throughput.LENGTHS, 1000, seed=0, name="r")
    for sizes in (
        [len(request.prompt_token_ids) for request in requests],
        [request.sampling_params.max_tokens for request in requests],
    ):
        assert 100 <= min(sizes) < 140
        assert 980 < max(sizes) <= 1024
        assert 500 < sum(sizes) / len(sizes) < 620
    assert all(request.sampling_params.ignore_eos and not request.stop_token_ids for request in requests)
    longest = max(len(request.prompt_token_ids) + request.sampling_params.max_tokens for request in requests)
    assert longest <= throughput.SIZES.max_model_len
    assert throughput.SIZES.num_blocks > 256 * throughput.SIZES.max_model_len // 16
