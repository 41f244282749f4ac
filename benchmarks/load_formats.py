"""How long a model's weights take to load, and how much memory of the host, from each form that it is stored in.

    python benchmarks/load_formats.py MODEL ... [--quantization METHOD] [--repeat 5] [--output load.json]

Each load is in a process of its own, on one CPU device. Its time runs from the configuration having been read until all
parameters are on the device, the import of the format's library included. Its peak is the process's largest resident
memory less what was resident before, with jax and the device up. On a CPU the parameters themselves are part of that.

"warm" loads find the files in the page cache; before a "cold" one the kernel is asked to drop them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="folder or .gguf file")
    parser.add_argument("--quantization", help="made while loading, of safetensors and GGUF")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write all figures as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(load_once(args.one, args.dtype, args.quantization)))
        return
    print("| format | stored, MiB | parameters, MiB | warm, s | cold, s | peak, MiB |\n|---|---|---|---|---|---|")
    rows = [measure(model, args) for model in args.models]
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Prints a line of medians, in brackets the smallest and the largest time."""
    files = weight_files(Path(model))
    runs: dict[str, list[dict[str, Any]]] = {"warm": [], "cold": []}
    in_new_process(model, args)  # not counted: fills the page cache and compiled Python files
    for _ in range(args.repeat):
        for kind, found in runs.items():
            if kind == "cold":
                drop(files)
            found.append(in_new_process(model, args))
    every = runs["warm"] + runs["cold"]
    stored = sum(file.stat().st_size for file in files) / MIB
    peak = statistics.median(run["peak_mib"] for run in every)
    times = [spread([run["seconds"] for run in found]) for found in runs.values()]
    cells = (every[0]["format"], f"{stored:.0f}", f"{every[0]['params_mib']:.0f}", *times, f"{peak:.0f}")
    print(f"| {' | '.join(cells)} |", flush=True)
    return {"model": model, "stored_mib": stored, **runs}


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    params = path / "params"
    return sorted(file for file in params.rglob("*") if file.is_file()) or sorted(path.glob("*.safetensors"))


def drop(files: list[Path]) -> None:
    """Asks the kernel to forget the files' pages."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def in_new_process(model: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", model, "--dtype", args.dtype]
    if args.quantization:
        command += ["--quantization", args.quantization]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def load_once(model: str, dtype: str, quantization: str | None) -> dict[str, Any]:
    """Imports jax, so only in a process of its own."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from octavo.models.architectures import get_architecture
    from octavo.models.loading.loader import load_params, resolve_model

    resolved = resolve_model(model, quantization=quantization)
    architecture = get_architecture(resolved.config.architecture)
    config = architecture.decoder_config(resolved.config)
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("tp",))
    jax.block_until_ready(jax.device_put(np.zeros(8), jax.devices("cpu")[0]))
    before, start = memory_kib("VmRSS"), time.perf_counter()
    params = load_params(resolved.path, architecture, config, dtype=dtype, mesh=mesh, load_format=resolved.format)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    return {
        "format": resolved.format,
        "seconds": seconds,
        "peak_mib": (memory_kib("VmHWM") - before) / 1024,
        "params_mib": sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / MIB,
    }


def memory_kib(name: str) -> int:
    """VmRSS: what is resident now; VmHWM: the most that ever was. Linux only."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
