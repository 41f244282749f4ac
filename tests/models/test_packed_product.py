"""Linear layers whose quantised weights go through the kernel: when, and how they are cut over devices."""

import importlib
import logging
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from packed_weights import PackedCase, row_errors

from octavo.models.layers import packed_product as module
from octavo.models.layers.linear import HowServed, Linear, _float8_product, matmul
from octavo.models.layers.packed_product import kernel_serves, packed_product
from octavo.models.quantization.weights import Float8Weight, IntWeight, dequantize
from octavo.models.sharding import ONE_DEVICE, Placement
from octavo.pallas_kernels.aot import aot_missing, compile_program, find_target, target_mesh
from octavo.pallas_kernels.compat import mosaic_missing
from octavo.pallas_kernels.dispatch import gpu_interpreter

needs_mosaic = pytest.mark.skipif(mosaic_missing() is not None, reason=str(mosaic_missing()))
CASE = PackedCase(4, 32, 5, 256, 128, zeros=(0, 15, 6))
BFLOAT16 = jnp.dtype(jnp.bfloat16)
MOSAIC = Placement("mosaic")


def int_weight(case: PackedCase = CASE) -> IntWeight:
    _, packed, scale, zero = case.arguments()
    return IntWeight(packed, scale, zero, bits=case.bits)


@needs_mosaic
def test_a_linear_layer_runs_the_kernel(monkeypatch):
    """Fused weights, a bias, and columns in an order of their own; the bias is added to float32 sums."""
    interpreted = Placement("mosaic", None, gpu_interpreter())
    order = np.random.default_rng(1).permutation(CASE.in_size)
    x = CASE.arguments()[0]
    linear = Linear(CASE.in_size, CASE.out_size, bias=True, dtype=BFLOAT16, placement=interpreted)
    linear.weight = nnx.Param(replace(int_weight(), permutation=jnp.asarray(order, jnp.int32)))
    linear.bias[...] = jnp.linspace(-900, 900, CASE.out_size, dtype=jnp.bfloat16)
    monkeypatch.setattr(module, "quantized_matmul", count := Counted(module.quantized_matmul))
    got = jax.block_until_ready(linear(x[:, np.argsort(order)]))
    assert count.calls == [("mosaic", 32, jnp.float32)]
    assert got.dtype == BFLOAT16
    assert row_errors(got, CASE.exact() + np.asarray(linear.bias[...], np.float64)) <= 5e-3


class Counted:
    """A function that notes implementation, group and result type of its calls."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, *args, **kwargs):
        self.calls.append((kwargs["implementation"], kwargs["group_size"], kwargs["out_dtype"]))
        return self.function(*args, **kwargs)


@pytest.mark.parametrize(
    ("weight", "dtype", "placement", "obstacle"),
    [
        (int_weight(), "bfloat16", MOSAIC, None),
        (int_weight(), "bfloat16", ONE_DEVICE, None),
        (int_weight(), "float32", MOSAIC, "x of float32"),
        (int_weight(replace(CASE, group_size=16)), "bfloat16", MOSAIC, "group_size 16"),
        (int_weight(replace(CASE, out_size=96)), "bfloat16", MOSAIC, "96 output rows"),
        (replace(int_weight(), zero=None, minimum=int_weight().scale), "bfloat16", MOSAIC, "a minimum for each group"),
    ],
)
def test_what_the_kernel_cannot_serve_is_widened_and_named_once(weight, dtype, placement, obstacle, caplog):
    module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        serves = [kernel_serves(weight, jnp.dtype(dtype), placement, cut_columns=False) for _ in range(2)]
    assert serves == [placement is MOSAIC and obstacle is None] * 2
    assert len(caplog.records) == (obstacle is not None)
    if obstacle is not None:
        assert obstacle in caplog.text
        x = CASE.arguments()[0].astype(dtype)
        plain = matmul(x, dequantize(weight, x.dtype))
        assert (matmul(x, weight, how=HowServed(placement)) == plain).all()


CUT = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
from functools import partial
from jax.sharding import Mesh, AxisType
from packed_weights import PackedCase, row_errors
from octavo.models.layers.packed_product import packed_product
from octavo.models.quantization.weights import IntWeight
from octavo.models.sharding import Placement
import numpy as np
mesh = Mesh(np.array(jax.devices()).reshape(2), ("tp",), axis_types=(AxisType.Auto,))
for group in (32, 256):
    for zeros in ((0, 15, 6), None):
        for cut_columns in (False, True):
            case = PackedCase(4, group, 5, 256, 128, zeros=zeros, dtype="float32")
            x, packed, scale, zero = case.arguments()
            weight = IntWeight(packed, scale, zero, bits=4)
            run = partial(packed_product, cut_columns=cut_columns, out_dtype=jnp.dtype("float32"))
            got = jax.jit(run, static_argnums=2)(x, weight, Placement("xla", mesh))
            assert len(got.sharding.device_set) == 2
            error = row_errors(got, case.exact())
            assert error <= 1e-5, (group, zeros, cut_columns, error)
print("all agree")
"""


