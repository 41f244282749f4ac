"""Tensor parallelism on virtual CPU devices against one device: models, an engine, and what must be told apart.

All in one process of its own (``tests/support/tensor_parallel_cases.py``), as its number of devices is fixed early.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.models.architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "tensor_parallel_cases.py"
TOLERANCE, TOLD_APART = 1e-5, 1e-1

pytestmark = pytest.mark.timeout(600)


def run_cases(*groups: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *groups], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    done = run_cases("every_architecture", "hard_to_share", "quantized", "wrong_orders", "engines", "float8_caches")
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def of(records: list[dict[str, Any]], group: str) -> list[dict[str, Any]]:
    return [record for record in records if record["group"] == group]


def test_every_architecture_on_two_devices_is_as_on_one(records):
    found = of(records, "every_architecture")
    golden = json.loads((ROOT / "tests" / "models" / "goldens" / "cases.json").read_text(encoding="utf-8"))
    assert {golden[record["case"]]["architectures"][0] for record in found} == set(ARCHITECTURES)
    assert [record for record in found if not (record["error"] <= TOLERANCE and record["same_tokens"])] == []


def test_copied_kv_heads_and_a_vocabulary_that_does_not_divide(records):
    found = of(records, "hard_to_share")
    assert [record["devices"] for record in found] == [2, 4, 8, 4]
    assert [record for record in found if not (record["error"] <= TOLERANCE and record["same_tokens"])] == []


def test_quantised_models(records):
    found = of(records, "quantized")
    assert [record["devices"] for record in found] == [8, 4]
    assert [record for record in found if not (record["error"] <= TOLERANCE and record["same_tokens"])] == []


def test_rows_in_a_wrong_order_would_show(records):
    found = of(records, "wrong_orders")
    assert len(found) == 2
    assert min(record["error"] for record in found) > TOLD_APART


def test_an_engine_on_two_devices_says_the_same(records):
    """Chunked prefill, prefix cache, preemption, host tier, a fork, prompt logprobs."""
    one, two = of(records, "engines")
    assert two["same_tokens"]
    for count in ("choices", "preemptions", "hits", "host_hits"):
        assert two[count] == one[count] > 0
    assert one["steps_ahead"] is True
    assert two["steps_ahead"] is False  # collectives of two programs can wait for each other for ever
    assert one["compiles_after_ready"] == two["compiles_after_ready"] == 0
    assert two["prompt_logprobs"][0] is None
    assert two["prompt_logprobs"][1:] == pytest.approx(one["prompt_logprobs"][1:], abs=1e-4)


def test_a_float8_cache(records):
    _, two, four, exact = of(records, "float8_caches")
    for record in (two, four):
        assert record["error"] <= TOLERANCE
        assert record["same_tokens"]
    assert exact["case"] == "float32"
    assert exact["error"] > 1e-3


HANGS = """
import ctypes

def test_that_hangs():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
"""


def test_a_test_that_hangs_in_native_code_ends_with_its_name(tmp_path):
    """As a deadlock of XLA's would: no signal reaches Python, and nobody else gets its lock."""
    (tmp_path / "test_native.py").write_text(HANGS)
    config = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "--confcutdir", str(tmp_path))
    limits = ("-o", "timeout=0.5", "-o", "faulthandler_timeout=1.5")
    command = [sys.executable, "-m", "pytest", *config, *limits, str(tmp_path / "test_native.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "Timeout (0:00:01.500000)!" in done.stderr
    assert 'test_native.py", line 7 in test_that_hangs' in done.stderr


def test_a_case_that_hangs_ends_with_its_name():
    done = run_cases("hang")
    assert done.returncode != 0
    assert "running a case that hangs" in done.stderr
    assert "in hang" in done.stderr
