"""Tensor parallelism against one device: every architecture, and Llama quantised in every way and with a float8 KV
cache, on 2, 4 and 8 virtual CPU devices, as a Markdown table.

    python benchmarks/tp_matrix.py                     every case
    python benchmarks/tp_matrix.py --only qwen3 'gptq-*' --devices 2 4
    python benchmarks/tp_matrix.py --resume TABLE      those that an earlier run's output lacks

Random checkpoints of a few layers, in float32, written to a folder and loaded as any other. Two prompts are prefilled
in one step, then both rows decode by the largest logit. Reported are the worst row's L2 error of the logits over their
L2 norm, and whether the tokens are the same. The configurations are those of the tests' goldens, with 8 query heads,
so that 8 devices have one each; KV heads (2, or 1) are copied where devices outnumber them. One vocabulary of 301 does
not divide.

XLA's collectives on a CPU can wait for each other for ever when two programs run at once, so one runs at a time, and a
case that does not end in ``--limit`` seconds ends the run with its name and the stacks of all threads.
"""

import argparse
import faulthandler
import importlib
import json
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from octavo.engine.launch import make_cpu_devices, make_mesh
from octavo.models.architectures import ARCHITECTURES, get_architecture
from octavo.models.attention_metadata import AttentionMetadata
from octavo.models.config import ModelConfig
from octavo.models.decoder import abstract_params, merge
from octavo.models.errors import ModelConfigError
from octavo.models.loading.errors import LoadError
from octavo.models.loading.loader import load_params, resolve_model
from octavo.models.sharding import split_over
from octavo.pallas_kernels.float8 import FLOAT8, storage_dtype

GOLDENS = Path(__file__).resolve().parents[1] / "tests" / "models" / "goldens" / "cases.json"
PROMPTS, DECODE_STEPS = (21, 10), 3
ROWS, TOKENS, BLOCK_SIZE, MAX_BLOCKS, NUM_BLOCKS = 2, 32, 4, 8, 20
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """A checkpoint and how it is served."""

    write: Callable[[Path], Any]
    quantization: str | None = None
    """What ``--quantization`` says."""
    kv_cache_dtype: str = "float32"
    """float32, or float8_e4m3fn with the checkpoint's scales."""


@dataclass(frozen=True)
class Found:
    """What two steps of a kind gave: logits f32 ``[prompt and decode rows, V]`` and the tokens drawn."""

    logits: np.ndarray
    token_ids: np.ndarray

    def error_from(self, other: "Found") -> float:
        """The worst row's L2 error over its norm; infinite where something is not finite."""
        errors = np.linalg.norm(self.logits - other.logits, axis=-1) / np.linalg.norm(other.logits, axis=-1)
        return float(np.max(np.where(np.isfinite(errors), errors, np.inf)))


def cases() -> dict[str, dict[str, Any]]:
    """Name -> config.json: the first golden of each architecture, and Llama with what is hard to share."""
    known = json.loads(GOLDENS.read_text(encoding="utf-8"))
    chosen: dict[str, dict[str, Any]] = {}
    for name in ARCHITECTURES:
        found = [case for case, config in known.items() if config["architectures"] == [name]]
        if found:
            chosen[found[0]] = eight_heads(known[found[0]])
    plain = eight_heads(known["llama"])
    return chosen | {
        "llama_vocab_301": {**plain, "vocab_size": 301, "tie_word_embeddings": False},
        "llama_biases": {**eight_heads(known["llama_biases"]), "vocab_size": 301},
    }


def quantized_cases() -> dict[str, Case]:
    """Name -> a Llama quantised in one of the ways that the tests know, or by ``--quantization``.

    8 devices have 16 columns each of attention's output and 48 of the feed-forward's: groups of 32, 40, 64 and 128
    columns are all cut by a border of devices.
    """
    sys.path.insert(0, str(GOLDENS.parents[2] / "support"))
    known, gguf = importlib.import_module("quantized_model"), importlib.import_module("quantized_gguf")
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 301}

    def write(case: Any, part: str, folder: Path) -> None:
        place = folder.with_name("written")
        known.write_quantized(place, case, **sizes)
        (place / part).rename(folder)
        shutil.rmtree(place)

    stored = {name: Case(partial(write, case, "quantized")) for name, case in known.CASES.items()}
    packed = {
        f"gguf-{kind.lower()}": Case(partial(gguf.write_gguf, kind=kind, **sizes), "gguf")
        for kind in ("Q8_0", "Q4_0", "Q4_1")
    }
    online = {
        f"online-{method}": Case(partial(write, known.CASES["awq-32"], "plain"), method)
        for method in ("fp8", "int8", "int4")
    }
    return stored | packed | online


