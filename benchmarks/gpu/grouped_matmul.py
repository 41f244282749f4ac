"""The experts' MLPs at the sizes of real models: microseconds by Mosaic, by the loop and by XLA, and their errors.

Tokens choose their experts at random; the last token is padding, and its rows are NaN. A call is a chain of layers,
each with experts of its own, so that nothing of a weight is in a cache when its turn comes; a few of the rows' numbers
are overwritten by results, so that the layers wait for each other. What Mosaic plans on the device is timed with it,
sorting the rows is not. The floor counts what must be read and written once: the weights of the experts that have rows,
the rows and the results. First each case is compared with float32 products, at the first and last row of each expert.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo.models.layers.moe import grouped_mlp, grouped_mlp_mosaic
from octavo.pallas_kernels.xla_options import step_compiler_options

from .calls import interpreter, mosaic_obstacle
from .correctness import worst_error
from .parts import Options, Report
from .timing import time_chain

NUM_LAYERS = 2
"""Of a chain: the weights of one, a gigabyte and more, leave nothing of the other's in a cache."""
COMPILE_THREADS = 8
TOLERANCE = 2e-2

Implementation = Callable[..., jax.Array]
"""(rows, gate_up, down, group_ends) -> results."""


@dataclass(frozen=True)
class Shape:
    """A layer of experts, ``gate_up [E, 2F, D]`` and ``down [E, D, F]``."""

    name: str
    num_experts: int
    experts_per_token: int
    hidden: int
    ffn: int


@dataclass(frozen=True)
class Case:
    """``num_tokens`` tokens, the last one padding."""

    shape: Shape
    num_tokens: int
    times_ragged_dot: bool = True
    """XLA's own multiplies every row by every expert: too much for the tokens of a prompt."""

    @property
    def name(self) -> str:
        return f"{self.shape.name}, {self.num_tokens} tokens"

    @property
    def num_rows(self) -> int:
        return self.num_tokens * self.shape.experts_per_token

    def group_sizes(self) -> np.ndarray:
        """Rows of each expert, i32 ``[E]``."""
        rng, shape = np.random.default_rng(self.num_tokens), self.shape
        ranks = rng.random((self.num_tokens - 1, shape.num_experts)).argsort(axis=1)
        return np.bincount(ranks[:, : shape.experts_per_token].ravel(), minlength=shape.num_experts).astype(np.int32)

    def work(self, group_sizes: np.ndarray) -> dict[str, int]:
        """bytes and flops of a layer."""
        expert, rows = 3 * self.shape.hidden * self.shape.ffn, int(group_sizes.sum())
        read = int(np.count_nonzero(group_sizes)) * expert + 2 * rows * self.shape.hidden
        return {"bytes": 2 * read, "flops": 2 * rows * expert}


QWEN3_30B = Shape("qwen3-30b-a3b", 128, 8, 2048, 768)
MIXTRAL = Shape("mixtral-8x7b", 8, 2, 4096, 14336)
CASES = {
    QWEN3_30B: (Case(QWEN3_30B, 64), Case(QWEN3_30B, 256, False), Case(QWEN3_30B, 2048, False)),
    MIXTRAL: (Case(MIXTRAL, 64), Case(MIXTRAL, 2048, False)),
}
TINY = Shape("tiny", 4, 2, 64, 64)
SMOKE_CASES = {TINY: (Case(TINY, 6),)}


class Experts(NamedTuple):
    """Random weights that keep results around 1."""

    gate_up: jax.Array
    down: jax.Array


class Carry(NamedTuple):
    """What a call hands to the next: the rows, and the first layer's results to be compared."""

    rows: jax.Array
    results: jax.Array


def run(report: Report, options: Options) -> None:
    """A shape's weights serve all of its cases."""
    for shape, cases in (SMOKE_CASES if options.smoke else CASES).items():
        layers = [make_experts(shape, index) for index in range(NUM_LAYERS)]
        with ThreadPoolExecutor(1 if options.smoke else COMPILE_THREADS) as pool:
            arrays = [make_rows(case) for case in cases]
            compiled = [
                {name: pool.submit(_compile, function, rows, layers, ends) for name, function in of(case).items()}
                for case, (rows, ends) in zip(cases, arrays, strict=True)
            ]
            for case, given, programs in zip(cases, arrays, compiled, strict=True):
                _measure(report, case, given, layers, programs, smoke=options.smoke)
        del layers


def of(case: Case) -> dict[str, Implementation]:
    """Those that are measured."""
    found: dict[str, Implementation] = {"loop": partial(grouped_mlp, activation="silu")}
    if mosaic_obstacle() is None:
        mosaic = partial(grouped_mlp_mosaic, activation="silu", interpret=interpreter())
        found = {"mosaic": mosaic, **found}
    return {**found, "ragged_dot": ragged_dot_mlp} if case.times_ragged_dot else found


