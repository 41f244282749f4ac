"""One call of attention, by any implementation, with its work planned on the host as the engine does."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from octavo.pallas_kernels import paged_attention as decode
from octavo.pallas_kernels import ragged_paged_attention as mixed
from octavo.pallas_kernels.compat import mosaic_missing
from octavo.pallas_kernels.dispatch import Device, gpu_interpreter, xla_cpu_threads

from .batches import Batch

Call = Callable[[jax.Array, jax.Array, dict[str, Any]], jax.Array]
"""(q, one layer's pool, the other arrays) -> ``[T, N, H]``; for use inside jit."""


@dataclass(frozen=True)
class CallOptions:
    """What is static in a call, besides its shapes."""

    scale: float
    window: int | None = None
    softcap: float | None = None


def mosaic_obstacle() -> str | None:
    """Why the Mosaic kernels cannot run here at all; None if they can (on a CPU interpreted)."""
    if missing := mosaic_missing():
        return missing
    device = Device.of(jax.devices()[0])
    if device.platform == "gpu":
        capable = device.compute_capability is not None and device.compute_capability >= (9, 0)
        return None if capable else f"compute capability {device.compute_capability} is below 9.0"
    threads = xla_cpu_threads()
    return "the interpreter needs 4 threads of XLA (NPROC)" if threads is not None and threads < 4 else None


def interpreter() -> Any:
    return gpu_interpreter() if jax.default_backend() == "cpu" else None


def make_call(
    operation: str,
    implementation: str,
    batch: Batch,
    options: CallOptions,
    *,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
) -> tuple[Call, dict[str, Any]]:
    """``operation``: "decode" or "mixed". Returns the call and the other arrays that it takes: tables, lengths, and for
    "mosaic" the planned work."""
    static = {"scale": options.scale, "window": options.window, "softcap": options.softcap}
    interpret = interpreter() if implementation == "mosaic" else None
    arrays = {"tables": batch.tables, "lens": batch.lens, "starts": batch.starts, "work": None}
    if implementation == "mosaic":
        module = decode if operation == "decode" else mixed
        max_blocks = batch.tables.shape[1]
        spec = module.work_spec(batch.q, batch.pools[0], max_blocks, window=options.window, interpret=interpret)
        work = spec.plan(batch.lens) if operation == "decode" else spec.plan(batch.starts, batch.lens, len(batch.q))
        arrays["work"] = work

    def call(q: jax.Array, pool: jax.Array, given: dict[str, Any]) -> jax.Array:
        common = {**static, "sinks": sinks, "implementation": implementation, "interpret": interpret}
        common["kv_scales"] = kv_scales
        tables, lens, work = given["tables"], given["lens"], given["work"]
        if operation == "decode":
            return decode.paged_attention(q, pool, tables, lens, work=work, **common)
        return mixed.ragged_paged_attention(q, pool, tables, given["starts"], lens, work=work, **common)

    return call, jax.tree.map(jnp.asarray, arrays)