def eight_heads(config: dict[str, Any]) -> dict[str, Any]:
    """With 8 query heads, those of a nested text configuration if there is one."""
    if "text_config" in config:
        return {**config, "text_config": eight_heads(config["text_config"])}
    if "n_head" in config:  # GPT-2
        return {**config, "n_head": 8}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {**config, "num_attention_heads": 8, "head_dim": head_dim}


def float8_cache() -> Case:
    """Llama with scales for keys and values, other ones in each layer."""
    config = cases()["llama"]

    def write(folder: Path) -> None:
        scales = {
            f"model.layers.{layer}.self_attn.{part}_scale": 0.02 * (layer + 1 + (part == "v"))
            for layer in range(config["num_hidden_layers"])
            for part in "kv"
        }
        write_checkpoint(folder, config, scales)

    return Case(write, kv_cache_dtype=FLOAT8.name)


def write_checkpoint(folder: Path, config: Mapping[str, Any], numbers: Mapping[str, float] | None = None) -> None:
    """A model of that configuration with random weights, and with ``numbers`` as tensors of one element."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = ModelConfig.from_dict(config)
    architecture = get_architecture(model.architecture)
    tensors = {name: np.array([value], np.float32) for name, value in (numbers or {}).items()}
    for mapping in architecture.weight_mappings(architecture.decoder_config(model)):
        for name, shape in zip(mapping.sources, mapping.stored_shapes, strict=True):
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            tensors[name] = (rng.standard_normal(shape) * 0.15 + ("norm" in name)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")


def run(
    folder: Path,
    num_devices: int,
    decode_steps: int = DECODE_STEPS,
    *,
    quantization: str | None = None,
    kv_cache_dtype: str = "float32",
) -> Found:
    """Prefill of two prompts and some decode steps on ``num_devices`` devices. The options are those of ``Case``."""
    model = resolve_model(str(folder), quantization=quantization)
    architecture = get_architecture(model.config.architecture)
    plain = replace(architecture.decoder_config(model.config), scales_kv=kv_cache_dtype == FLOAT8.name)
    config, mesh = split_over(plain, num_devices), make_mesh(num_devices)
    params = load_params(model.path, architecture, config, dtype=jnp.float32, mesh=mesh, load_format=model.format)
    graphdef, _ = abstract_params(config, jnp.float32, mesh=mesh)
    shape, stored = (NUM_BLOCKS, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim), jnp.dtype(kv_cache_dtype)
    pool = jax.device_put(np.zeros(shape, storage_dtype(stored)), NamedSharding(mesh, P(None, None, "tp")))
    replicated = NamedSharding(mesh, P())

    # Compiling is what takes the time.
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def step(params: Any, kv: list[jax.Array], ids: jax.Array, metadata: AttentionMetadata) -> Any:
        decoder = merge(graphdef, params)
        hidden, kv = decoder(ids, kv, metadata)
        logits = decoder.compute_logits(hidden)
        return jax.lax.with_sharding_constraint(logits, replicated), kv

    kv, logits = [pool] * config.num_layers, []
    lengths = np.array(PROMPTS, np.int32)
    ids = np.random.default_rng(0).integers(0, plain.vocab_size, sum(PROMPTS))
    news = lengths
    token_ids = []
    for _ in range(1 + decode_steps):
        operands = jax.device_put(batch(ids, news, lengths), replicated)
        rows, kv = jax.block_until_ready(step(params, kv, *operands))
        logits.append(np.asarray(rows)[: len(ids), : plain.vocab_size])
        ids = logits[-1][np.cumsum(news) - 1].argmax(axis=-1)
        token_ids.append(ids)
        news, lengths = np.ones_like(news), lengths + 1
    return Found(np.concatenate(logits), np.concatenate(token_ids))


def batch(ids: np.ndarray, news: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, AttentionMetadata]:
    """One step's token ids and metadata: ``news`` tokens a row, after which the rows are ``lengths`` long."""
    decode_only = bool(np.all(news == 1))
    total = ROWS if decode_only else TOKENS
    tables = np.arange(1, 1 + ROWS * MAX_BLOCKS, dtype=np.int32).reshape(ROWS, MAX_BLOCKS)
    positions, slots = np.zeros(total, np.int32), np.full(total, NUM_BLOCKS * BLOCK_SIZE, np.int32)
    place = np.concatenate([np.arange(end - new, end) for new, end in zip(news, lengths, strict=True)])
    row = np.repeat(np.arange(ROWS), news)
    positions[: len(place)] = place
    slots[: len(place)] = tables[row, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
    padded = np.zeros(total, np.int32)
    padded[: len(ids)] = ids
    starts = np.concatenate([[0], np.cumsum(news)]).astype(np.int32)
    return padded, AttentionMetadata(positions, slots, tables, starts, lengths, decode_only)


def watch(name: str, seconds: float) -> None:
    """Ends this process if the case is not over by then, naming it."""
    print(f"running {name}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback_later(seconds, exit=True)


def compare(name: str, case: Case, devices: Sequence[int], limit: float) -> Iterator[dict[str, Any]]:
    """One record for each number of devices."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / name
        case.write(checkpoint)
        watch(f"{name} on 1 device", limit)
        served = partial(run, quantization=case.quantization, kv_cache_dtype=case.kv_cache_dtype)
        expected = served(checkpoint, 1)
        for count in devices:
            watch(f"{name} on {count} devices", limit)
            record: dict[str, Any] = {"case": name, "devices": count}
            try:
                found = served(checkpoint, count)
                record["error"] = found.error_from(expected)
                record["same_tokens"] = np.array_equal(found.token_ids, expected.token_ids)
            except (ModelConfigError, LoadError) as error:
                record["refused"] = str(error)
            yield record
    faulthandler.cancel_dump_traceback_later()


def table_row(record: Mapping[str, Any], good: bool) -> str:
    start = f"| {record['case']} | {record['devices']} | "
    if "refused" in record:
        return f"{start} | | refused: {record['refused']} |"
    tokens = "the same" if record["same_tokens"] else "DIFFER"
    return f"{start}{record['error']:.1e} | {tokens} | {'ok' if good else 'FAILS'} |"


def rows_of(file: Path | None) -> dict[tuple[str, int], str]:
    """The good rows of a table by case and number of devices."""
    if file is None:
        return {}
    rows = re.finditer(
        r"^\| (\S+) \| (\d+) \|.*\| (?:ok|refused: .*) \|$", file.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {(row[1], int(row[2])): row[0] for row in rows}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=("*",), metavar="CASE", help="these cases; * stands for anything")
    parser.add_argument("--resume", type=Path, metavar="TABLE", help="an earlier run's output: its rows are kept")
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4, 8], metavar="N")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a case; default: %(default)s")
    options = parser.parse_args(argv)
    plain = {name: Case(partial(write_checkpoint, config=config)) for name, config in cases().items()}
    known, kept = plain | {"kv-fp8": float8_cache()} | quantized_cases(), rows_of(options.resume)
    for pattern in options.only:
        if not any(fnmatch(name, pattern) for name in known):
            parser.error(f"no case is called {pattern}; known: {', '.join(known)}")
    jax.config.update("jax_platforms", "cpu")
    make_cpu_devices(max(options.devices))
    print(f"JAX {jax.__version__}, float32, {max(options.devices)} virtual CPU devices\n")
    print("| configuration | devices | relative error of the logits | greedy tokens | result |\n|---|---|---|---|---|")
    failures = 0
    for name, case in known.items():
        if not any(fnmatch(name, pattern) for pattern in options.only):
            continue
        print("".join(f"{kept[name, count]}\n" for count in options.devices if (name, count) in kept), end="")
        missing = [count for count in options.devices if (name, count) not in kept]
        for record in compare(name, case, missing, options.limit) if missing else ():
            good = "refused" in record or (record["error"] <= TOLERANCE and record["same_tokens"])
            failures += not good
            print(table_row(record, good), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
