"""Quantised checkpoints cut over several devices: groups and blocks that straddle a border, columns out of order,
copied heads; and what a device reads for its share."""

import json
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from quantized_gguf import write_gguf
from quantized_model import CASES
from quantized_shards import MUTATED, NAMES
from safetensors.numpy import save_file

from octavo.models.layers.linear import matmul
from octavo.models.loading.gguf_source import GGUFSource
from octavo.models.loading.quantized_float import FORMATS
from octavo.models.loading.quantized_reader import Module
from octavo.models.loading.safetensors_source import SafetensorsSource
from octavo.models.quantization.methods import ONLINE, Gguf, read_method
from octavo.models.quantization.weights import Float8Weight, IntWeight
from octavo.pallas_kernels.aot import aot_missing, compile_program, find_target, target_mesh

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "quantized_shards.py"


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_each_device_has_its_share_of_the_right_weights(records: list[dict[str, Any]]) -> None:
    """Every way of quantising on 2, 4 and 8 devices: the weights exactly, and what the devices multiply together."""
    found = records[: -len(MUTATED)]
    assert [(record["case"], record["devices"]) for record in found] == [(n, d) for n in NAMES for d in (2, 4, 8)]
    assert [record for record in found if record["wrong"] or not record["error"] <= 1e-6] == []
    assert min(record["split"] for record in found) >= 6


def test_scales_of_activations_are_those_of_whole_rows(records: list[dict[str, Any]]) -> None:
    """Where x is rounded to float8 its scale comes from all devices, or their products would differ from one's."""
    rounded = {record["case"]: record["float8_error"] for record in records if record["float8_error"]}
    assert rounded.keys() == {
        "fp8",
        "fp8-static",
        "fbgemm",
        "ct-float-static",
        "ct-float-channel",
        "online-fp8",
    }
    assert max(rounded.values()) <= 1e-6


def test_columns_of_another_device_would_show(records: list[dict[str, Any]]) -> None:
    mutated = records[-len(MUTATED) :]
    assert [record["case"] for record in mutated] == list(MUTATED)
    assert all({"o", "down"} & set(record["wrong"]) and record["error"] > 0.1 for record in mutated)


# ---- what is exchanged ----------------------------------------------------------------------


@pytest.mark.skipif(aot_missing() is not None, reason="compiling for a GPU needs the CUDA plug-in")
@pytest.mark.parametrize(
    ("kind", "gathered", "added"),
    [
        ("awq", [], ["[16,4096]"]),
        ("desc_act", ["[16,8192]"], ["[16,4096]"]),
        ("static", [], ["[16,4096]"]),
        ("token", [], ["[16,4096]", "[16]"]),
    ],
)
def test_devices_exchange_activations_only(kind: str, gathered: list[str], added: list[str]) -> None:
    """Compiled for two H200s that share the 8192 columns of a weight: no weight is gathered; with columns in an order
    of their own the activations are, and where they are rounded to float8 token by token the largest is asked for."""
    mesh = target_mesh(find_target("h200"), 2)

    def array(shape: tuple[int, ...], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    if kind in ("static", "token"):
        scales = array((4096, 1), jnp.float32), array((1,), jnp.float32) if kind == "static" else None
        weight: Any = Float8Weight(array((4096, 8192), jnp.float8_e4m3fn, None, "tp"), *scales, kind)
    else:
        order = array((8192,), jnp.int32) if kind == "desc_act" else None
        groups = array((4096, 64), jnp.bfloat16, None, "tp")
        weight = IntWeight(array((4096, 1024), jnp.int32, None, "tp"), groups, permutation=order)
    x = array((16, 8192), jnp.bfloat16, None, "tp")
    run = jax.jit(lambda x, weight: matmul(x, weight), out_shardings=NamedSharding(mesh, P()))
    hlo = compile_program(lambda: run.lower(x, weight)).hlo
    found = {
        name: re.findall(rf"= \w+(\[[\d,]+\])\S* {name}(?:-start)?\(", hlo) for name in ("all-gather", "all-reduce")
    }
    assert found["all-gather"] == gathered
    assert sorted(found["all-reduce"]) == sorted(added)


# ---- what is read ---------------------------------------------------------------------------

WIDE = (32, 8192)


def stored_module(folder: Path, name: str) -> Module:
    """A weight of that shape in a file, in one of the formats."""
    if name.startswith("gguf"):
        write_gguf(folder, name.removeprefix("gguf-"), hidden_size=WIDE[0], intermediate_size=WIDE[1])
        module = "model.layers.0.mlp.down_proj"
        spec = Gguf({module: name.removeprefix("gguf-")}).weight_spec(module)
        return Module(GGUFSource(folder / "model.gguf", {}), module, spec, WIDE, 32)
    weight = np.random.default_rng(5).standard_normal(WIDE).astype(np.float32) * 0.25
    if name == "online-int4":
        tensors, spec = {"weight": weight}, ONLINE["int4"]
    else:
        tensors, spec = CASES[name].store(weight)[0], read_method(CASES[name].quantization).weight_spec("m")
    save_file({f"m.{key}": np.ascontiguousarray(value) for key, value in tensors.items()}, folder / "model.safetensors")
    return Module(SafetensorsSource(folder), "m", spec, WIDE, spec.group_on_device(WIDE[1]))


def peak(run: Callable[[], np.ndarray]) -> int:
    """Most bytes at once that NumPy allocates: files are mapped, so all that is taken from one."""
    tracemalloc.start()
    run()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


@pytest.mark.parametrize(
    "name", ["awq-32", "gptq-3", "gptq-8", "fp8-blocks", "ct-pack-4-asym", "ct-int", "gguf-Q4_1", "online-int4"]
)
def test_a_share_of_the_columns_is_unpacked_by_itself(tmp_path: Path, name: str) -> None:
    """The third of eight, against all: the same values, and at most a quarter of the memory."""
    module = stored_module(tmp_path, name)
    reader = FORMATS[module.spec.format](module)
    reader.check()
    field = "weight" if module.spec.kind == "float8" else "packed"
    width = WIDE[1] if field == "weight" else WIDE[1] * module.spec.device_bits // 32
    groups = [("scale", WIDE[1] // module.group)] if module.group < WIDE[1] else []
    for each, size in ((field, width), *groups):
        share = slice(size // 4, size // 4 + size // 8)
        whole, part = (reader.rows(each, 0, WIDE[0], columns) for columns in (slice(0, size), share))
        assert part.dtype == whole.dtype
        np.testing.assert_array_equal(part, whole[:, share])
        everything, own = (
            peak(lambda field=each, columns=columns: reader.rows(field, 0, WIDE[0], columns).copy())
            for columns in (slice(0, size), share)
        )
        assert own < everything / 4 + 2048, each
