"""What each quantisation costs SmolLM2-135M-Instruct, measured through the engine: docs/quantization.md's table.

    python benchmarks/quantization.py [--work DIR] [--rows NAME ...] [--output rows.json]

Makes a plain float32 checkpoint of the embedded model, quantises it with ``octavo quantize`` (calibrated with
data/calibration.txt), and runs every form of it over data/evaluation.txt, in float32 but for the row of bfloat16:

- perplexity of the text, in windows of 512 tokens;
- same token: the share of positions at which the likeliest next token is the baseline's (float32);
- same start: of greedy continuations of pieces of the text, the mean number of tokens before the first difference;
- MiB: parameters on the device at ``--dtype bfloat16``, embeddings included (the baseline: float32).

Each row runs in a process of its own on the CPU. Folders below ``--work`` that exist already are used again.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WINDOW, NUM_WINDOWS = 512, 8
NUM_CONTINUED, PROMPT_TOKENS, CONTINUED_TOKENS = 8, 64, 24
CALIBRATE = ["--calibration-file", str(HERE / "data" / "calibration.txt"), "--num-samples", "40"]
GROUPS = ["--group-size", "64"]
"""128 does not divide the model's 576 columns."""


@dataclass(frozen=True)
class Row:
    """One form of the model."""

    title: str
    quantize: list[str] | None = None
    """Options of ``octavo quantize``; None: the plain checkpoint."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the engine."""


NEAREST = ["--round-to-nearest"]
ROWS = {
    "float32": Row("float32, the baseline"),
    "bfloat16": Row("bfloat16", options={"dtype": "bfloat16"}),
    "online-fp8": Row("`--quantization fp8`", options={"quantization": "fp8"}),
    "online-int8": Row("`--quantization int8`", options={"quantization": "int8"}),
    "online-int4": Row("`--quantization int4`", options={"quantization": "int4"}),
    "fp8": Row("`octavo quantize --method fp8`", ["--method", "fp8"]),
    "gptq": Row("`octavo quantize --method gptq`", ["--method", "gptq", *GROUPS, *CALIBRATE]),
    "gptq-nearest": Row("… `--round-to-nearest`", ["--method", "gptq", *GROUPS, *NEAREST]),
    "gptq-asym": Row("… `--asymmetric`", ["--method", "gptq", "--asymmetric", *GROUPS, *CALIBRATE]),
    "awq": Row("`octavo quantize --method awq`", ["--method", "awq", *GROUPS, *CALIBRATE]),
    "awq-nearest": Row("… `--round-to-nearest`", ["--method", "awq", *GROUPS, *NEAREST]),
    "gguf": Row("the embedded GGUF file (Q4_1) kept packed", options={"model": None, "quantization": "gguf"}),
    "kv-fp8": Row("float32, `--kv-cache-dtype fp8`", options={"kv_cache_dtype": "fp8"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for the checkpoints; default: a temporary one")
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS), help="default: all")
    parser.add_argument("--output", type=Path, help="write all figures as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(ROWS[args.one], args.work)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        export = HERE / "export_default_model.py"
        make(work / "plain", [str(export), "--output", str(work / "plain")])
        print("| weights | perplexity | same token | same start, of 24 | MiB |\n|---|---|---|---|---|", flush=True)
        found: dict[str, dict[str, Any]] = {}
        for name in dict.fromkeys(["float32", *args.rows]):
            found[name] = in_new_process(name, work)
            print(as_line(ROWS[name], found[name], found["float32"]), flush=True)
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def as_line(row: Row, measured: dict[str, Any], baseline: dict[str, Any]) -> str:
    pairs = list(zip(measured["likeliest"], baseline["likeliest"], strict=True))
    same = sum(mine == other for mine, other in pairs) / len(pairs)
    continued = list(zip(measured["continued"], baseline["continued"], strict=True))
    start = sum(matching(mine, other) for mine, other in continued) / len(continued)
    cells = (f"{measured['perplexity']:.2f}", f"{100 * same:.1f} %", f"{start:.1f}", f"{measured['mib']:.0f}")
    return f"| {row.title} | {' | '.join(cells)} |"


def matching(mine: list[int], other: list[int]) -> int:
    """Tokens before the first difference."""
    pairs = zip(mine, other, strict=True)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(mine))


def make(folder: Path, command: list[str]) -> None:
    if not folder.exists():
        print(f"making {folder.name}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, *command], check=True, stdout=sys.stderr)


def in_new_process(name: str, work: Path) -> dict[str, Any]:
    if (options := ROWS[name].quantize) is not None:
        make(work / name, ["-m", "octavo", "quantize", str(work / "plain"), str(work / name), *options])
    print(f"measuring {name}", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--one", name, "--work", str(work)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(row: Row, work: Path) -> dict[str, Any]:
    """Imports jax, so only in a process of its own."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from octavo import LLM, SamplingParams

    name = next(name for name, other in ROWS.items() if other is row)
    model = str(work / ("plain" if row.quantize is None else name))
    options = {"model": model, "dtype": "float32", **row.options}
    llm = LLM(
        **options,
        max_model_len=WINDOW + 32,
        max_num_seqs=NUM_CONTINUED,
        max_num_batched_tokens=WINDOW,
        num_gpu_blocks_override=4 * WINDOW // 16,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    ids = llm.get_tokenizer().encode((HERE / "data" / "evaluation.txt").read_text(encoding="utf-8"))
    windows = [ids[place * WINDOW : (place + 1) * WINDOW] for place in range(NUM_WINDOWS)]
    if len(windows[-1]) < WINDOW:
        raise ValueError(f"the text has {len(ids)} tokens, too few for {NUM_WINDOWS} windows of {WINDOW}")
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    logprobs, likeliest = [], []
    for output, window in zip(llm.generate(windows, asked, use_tqdm=False), windows, strict=True):
        for token, at_place in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            logprobs.append(at_place[token].logprob)
            likeliest.append(next(other for other, entry in at_place.items() if entry.rank == 1))
    greedy = SamplingParams(temperature=0.0, max_tokens=CONTINUED_TOKENS, ignore_eos=True)
    starts = [window[:PROMPT_TOKENS] for window in windows[:NUM_CONTINUED]]
    continued = [list(output.outputs[0].token_ids) for output in llm.generate(starts, greedy, use_tqdm=False)]
    return {
        "perplexity": math.exp(-sum(logprobs) / len(logprobs)),
        "likeliest": likeliest,
        "continued": continued,
        "mib": device_mib(options, "float32" if row is ROWS["float32"] else "bfloat16"),
    }


def device_mib(options: dict[str, Any], dtype: str) -> float:
    """Of the parameters, from their shapes."""
    import jax
    import jax.numpy as jnp

    from octavo.models.architectures import get_architecture
    from octavo.models.decoder import abstract_params
    from octavo.models.loading.loader import resolve_model

    resolved = resolve_model(options["model"], quantization=options.get("quantization"))
    config = get_architecture(resolved.config.architecture).decoder_config(resolved.config)
    _, params = abstract_params(config, jnp.dtype(dtype))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)) / 2**20


if __name__ == "__main__":
    main()
