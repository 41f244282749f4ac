"""Whole steps of known models compiled for an H200 without one, as a Markdown table.

    python benchmarks/aot_matrix.py                       every row
    python benchmarks/aot_matrix.py --only llama-3-8b     the rows of one model
    python benchmarks/aot_matrix.py --layers 4            with fewer layers, many times faster

Needs Python 3.12 and the CUDA plug-in, no GPU. Nothing is autotuned, so matrix products may be cut up otherwise on
the device, which changes the launches of a layer by one or two.
"""

import argparse
import sys
import time

import jax

from octavo.engine.args import EngineArgs
from octavo.engine.plan import DraftEngine
from octavo.pallas_kernels.aot import CompileReport, find_target

DECODE_ROWS, MIXED_TOKENS, MAX_MODEL_LEN = 64, 2048, 8192
MATRIX = [
    (model, decode_only, 1)
    for model in ("llama-3-8b", "qwen2.5-7b", "qwen3-0.6b", "mistral-7b", "gemma-2-9b")
    for decode_only in (True, False)
] + [
    ("llama-3-8b", True, 2),
    ("llama-3-8b", False, 2),
    ("llama-3-8b", True, 8),
    ("qwen2.5-7b", True, 2),
    ("qwen2.5-72b-awq", True, 2),
    ("qwen2.5-72b-awq", False, 2),
]
"""Model, decode or mixed, GPUs."""
HEADER = (
    "| model | step | GPUs | pool GB | aliased GB | temporaries MB | launches a layer | command buffers "
    "| all-reduces a layer | largest copy or gather MB | kernels: registers, spilled bytes | compile s |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="rows of this model")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--num-blocks", type=int, default=8000, help="of 16 tokens; default: %(default)s")
    parser.add_argument("--attention-backend", default="mosaic")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(f"JAX {jax.__version__}, {find_target('h200').title}, {options.attention_backend} attention,", end=" ")
    print(f"bfloat16, pool of {options.num_blocks} blocks\n\n{HEADER}", flush=True)
    for model, decode_only, num_devices in MATRIX:
        if options.only in (None, model):
            print(matrix_row(model, decode_only, num_devices, options), flush=True)


def matrix_row(model: str, decode_only: bool, num_devices: int, options: argparse.Namespace) -> str:
    """One compiled step as a row of the table."""
    args = EngineArgs(
        model=model,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=DECODE_ROWS,
        max_num_batched_tokens=MIXED_TOKENS,
        tensor_parallel_size=num_devices,
        attention_backend=options.attention_backend,
        hf_overrides={"num_hidden_layers": options.layers} if options.layers else None,
    )
    engine = DraftEngine(args, find_target("h200"), lambda text: print(text, file=sys.stderr))
    bucket = max(engine.buckets.decode if decode_only else engine.buckets.mixed)
    started = time.monotonic()
    report = engine.compile(bucket, options.num_blocks)
    layers = engine.decoder.num_layers
    kernels = ", ".join(f"{k.name.rpartition('_')[0]} {k.registers}, {k.spill_bytes}" for k in report.kernels)
    cells = [
        f"{model}, {layers} layers",
        str(bucket),
        str(num_devices),
        f"{engine.pool_bytes(options.num_blocks) / 1e9:.2f}",
        f"{report.alias_bytes / 1e9:.2f}",
        f"{report.temp_bytes / 1e6:.0f}",
        f"{report.launches_in('_run_layer') / layers:.1f}",
        str(report.command_buffers),
        f"{layer_all_reduces(report) / layers:.1f}",
        f"{max([*report.sizes_of('copy'), *report.sizes_of('all-gather')], default=0) / 1e6:.1f}",
        kernels or "those above",
        f"{time.monotonic() - started:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def layer_all_reduces(report: CompileReport) -> int:
    in_layers = (i for i in report.instructions if "_run_layer" in i.op_name)
    return sum(i.opcode.removesuffix("-start") == "all-reduce" or "all-reduce" in i.name for i in in_layers)


if __name__ == "__main__":
    main()
