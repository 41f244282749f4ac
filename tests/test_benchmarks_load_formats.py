"""benchmarks/load_formats.py measures what it says, on a tiny model."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import tiny_model

from octavo.engine.config import ModelOptions
from octavo.engine.convert import convert

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "load_formats.py"
spec = importlib.util.spec_from_file_location("load_formats", SCRIPT)
assert spec is not None
assert spec.loader is not None
load_formats = importlib.util.module_from_spec(spec)
spec.loader.exec_module(load_formats)


def test_one_load_of_each_format(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    written = convert(ModelOptions(str(model)), tmp_path / "orbax")
    plain, orbax = (load_formats.load_once(str(folder), "float32", None) for folder in (model, written.folder))
    assert (plain["format"], orbax["format"]) == ("safetensors", "orbax")
    stored = (model / "model.safetensors").stat().st_size
    assert 0.9 * stored < plain["params_mib"] * 2**20 == orbax["params_mib"] * 2**20 < stored
    assert plain["seconds"] > 0
    assert orbax["seconds"] > 0
    assert load_formats.weight_files(model) == [model / "model.safetensors"]
    assert sum(file.stat().st_size for file in load_formats.weight_files(written.folder)) == written.num_bytes


def test_medians_and_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(2**20))
    seconds = iter([9.0, 1.0, 5.0, 3.0, 4.0, 2.0, 6.0])

    def one(model: str, args: object) -> dict[str, object]:
        return {"format": "safetensors", "seconds": next(seconds), "peak_mib": 7.0, "params_mib": 2.0}

    monkeypatch.setattr(load_formats, "in_new_process", one)
    monkeypatch.setattr(sys, "argv", ["load_formats.py", str(tmp_path), "--repeat", "3"])
    load_formats.main()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "| safetensors | 1 | 2 | 2.00 (1.00 to 3.00) | 5.00 (4.00 to 6.00) | 7 |"


def test_help_needs_no_jax() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True)
    assert "--quantization" in done.stdout
