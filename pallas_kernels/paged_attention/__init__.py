"""Decode attention: one query a row over the paged KV pool."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from ..attention_common import AttentionOptions, attend_scaled, check_attention_inputs, check_kv_scales, check_work
from ..dispatch import Implementation, check_implementation, load_mosaic
from ..float8 import as_numbers
from ..tuning import measured_sizes, num_multiprocessors
from .config import MosaicTuningConfig, mosaic_tuning
from .work import WorkPlan, WorkSpec
from .xla import RowPlan, paged_attention_xla

__all__ = ["paged_attention", "work_spec"]


def paged_attention(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: Implementation = "xla",
    interpret: Any = None,
    kv_scales: jax.Array | None = None,
    work: object | None = None,
) -> jax.Array:
    """Attention of each row's newest token over all its tokens.

    Args:
      q: ``[R, N, H]``; row r's query stands at position ``seq_lens[r] - 1``, and its own key and value are
        already in the pool.
      kv: ``[B, 2, K, S, H]``, one layer's pool, keys at index 0 and values at 1; N is a multiple of K. What the
        pool holds outside a row's tokens is never used, even if it is NaN. uint8 is float8_e4m3fn (``float8.py``).
      block_tables: i32 ``[R, max_blocks]``, the row's block ids in order; entries past the length are ignored.
      seq_lens: i32 ``[R]``, at most ``max_blocks * S``; a row of length 0 gives zeros.
      scale: factor on q · k.
      window: the query at position p sees the keys in (p - window, p].
      softcap: scores become ``softcap * tanh(score / softcap)``.
      sinks: ``[N]``, a logit per head that joins the softmax's denominator and has no value.
      implementation: "xla" or "mosaic", see ``dispatch.select_implementation``.
      interpret: for "mosaic" on a CPU, ``dispatch.gpu_interpreter()``.
      kv_scales: f32[2], what the pool's keys and values are to be multiplied by, for a pool of float8; None: 1.
      work: what the layers of a step share, planned for these rows: for "mosaic" by ``work_spec``, for "xla" by
        ``plan_rows`` (``xla.py``); seq_lens is then not looked at. None: it is planned in-graph, a handful of small
        launches.

    Returns:
      ``[R, N, H]`` in q's type; the softmax and both sums are float32.

    Raises:
      ValueError: shapes, types or options that do not fit, or that "mosaic" cannot serve. NotImplementedError:
      "mosaic" with a JAX that is too old for it.
    """
    check_implementation(implementation)
    check_attention_inputs(q, kv, block_tables, seq_lens, sinks)
    if q.shape[0] != seq_lens.shape[0]:
        raise ValueError(f"decode takes one query a row; got {q.shape[0]} queries and {seq_lens.shape[0]} rows")
    options = AttentionOptions(scale=scale, window=window, softcap=softcap)
    check_kv_scales(kv_scales)
    if implementation == "xla":
        plan = check_work(work, RowPlan)
        return _paged_attention(q, kv, block_tables, seq_lens, sinks, kv_scales, plan, options=options)
    kv = as_numbers(kv)
    spec = work_spec(q, kv, block_tables.shape[1], window=window, interpret=interpret)
    planned = check_work(work, WorkPlan)
    return _paged_attention_mosaic(
        q, kv, block_tables, seq_lens, sinks, kv_scales, planned, options=options, spec=spec, interpret=interpret
    )


def work_spec(
    q: jax.ShapeDtypeStruct | jax.Array,
    kv: jax.ShapeDtypeStruct | jax.Array,
    max_blocks: int,
    *,
    window: int | None = None,
    interpret: Any = None,
) -> WorkSpec:
    """How "mosaic" plans the work of calls like this one, with ``max_blocks`` blocks a row. Raises ValueError for a
    shape that it cannot serve."""
    tuning = _mosaic_tuning(q, kv, interpret)
    return WorkSpec(
        num_kv_heads=kv.shape[2],
        block_size=kv.shape[3],
        max_keys=max_blocks * kv.shape[3],
        window=window,
        tuning=tuning,
    )


@partial(jax.jit, static_argnames="options")
def _paged_attention(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    sinks: jax.Array | None,
    scales: jax.Array | None,
    plan: RowPlan | None,
    options: AttentionOptions,
) -> jax.Array:
    """An inner jit: the layers of a model with equal shapes and options share one trace."""
    return attend_scaled(lambda q: paged_attention_xla(q, kv, block_tables, seq_lens, sinks, options, plan), q, scales)


def _mosaic_tuning(
    q: jax.ShapeDtypeStruct | jax.Array, kv: jax.ShapeDtypeStruct | jax.Array, interpret: Any
) -> MosaicTuningConfig:
    """What was measured on this GPU, or else what ``mosaic_tuning`` reasons. Raises ValueError for a shape that the
    kernel cannot serve."""
    measured = measured_sizes("paged_attention", q, kv, interpret) or {}
    reasoned = mosaic_tuning(kv.shape[-1], kv.dtype.itemsize, num_multiprocessors(), interpreted=interpret is not None)
    return replace(reasoned, **measured)


@partial(jax.jit, static_argnames=("options", "spec", "interpret"))
def _paged_attention_mosaic(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
    work: WorkPlan | None,
    options: AttentionOptions,
    spec: WorkSpec,
    interpret: Any,
) -> jax.Array:
    kernel = load_mosaic("paged_attention").paged_attention_mosaic
    work = spec.plan(seq_lens) if work is None else work
    return kernel(q, kv, block_tables, work, sinks, options, spec.tuning, interpret, kv_scales)
