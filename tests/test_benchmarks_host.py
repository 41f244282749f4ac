"""benchmarks/host_overhead.py runs, needs no jax, and has what its page says."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
assert not {"jax", "jaxlib", "flax"} & set(sys.modules), "the host half needs no device library"
"""


def test_host_overhead_times_every_case_without_jax(tmp_path):
    output = tmp_path / "host.json"
    options = ["--rows", "5", "--waiting", "0", "3", "--context", "8", "300", "--steps", "20", "--output", str(output)]
    command = [sys.executable, "-c", RUN, str(ROOT / "benchmarks" / "host_overhead.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())["results"]
    assert [(r["waiting"], r["context"]) for r in results] == [(0, 8), (0, 300), (3, 8), (3, 300)]
    for result in results:
        for clock in ("wall", "cpu"):
            medians = [result[part][clock]["median_ms"] for part in ("schedule", "pack", "update")]
            assert 0 < min(medians) <= result["total"][clock]["median_ms"] < 50
            assert result["total"][clock]["min_ms"] <= result["total"][clock]["median_ms"]