def ragged_dot_mlp(rows: jax.Array, gate_up: jax.Array, down: jax.Array, group_ends: jax.Array) -> jax.Array:
    """By ``jax.lax.ragged_dot``."""
    sizes = jnp.diff(group_ends, prepend=0)
    gate, up = jnp.split(jax.lax.ragged_dot(rows, gate_up.swapaxes(1, 2), sizes), 2, axis=1)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, down.swapaxes(1, 2), sizes)


def make_experts(shape: Shape, seed: int) -> Experts:
    sizes = ((2 * shape.ffn, shape.hidden), (shape.hidden, shape.ffn))
    return Experts(
        *(_normal((shape.num_experts, *size), size[1] ** -0.5, 2 * seed + i) for i, size in enumerate(sizes))
    )


@partial(jax.jit, static_argnums=(0, 1, 2))
def _normal(shape: tuple[int, ...], deviation: float, seed: int) -> jax.Array:
    key = jax.random.key(seed, impl="unsafe_rbg")
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(deviation)


def make_rows(case: Case) -> tuple[jax.Array, np.ndarray]:
    """Rows ``[A, D]``, of which those past the groups are NaN, and the groups' ends."""
    ends = case.group_sizes().cumsum(dtype=np.int32)
    rows = _normal((case.num_rows, case.shape.hidden), 1.0, 99)
    return rows.at[int(ends[-1]) :].set(jnp.nan), ends


def _compile(function: Implementation, rows: jax.Array, layers: list[Experts], ends: np.ndarray) -> Any:
    def chain(rows: jax.Array, layers: list[Experts], ends: jax.Array) -> Carry:
        outputs = []
        for experts in layers:
            outputs.append(function(rows, *experts, ends))
            # Of two rows: of one, XLA makes a copy on another stream, which cuts the command buffer in pieces.
            rows = rows.at[jnp.arange(2), :8].set(outputs[-1][:2, :8])
        return Carry(rows, outputs[0])

    options = step_compiler_options(jax.default_backend()) or None
    return jax.jit(chain, donate_argnums=0).lower(rows, layers, ends).compile(compiler_options=options)


def _measure(
    report: Report,
    case: Case,
    given: tuple[jax.Array, np.ndarray],
    layers: list[Experts],
    programs: dict[str, Future],
    *,
    smoke: bool,
) -> None:
    """Errors first, then times."""
    rows, ends = given
    if obstacle := mosaic_obstacle():
        report.skip_figure(case.name, obstacle, implementation="mosaic")
    compared = edge_rows(ends)
    on_device = jnp.asarray(ends)
    wanted = np.asarray(reference(rows, *layers[0], on_device, jnp.asarray(compared)))
    facts = {"rows": int(ends[-1]), **case.work(np.diff(ends, prepend=0))}
    for name, future in programs.items():
        with report.guard(case.name, implementation=name):
            program = future.result()
            carry = program(jnp.array(rows), layers, on_device)  # a copy: the call's argument is donated
            report.add(**compare(case, name, np.asarray(carry.results.astype(jnp.float32))[compared], wanted))
            call = partial(_next, program, layers, on_device)
            timing = time_chain(call, carry, jax.block_until_ready, smoke=smoke)
            figures = timing.microseconds(per=len(layers))
            report.add(case.name, implementation=name, **facts, **figures)


def _next(program: Any, layers: list[Experts], ends: jax.Array, carry: Carry) -> Carry:
    return program(carry.rows, layers, ends)


def edge_rows(group_ends: np.ndarray) -> np.ndarray:
    """The first and the last row of each group: where tiles of rows go wrong."""
    starts = np.append(0, group_ends[:-1])
    used = starts < group_ends
    return np.unique(np.concatenate([starts[used], group_ends[used] - 1]))


@jax.jit
def reference(rows: jax.Array, gate_up: jax.Array, down: jax.Array, ends: jax.Array, chosen: jax.Array) -> jax.Array:
    """Results of the rows ``chosen`` i32 ``[N]``, f32 ``[N, D]``, each by its expert alone."""

    def product(weight: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.matmul(weight.astype(jnp.float32), x, precision=jax.lax.Precision.HIGHEST)

    def one(row: jax.Array) -> jax.Array:
        expert = jnp.sum(ends <= row)
        gate, up = jnp.split(product(gate_up[expert], rows[row].astype(jnp.float32)), 2)
        return product(down[expert], jax.nn.silu(gate) * up)

    return jax.lax.map(one, chosen)


def compare(case: Case, implementation: str, found: np.ndarray, wanted: np.ndarray) -> dict[str, Any]:
    """A figure: the largest error of a row, of the row's length; NaN is infinite."""
    worst = worst_error(found, wanted)
    values = {"name": f"error of {case.name}", "implementation": implementation}
    values |= {"worst_error": worst, "tolerance": TOLERANCE}
    if not worst <= TOLERANCE:
        values["error"] = f"a row is off by {worst:.3g} of its length, more than {TOLERANCE}"
    return values
