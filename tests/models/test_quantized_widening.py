"""Where weights are widened before they are multiplied, they are so one after the other, not all at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.programs import LoadedModel
from octavo.models.layers.linear import matmul
from octavo.models.quantization.weights import Float8Weight, IntWeight, PartedWeight
from octavo.pallas_kernels.aot import aot_missing, compile_for
from octavo.pallas_kernels.xla_options import step_compiler_options

LAYERS, TOKENS = 8, 8


def weight_of(size: int, dtype: jax.typing.DTypeLike) -> IntWeight:
    return IntWeight(
        jax.ShapeDtypeStruct((size, size // 8), jnp.int32),
        jax.ShapeDtypeStruct((size, size // 128), dtype),
        jax.ShapeDtypeStruct((size, size // 128), jnp.int8),
    )


def layers(x: jax.Array, weights: list[IntWeight]) -> jax.Array:
    for weight in weights:
        x = jax.nn.silu(matmul(x, weight))
    return x


def test_on_a_cpu() -> None:
    """With the options that a step has."""
    arguments = (jax.ShapeDtypeStruct((TOKENS, 512), jnp.float32), [weight_of(512, jnp.float32)] * LAYERS)
    options = step_compiler_options("cpu", quantized=True)
    analysis = jax.jit(layers).lower(*arguments).compile(options).memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 2.5 * 4 * 512 * 512


@pytest.mark.skipif(aot_missing() is not None, reason=str(aot_missing()))
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through XLA, as on a GPU that the kernels are not for. Without the barrier it widens them first."""

    def weights_at_a_time(size: int) -> float:
        x = jax.ShapeDtypeStruct((TOKENS, size), jnp.bfloat16)
        report = compile_for("rtx4090", layers, x, [weight_of(size, jnp.bfloat16)] * LAYERS)
        return report.temp_bytes / (2 * size * size)

    assert weights_at_a_time(1024) < 2.5
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda arrays: arrays)
    assert weights_at_a_time(1152) > LAYERS - 2


def test_which_models_are_quantised() -> None:
    plain = np.zeros((2, 2))
    kinds = [weight_of(128, jnp.float32), Float8Weight(plain, plain), PartedWeight((plain, plain)), plain]
    found = [LoadedModel(None, {"layers": [{"o": {"weight": kind}}], "norm": plain}, None).quantized for kind in kinds]
    assert found == [True, True, True, False]
