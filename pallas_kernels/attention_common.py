"""What the two attention operations share: options, argument checks, the online softmax, reading the pool."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .float8 import as_bits, as_numbers

MASK_VALUE = -1e30
"""A masked score. Finite, so that a row with no key at all stays free of NaN (-inf minus -inf)."""

LOWEST_MAX = -1e29
"""Where a running maximum starts: above MASK_VALUE, so that exp(masked - maximum) is 0 even before any key."""


Work = TypeVar("Work")


@dataclass(frozen=True)
class AttentionOptions:
    """The static part of an attention call; hashable, so that equal calls share one trace."""

    scale: float
    """Factor on q · k."""
    window: int | None = None
    """A query at position p sees the keys in (p - window, p]; None: all keys up to p."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap); None: unchanged."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(f"scale must be finite; got {self.scale}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1; got {self.window}")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap must be positive and finite; got {self.softcap}")


def check_attention_inputs(
    q: jax.Array, kv: jax.Array, block_tables: jax.Array, seq_lens: jax.Array, sinks: jax.Array | None
) -> None:
    """Raises ValueError unless the shapes and types fit each other.

    q ``[T or R, N, H]``; kv ``[B, 2, K, S, H]``; block_tables i32 ``[R, max_blocks]``; seq_lens i32 ``[R]``;
    sinks ``[N]`` or None.
    """
    if q.ndim != 3:
        raise ValueError(f"q must be [tokens, heads, head_dim]; got shape {q.shape}")
    if kv.ndim != 5 or kv.shape[1] != 2:
        raise ValueError(f"kv must be [num_blocks, 2, kv_heads, block_size, head_dim]; got shape {kv.shape}")
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv.shape[2]
    if kv.shape[4] != head_dim:
        raise ValueError(f"q has head_dim {head_dim} but kv has {kv.shape[4]}")
    if num_heads % num_kv_heads:
        raise ValueError(f"the {num_heads} query heads are no multiple of the {num_kv_heads} KV heads")
    for name, array in (("q", q), ("kv", kv)):
        is_float8 = name == "kv" and array.dtype == jnp.uint8
        if not is_float8 and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point; got {array.dtype}")
    for name, array in (("block_tables", block_tables), ("seq_lens", seq_lens)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32; got {array.dtype}")
    if seq_lens.ndim != 1 or block_tables.ndim != 2 or block_tables.shape[0] != seq_lens.shape[0]:
        raise ValueError(
            "block_tables must be [rows, max_blocks] and seq_lens [rows]; "
            f"got shapes {block_tables.shape} and {seq_lens.shape}"
        )
    if 0 in (*q.shape, *kv.shape, *block_tables.shape):
        raise ValueError(f"no dimension may be 0; got q {q.shape}, kv {kv.shape}, block_tables {block_tables.shape}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks must be [{num_heads}], one per query head; got shape {sinks.shape}")


def check_kv_scales(scales: jax.Array | None) -> None:
    """Raises ValueError unless ``scales`` is f32[2] or None."""
    if scales is not None and (jnp.shape(scales) != (2,) or scales.dtype != jnp.float32):
        raise ValueError(f"kv_scales must be float32 [2]; got {scales.dtype} {jnp.shape(scales)}")


def attend_scaled(attend: Callable[[jax.Array], jax.Array], q: jax.Array, kv_scales: jax.Array | None) -> jax.Array:
    """``attend(q)`` over a pool whose keys and values are to be multiplied by ``kv_scales`` f32[2]; in q's type.

    Queries carry the factor of the keys, the result that of the values, so nothing of the pool's size is multiplied.
    """
    if kv_scales is None:
        return attend(q)
    return (attend(q.astype(jnp.float32) * kv_scales[0]) * kv_scales[1]).astype(q.dtype)


def array_module(array: Any) -> Any:
    """What ``array`` is computed with: numpy, or else jax.numpy."""
    return np if isinstance(array, np.ndarray) else jnp


def segment_of(index: Any, ends: Any) -> Any:
    """Which of the segments that end (exclusively) at ``ends`` holds each ``index``; ``len(ends)`` for none."""
    if isinstance(ends, np.ndarray):
        return np.searchsorted(ends, index, side="right")
    return jnp.searchsorted(ends, index, side="right", method="compare_all")


def softcapped(scores: jax.Array, softcap: float | None) -> jax.Array:
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def visible(query_pos: jax.Array, key_pos: jax.Array, window: int | None) -> jax.Array:
    """True where a query at ``query_pos`` sees the key at ``key_pos``; the two broadcast."""
    seen = key_pos <= query_pos
    return seen if window is None else seen & (key_pos > query_pos - window)


class SoftmaxState(NamedTuple):
    """An online softmax under way, all float32: the running maximum and the sums relative to it."""

    maximum: jax.Array  # [..., K, G]
    denominator: jax.Array  # [..., K, G]
    accumulator: jax.Array  # [..., K, G, H]

    @classmethod
    def start(cls, shape: tuple[int, ...], sinks: jax.Array | None) -> "SoftmaxState":
        """Before any key; ``shape`` is the accumulator's ``[..., K, G, H]``, sinks ``[K * G]`` or None."""
        if sinks is None:
            maximum, denominator = jnp.full(shape[:-1], LOWEST_MAX, jnp.float32), jnp.zeros(shape[:-1], jnp.float32)
        else:
            per_head = sinks.astype(jnp.float32).reshape(shape[-3:-1])
            maximum, denominator = jnp.broadcast_to(per_head, shape[:-1]), jnp.ones(shape[:-1], jnp.float32)
        return cls(maximum, denominator, jnp.zeros(shape, jnp.float32))

    def update(self, scores: jax.Array, v: jax.Array, precision: jax.lax.Precision) -> "SoftmaxState":
        """Adds a chunk: scores ``[..., K, G, C]`` with masked ones at MASK_VALUE, v ``[..., K, C, H]``, finite."""
        maximum = jnp.maximum(self.maximum, jnp.max(scores, axis=-1))
        probs = jnp.exp(scores - maximum[..., None])
        decay = jnp.exp(self.maximum - maximum)
        values = jnp.einsum("...kgc,...kch->...kgh", probs, v, precision=precision)
        return SoftmaxState(
            maximum,
            self.denominator * decay + jnp.sum(probs, axis=-1),
            self.accumulator * decay[..., None] + values,
        )

    def result(self) -> jax.Array:
        """``[..., K, G, H]``; zeros where there was no key."""
        return self.accumulator / jnp.where(self.denominator == 0.0, 1.0, self.denominator)[..., None]


def matmul_precision(kv_dtype: jnp.dtype) -> jax.lax.Precision:
    """Products of 16-bit keys and values lose nothing in a GPU's default (TF32); float32 ones would."""
    return jax.lax.Precision.HIGHEST if kv_dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def gather_chunk(
    kv: jax.Array, block_ids: jax.Array, written: jax.Array, branch_on_partial_chunks: bool
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of some blocks of each row, in float32, with zeros where nothing was written.

    kv ``[B, 2, K, S, H]``; block_ids i32 ``[W, blocks]``; written bool ``[W, blocks * S]``. Returns two arrays
    ``[W, K, blocks * S, H]``. With ``branch_on_partial_chunks`` nothing is zeroed when all is written.
    """
    num_blocks, _, num_kv_heads, block_size, head_dim = kv.shape
    num_rows, chunk_tokens = written.shape
    shape = (num_rows, num_kv_heads, chunk_tokens, head_dim)
    # One long row of the gather is the S keys of one block and head.
    flat = as_bits(kv).reshape(num_blocks * 2 * num_kv_heads, block_size * head_dim)
    first = block_ids[:, None, :] * (2 * num_kv_heads) + jnp.arange(num_kv_heads)[:, None]  # [W, K, blocks]
    first = first.reshape(-1)

    def gather(index: jax.Array) -> jax.Array:
        return flat.at[index].get(mode="promise_in_bounds")

    def gather_and_zero(index: jax.Array) -> jax.Array:
        x = gather(index)
        return jnp.where(written[:, None, :, None], x.reshape(shape), jnp.zeros((), x.dtype)).reshape(x.shape)

    def both(read: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
        return read(first), read(first + num_kv_heads)

    if branch_on_partial_chunks:
        k, v = jax.lax.cond(jnp.all(written), lambda: both(gather), lambda: both(gather_and_zero))
    else:
        k, v = both(gather_and_zero)

    k, v = (as_numbers(x).astype(jnp.float32).reshape(shape) for x in (k, v))
    return k, v


def check_work(work: object, kind: type[Work]) -> Work | None:
    """``work``, if it is the kind that the implementation takes. Raises ValueError."""
    if work is not None and not isinstance(work, kind):
        raise ValueError(f"this implementation takes a {kind.__name__} as work; got a {type(work).__name__}")
    return work
