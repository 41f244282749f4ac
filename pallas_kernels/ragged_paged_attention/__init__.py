"""Mixed attention: any number of queries a row (decode, prefill, chunked prefill) over the paged KV pool."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..attention_common import AttentionOptions, attend_scaled, check_attention_inputs, check_kv_scales, check_work
from ..dispatch import Implementation, check_implementation, load_mosaic
from ..float8 import as_numbers
from ..paged_attention import work_spec as decode_work_spec
from ..tuning import measured_sizes, num_multiprocessors
from .config import MosaicTuningConfig, mosaic_tuning
from .work import MixedWorkPlan, Split, WorkSpec
from .xla import TokenPlan, ragged_paged_attention_xla

__all__ = ["ragged_paged_attention", "work_spec"]


def ragged_paged_attention(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
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
    """Causal attention of the tokens of this step, packed row after row.

    Args:
      q: ``[T, N, H]``; row r's queries are the tokens ``query_start_loc[r]:query_start_loc[r+1]``, at the
        positions ``seq_lens[r] - query_len .. seq_lens[r] - 1``. Their keys and values are already in the pool.
      kv: ``[B, 2, K, S, H]``, one layer's pool, keys at index 0 and values at 1; N is a multiple of K. What the
        pool holds outside a row's tokens is never used, even if it is NaN. uint8 is float8_e4m3fn (``float8.py``).
      block_tables: i32 ``[R, max_blocks]``, the row's block ids in order; entries past the length are ignored.
      query_start_loc: i32 ``[R+1]``, prefix sum of the rows' query counts, from 0; a count may be 0. Tokens
        from ``query_start_loc[R]`` on are padding and give zeros.
      seq_lens: i32 ``[R]``, tokens in the pool including this step's; at most ``max_blocks * S``.
      scale: factor on q · k.
      window: the query at position p sees the keys in (p - window, p].
      softcap: scores become ``softcap * tanh(score / softcap)``.
      sinks: ``[N]``, a logit per head that joins the softmax's denominator and has no value.
      implementation: "xla" or "mosaic", see ``dispatch.select_implementation``.
      interpret: for "mosaic" on a CPU, ``dispatch.gpu_interpreter()``.
      kv_scales: f32[2], what the pool's keys and values are to be multiplied by, for a pool of float8; None: 1.
      work: what the layers of a step share, planned for these tokens and rows: for "mosaic" by ``work_spec``, for
        "xla" by ``plan_tokens`` (``xla.py``); query_start_loc and seq_lens are then not looked at. None: it is planned
        in-graph, some dozen small launches.

    Returns:
      ``[T, N, H]`` in q's type; the softmax and both sums are float32.

    Raises:
      ValueError: shapes, types or options that do not fit, or that "mosaic" cannot serve. NotImplementedError:
      "mosaic" with a JAX that is too old for it.
    """
    check_implementation(implementation)
    check_attention_inputs(q, kv, block_tables, seq_lens, sinks)
    _check_query_start_loc(query_start_loc, seq_lens.shape[0])
    options = AttentionOptions(scale=scale, window=window, softcap=softcap)
    check_kv_scales(kv_scales)
    lengths, more = (query_start_loc, seq_lens), (sinks, kv_scales)
    if implementation == "xla":
        plan = check_work(work, TokenPlan)
        return _ragged_paged_attention(q, kv, block_tables, *lengths, *more, plan, options=options)
    kv = as_numbers(kv)
    spec = work_spec(q, kv, block_tables.shape[1], window=window, interpret=interpret)
    planned = check_work(work, MixedWorkPlan)
    return _ragged_paged_attention_mosaic(
        q, kv, block_tables, *lengths, *more, planned, options=options, spec=spec, interpret=interpret
    )


def _check_query_start_loc(starts: jax.Array, num_rows: int) -> None:
    if starts.shape != (num_rows + 1,) or starts.dtype != jnp.int32:
        raise ValueError(
            f"query_start_loc must be int32 [{num_rows + 1}] for {num_rows} rows; got {starts.dtype} {starts.shape}"
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
    return WorkSpec(
        split=Split.of(q.shape[1] // kv.shape[2], q.shape[2]),
        tuning=_mosaic_tuning(q, kv, interpret),
        decode=decode_work_spec(q, kv, max_blocks, window=window, interpret=interpret),
    )


@partial(jax.jit, static_argnames="options")
def _ragged_paged_attention(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    sinks: jax.Array | None,
    scales: jax.Array | None,
    plan: TokenPlan | None,
    options: AttentionOptions,
) -> jax.Array:
    """An inner jit: the layers of a model with equal shapes and options share one trace."""
    lengths = (query_start_loc, seq_lens)
    return attend_scaled(
        lambda q: ragged_paged_attention_xla(q, kv, block_tables, *lengths, sinks, options, plan), q, scales
    )


def _mosaic_tuning(
    q: jax.ShapeDtypeStruct | jax.Array, kv: jax.ShapeDtypeStruct | jax.Array, interpret: Any
) -> MosaicTuningConfig:
    """What was measured on this GPU, or else what ``mosaic_tuning`` reasons. Raises ValueError for a shape that the
    kernel cannot serve."""
    measured = measured_sizes("ragged_paged_attention", q, kv, interpret) or {}
    reasoned = mosaic_tuning(kv.shape[-1], num_multiprocessors(), interpreted=interpret is not None)
    return replace(reasoned, **measured)


@partial(jax.jit, static_argnames=("options", "spec", "interpret"))
def _ragged_paged_attention_mosaic(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
    work: MixedWorkPlan | None,
    options: AttentionOptions,
    spec: WorkSpec,
    interpret: Any,
) -> jax.Array:
    kernel = load_mosaic("ragged_paged_attention").ragged_paged_attention_mosaic
    work = spec.plan(query_start_loc, seq_lens, q.shape[0]) if work is None else work
    return kernel(q, kv, block_tables, seq_lens, sinks, work, options, spec.tuning, interpret, kv_scales)
