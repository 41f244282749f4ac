"""Products with packed weights at the sizes of real models: microseconds by Mosaic and by plain JAX, and their errors.

A call is a chain of layers, each with a weight of its own, so that nothing of a weight is in a cache when its turn
comes. The tokens are random; a few of their numbers are overwritten by results, so that the layers wait for each other.
The floor counts what must be read: packed weights, scales and zero points, and the tokens and results. First each case
is compared with the definition, row by row of the result.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.quantized_matmul import quantized_matmul
from octavo.pallas_kernels.quantized_matmul.reference import quantized_matmul_reference
from octavo.pallas_kernels.xla_options import step_compiler_options

from .calls import interpreter, mosaic_obstacle
from .parts import Options, Report
from .timing import time_chain

CHAIN_BYTES = 1 << 30
"""Of a chain's weights, about: many times what the caches hold."""
MAX_LAYERS = 16
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Case:
    """``num_tokens`` tokens times a weight ``[out_size, in_size]``."""

    out_size: int
    in_size: int
    num_tokens: int
    bits: int = 4
    group_size: int = 128
    has_zero: bool = True
    times_xla: bool = False

    @property
    def name(self) -> str:
        return f"w{self.bits}a16 {self.out_size} x {self.in_size}, {self.num_tokens} tokens"

    @property
    def weight_bytes(self) -> int:
        groups = self.out_size * self.in_size // self.group_size
        return self.out_size * self.in_size * self.bits // 8 + groups * (3 if self.has_zero else 2)

    @property
    def bytes(self) -> int:
        return self.weight_bytes + 2 * self.num_tokens * (self.in_size + self.out_size)

    @property
    def flops(self) -> int:
        return 2 * self.num_tokens * self.out_size * self.in_size


CASES = (
    Case(28672, 4096, 8),
    Case(28672, 4096, 32, times_xla=True),
    Case(28672, 4096, 64),
    Case(4096, 14336, 16),
    Case(6144, 4096, 8),
    Case(28672, 4096, 32, bits=8, has_zero=False),
    Case(28672, 4096, 512),
)
SMOKE_CASES = (Case(128, 256, 5, group_size=64, times_xla=True), Case(64, 128, 9, bits=8, has_zero=False))


class Weight(NamedTuple):
    """Random codes, scales that keep results around 1, zero points."""

    packed: jax.Array
    scale: jax.Array
    zero: jax.Array | None


def run(report: Report, options: Options) -> None:
    """Errors first, then times."""
    obstacle = mosaic_obstacle()
    for case in SMOKE_CASES if options.smoke else CASES:
        layers = 2 if options.smoke else max(2, min(MAX_LAYERS, CHAIN_BYTES // case.weight_bytes))
        weights = [make_weight(case, jax.random.key(i)) for i in range(layers)]
        x = jax.random.normal(jax.random.key(layers), (case.num_tokens, case.in_size), jnp.bfloat16)
        for implementation in ("mosaic", "xla"):
            if implementation == "mosaic" and obstacle is not None:
                report.skip_figure(case.name, obstacle, implementation=implementation)
                continue
            multiply = Multiply(case, implementation, interpreter() if implementation == "mosaic" else None)
            if implementation == "xla" and not case.times_xla:
                continue
            with report.guard(case.name, implementation=implementation):
                report.add(**check(multiply, x, weights[0]))
                figures = time_layers(multiply, x, weights, smoke=options.smoke)
                facts = {"bytes": case.bytes, "flops": case.flops}
                report.add(case.name, implementation=implementation, **facts, **figures)
        del weights


def make_weight(case: Case, key: jax.Array) -> Weight:
    keys = jax.random.split(key, 3)
    words, groups = case.in_size * case.bits // 32, (case.out_size, case.in_size // case.group_size)
    packed = jax.random.bits(keys[0], (case.out_size, words), jnp.uint32)
    scale = jax.random.uniform(keys[1], groups, jnp.float32, 0.5, 1.5) * case.in_size**-0.5 / 2 ** (case.bits - 2)
    limit = 1 << (case.bits - 1)
    zero = jax.random.randint(keys[2], groups, -limit, limit, jnp.int8) if case.has_zero else None
    return Weight(jax.lax.bitcast_convert_type(packed, jnp.int32), scale.astype(jnp.bfloat16), zero)


@dataclass(frozen=True)
class Multiply:
    """A case's product by one implementation; for use inside jit."""

    case: Case
    implementation: Any
    interpret: Any

    def __call__(self, x: jax.Array, weight: Weight) -> jax.Array:
        options = {"implementation": self.implementation, "interpret": self.interpret}
        return quantized_matmul(x, *weight, bits=self.case.bits, group_size=self.case.group_size, **options)


def check(multiply: Multiply, x: jax.Array, weight: Weight) -> dict[str, Any]:
    """A figure: the worst row's largest error, of the row's largest number; NaN is infinite."""
    want = quantized_matmul_reference(x, *weight, bits=multiply.case.bits)
    error = jnp.abs(jax.jit(multiply)(x, weight).astype(jnp.float32) - want).max(axis=1) / jnp.abs(want).max(axis=1)
    worst = float(jnp.where(jnp.isnan(error), jnp.inf, error).max())
    values = {"name": f"error of {multiply.case.name}", "implementation": multiply.implementation}
    values |= {"worst_error": worst, "tolerance": TOLERANCE}
    if not worst <= TOLERANCE:
        values["error"] = f"a result is off by {worst:.3g} of its row's largest number, more than {TOLERANCE}"
    return values


def time_layers(multiply: Multiply, x: jax.Array, weights: list[Weight], *, smoke: bool) -> dict[str, float]:
    """Microseconds of one layer."""

    def chain(x: jax.Array, weights: list[Weight]) -> jax.Array:
        for weight in weights:
            # Of two rows: of one, XLA makes a copy on another stream, which cuts the command buffer in pieces.
            x = x.at[jnp.arange(2), :8].set(multiply(x, weight)[:2, :8])
        return x

    options = step_compiler_options(jax.default_backend()) or None
    program = jax.jit(chain, donate_argnums=0).lower(x, weights).compile(compiler_options=options)
    first = jnp.array(x)  # a copy: the first call's is donated
    timing = time_chain(lambda x: program(x, weights), first, jax.block_until_ready, smoke=smoke)
    return timing.microseconds(per=len(weights))
