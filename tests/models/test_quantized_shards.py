"""Quantised checkpoints cut over several devices: groups that straddle a device, columns out of order, copied heads."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "quantized_shards.py"
NAMES = ("awq-32", "gptq-4-ragged", "gptq-4-act", "fp8-blocks-ragged", "ct-int")


def test_each_device_has_its_share_of_the_right_weights() -> None:
    """Groups of 32, 40 and 64 columns, on devices with 16 and 24 columns each."""
    done = subprocess.run([sys.executable, str(SCRIPT), *NAMES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(record["case"], record["devices"]) for record in records] == [(n, d) for n in NAMES for d in (2, 4)]
    assert [record for record in records if record["wrong"]] == []
    assert min(record["split"] for record in records) >= 6