def test_two_devices_share_rows_or_columns():
    """Groups of 32 and whole columns, with and without zero points; in a process of its own, with two devices."""
    support = importlib.import_module("packed_weights").__file__.rsplit("/", 1)[0]
    script = f"import sys; sys.path.insert(0, {support!r})\n{CUT}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.stdout == "all agree\n", done.stderr


@pytest.mark.parametrize("cut_columns", [False, True])
@pytest.mark.skipif((mosaic_missing() or aot_missing()) is not None, reason="needs the Mosaic kernels and the plug-in")
def test_two_gpus_read_their_own_share(cut_columns):
    """Compiled for two H200s: nothing is gathered, and only the sums of a cut by columns are added up."""
    mesh = target_mesh(find_target("h200"), 2)

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    size, groups = (8192, 1024), (8192, 64)
    by_share = P(None, "tp") if cut_columns else P("tp")
    weight = IntWeight(
        array(size, jnp.int32, by_share), array(groups, BFLOAT16, by_share), array(groups, jnp.int8, by_share), bits=4
    )
    x = array((16, 8192), BFLOAT16, P(None, "tp") if cut_columns else P())
    run = partial(packed_product, placement=Placement("mosaic", mesh), cut_columns=cut_columns, out_dtype=BFLOAT16)
    out = NamedSharding(mesh, P() if cut_columns else P(None, "tp"))
    report = compile_program(lambda: jax.jit(run, out_shardings=out).lower(x, weight))
    opcodes = [instruction.opcode.removesuffix("-start") for instruction in report.instructions]
    assert "all-gather" not in opcodes
    assert opcodes.count("custom-call") == 1
    reduces = [line for line in report.hlo.splitlines() if "all-reduce" in line]
    assert bool(reduces) == cut_columns


@pytest.mark.parametrize("input_scale", [None, (0.001, 0.02)])
def test_activations_rounded_to_float8(input_scale):
    """As a GPU multiplies: a scale for each token, or the largest of the checkpoint's for the fused parts."""
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((6, 64)) * 10.0 ** np.arange(-2, 1).repeat(2)[:, None], jnp.bfloat16)
    scale = jnp.asarray(rng.uniform(0.5, 2, (24, 1)), jnp.float32)
    activations = "token" if input_scale is None else "static"
    given = None if input_scale is None else jnp.asarray(input_scale)
    weight = Float8Weight(jnp.asarray(rng.standard_normal((24, 64)), jnp.float8_e4m3fn), scale, given, activations)
    wide = np.asarray(x, np.float64)
    x_scale = np.abs(wide).max(axis=1, keepdims=True) / 448 if given is None else np.float64(given.max())
    rounded = np.asarray(jnp.asarray(wide / x_scale, jnp.float8_e4m3fn), np.float64) * x_scale
    want = rounded @ (np.asarray(weight.weight, np.float64) * np.asarray(scale)).T
    got = _float8_product(x, weight, jnp.dtype(jnp.float32))
    assert row_errors(got, want) <= 2e-2  # a number between two float8 may be rounded either way
    assert row_errors(got, want * 1.1) > 5e-2
