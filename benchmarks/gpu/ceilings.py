"""What the device can do at most: bytes copied and read a second, and bfloat16 products."""

import jax
import jax.numpy as jnp

from .parts import Options, Report
from .timing import time_chain


def run(report: Report, options: Options) -> None:
    """Copy, elementwise and read bandwidth over an array far larger than the caches, and a square product of random
    numbers (zeros would run faster than real data)."""
    smoke = options.smoke
    words = 1 << (16 if smoke else 29)
    x = jax.random.bits(jax.random.key(0, impl="unsafe_rbg"), (words,), jnp.uint32)
    num_bytes = words * 4
    # A jitted copy of an argument that is not donated moves every byte once each way.
    for name, function, moved in (
        ("copy", jnp.copy, 2 * num_bytes),
        ("elementwise", lambda x: x ^ jnp.uint32(1), 2 * num_bytes),
    ):
        with report.guard(name):
            timing = time_chain(jax.jit(function), x, jax.block_until_ready, smoke=smoke)
            report.add(name, bytes=moved, **timing.microseconds(), terabytes_per_s=moved / timing.median_s / 1e12)
    with report.guard("read"):
        reader = jax.jit(lambda x, total: total + jnp.sum(x))  # the sum before makes calls wait for each other
        timing = time_chain(lambda total: reader(x, total), jnp.uint32(0), jax.block_until_ready, smoke=smoke)
        report.add("read", bytes=num_bytes, **timing.microseconds(), terabytes_per_s=num_bytes / timing.median_s / 1e12)
    with report.guard("matmul"):
        _matmul(report, 256 if smoke else 8192, smoke)


def _matmul(report: Report, size: int, smoke: bool) -> None:
    keys = jax.random.split(jax.random.key(1), 2)
    x = jax.random.normal(keys[0], (size, size), jnp.bfloat16)
    w = jax.random.normal(keys[1], (size, size), jnp.bfloat16) * size**-0.5  # the product's numbers stay around 1
    product = jax.jit(lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16))
    timing = time_chain(lambda x: product(x, w), x, jax.block_until_ready, smoke=smoke)
    flops = 2 * size**3
    report.add(
        "matmul", size=size, flops=flops, **timing.microseconds(), teraflops_per_s=flops / timing.median_s / 1e12
    )
