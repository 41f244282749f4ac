"""Converted checkpoints on 8 virtual CPU devices against their originals; a process of its own, since the number of
devices is fixed early. Prints one JSON record a case."""

import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.sharding import Mesh
from quantized_model import CASES, write_quantized
from tiny_model import tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
tp_matrix = importlib.import_module("tp_matrix")

from tensor_parallel_cases import changed, shallow  # noqa: E402

from octavo import LLM, SamplingParams  # noqa: E402
from octavo.engine.config import ModelOptions  # noqa: E402
from octavo.engine.convert import convert  # noqa: E402
from octavo.models.architectures import get_architecture  # noqa: E402
from octavo.models.loading import orbax_checkpoint  # noqa: E402
from octavo.models.loading.loader import load_params, resolve_model  # noqa: E402
from octavo.models.sharding import split_over  # noqa: E402

LIMIT_S = 250.0
BYTES_READ = "/tensorstore/kvstore/file/bytes_read"


def load(folder: Path, devices: int) -> Any:
    model = resolve_model(str(folder))
    architecture = get_architecture(model.config.architecture)
    config = split_over(architecture.decoder_config(model.config), devices)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",))
    return load_params(model.path, architecture, config, dtype=jnp.float32, mesh=mesh, load_format=model.format)


def differing(original: Path, converted: Path, devices: int) -> list[str]:
    """Parameters that are not the same to the bit, of the same type and in the same places."""
    expected, found = load(original, devices), load(converted, devices)
    if jax.tree.structure(expected) != jax.tree.structure(found):
        return ["the tree"]
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    return [jax.tree_util.keystr(path) for (path, mine), other in pairs if not same(mine, other)]


def same(mine: jax.Array, other: jax.Array) -> bool:
    return (
        (mine.dtype, mine.sharding) == (other.dtype, other.sharding)
        and mine.shape == other.shape
        and all(
            a.device == b.device and np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
            for a, b in zip(mine.addressable_shards, other.addressable_shards, strict=True)
        )
    )


def architectures(folder: Path) -> Iterator[dict[str, Any]]:
    """On two devices, and what is hard to share on others."""
    more = {"llama_vocab_301": (1, 2, 8), "olmo2": (4,)}
    for name, config in tp_matrix.cases().items():
        tp_matrix.watch(name, LIMIT_S)
        tp_matrix.write_checkpoint(folder / name, shallow(config))
        convert(ModelOptions(str(folder / name)), folder / f"{name}-orbax")
        for devices in more.get(name, (2,)):
            found = differing(folder / name, folder / f"{name}-orbax", devices)
            yield {"case": name, "devices": devices, "differing": found}


def quantizations(folder: Path) -> Iterator[dict[str, Any]]:
    chosen = {"awq-32": (1, 2, 4), "gptq-4-ragged": (4,), "gptq-4-act": (1, 2), "fp8-static": (1, 2)}
    for name, counts in {**chosen, "fp8-blocks-ragged": (4,), "ct-int": (2,)}.items():
        tp_matrix.watch(name, LIMIT_S)
        write_quantized(folder / name, CASES[name])
        original, converted = folder / name / "quantized", folder / name / "orbax"
        convert(ModelOptions(str(original)), converted)
        for devices in counts:
            yield {"case": name, "devices": devices, "differing": differing(original, converted, devices)}


def wrong_orders(folder: Path) -> Iterator[dict[str, Any]]:
    """Parts of fused weights in the other order, and KV heads given to the wrong devices: both must show."""
    tp_matrix.watch("wrong orders", LIMIT_S)
    original, converted = tiny_model(folder / "wrong"), folder / "wrong-orbax"
    convert(ModelOptions(str(original)), converted)
    put_together, restore_args = orbax_checkpoint._put_together, orbax_checkpoint._restore_args

    def reversed_parts(layout: Any, *rest: Any) -> jax.Array:
        return put_together(replace(layout, parts=layout.parts[::-1]), *rest)

    def other_heads(layout: Any, part: Any) -> Any:
        args = restore_args(layout, part)
        if part.copies > 1:
            mesh = args.sharding.mesh
            args.sharding = jax.sharding.NamedSharding(Mesh(mesh.devices[::-1], mesh.axis_names), args.sharding.spec)
        return args

    for name, wrong, devices in (("_put_together", reversed_parts, 2), ("_restore_args", other_heads, 4)):
        with changed(orbax_checkpoint, name, wrong):
            yield {"case": wrong.__name__, "differing": differing(original, converted, devices)}


def bytes_read() -> int:
    (metric,) = tensorstore.experimental_collect_matching_metrics(BYTES_READ)
    return sum(value["value"] for value in metric["values"])


def shares(folder: Path) -> Iterator[dict[str, Any]]:
    """What devices read, all together, of a model of some size."""
    tp_matrix.watch("shares", LIMIT_S)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2048}
    original, converted = tiny_model(folder / "shares", **sizes), folder / "shares-orbax"
    written = convert(ModelOptions(str(original)), converted)
    for devices in (1, 4):
        before = bytes_read()
        load(converted, devices)
        yield {"devices": devices, "stored": written.num_bytes, "read": bytes_read() - before}


def engines(folder: Path) -> Iterator[dict[str, Any]]:
    """An engine on one device from the original, and on two from what was converted."""
    plain = tiny_model(folder / "engine", vocab_size=301)
    write_quantized(folder / "engine-fp8", CASES["fp8"])
    for original in (plain, folder / "engine-fp8" / "quantized"):
        tp_matrix.watch(f"engines of {original}", LIMIT_S)
        converted = folder / f"{original.parent.name}-{original.name}-orbax"
        convert(ModelOptions(str(original)), converted)
        texts = [greedy(original, 1), greedy(converted, 2, load_format="orbax")]
        yield {"case": original.name, "same_tokens": texts[0] == texts[1], "tokens": len(texts[0])}


def greedy(model: Path, devices: int, **options: Any) -> list[int]:
    llm = LLM(
        model=str(model),
        tensor_parallel_size=devices,
        skip_tokenizer_init=True,
        max_model_len=32,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        block_size=4,
        num_gpu_blocks_override=16,
        enforce_eager=True,
        **options,
    )
    asked = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([[5, 9, 17, 3, 40]], asked, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    with tempfile.TemporaryDirectory() as folder:
        for group in (architectures, quantizations, wrong_orders, shares, engines):
            for record in group(Path(folder)):
                print(json.dumps({"group": group.__name__, **record}), flush=True)


if __name__ == "__main__":
    main()
