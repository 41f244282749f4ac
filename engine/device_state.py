"""The only owner of donated device memory: the KV pool and what each row carries from step to step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..models.kv_cache import KVCacheSpec
from .sampler import RowState
from .sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

KV_SPEC = P(None, None, "tp")
"""A layer's pool ``[num_blocks, 2, num_kv_heads, block_size, head_dim]`` is split over KV heads."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Donated whole to every program and returned by it; nothing else may keep a reference (rule R18).

    ``Rmax`` is max_num_seqs. A row belongs to one request at a time and is written in full when
    a request is admitted to it, so nothing of its former owner survives (rule R5).
    """

    kv: list[jax.Array]
    """Per layer ``[num_blocks, 2, K, S, H]``; block 0 is the null block."""
    last_tokens: jax.Array
    """i32[Rmax]: the token each row sampled last; feeds the next step without the host."""
    block_tables: jax.Array
    """i32[Rmax, max_blocks]"""
    rows: RowState
    """Token counts, prompt masks, biases and stop ids, per row."""
    hidden: jax.Array
    """``[max_num_batched_tokens, D]``: the last step's hidden states, for prompt logprobs."""


@dataclass(frozen=True)
class StateSpec:
    """All sizes of a DeviceState."""

    kv: KVCacheSpec
    max_num_seqs: int
    max_blocks: int
    max_num_batched_tokens: int
    hidden_size: int
    vocab_size: int
    """Width of the logits."""
    dtype: jnp.dtype
    """Of the hidden states."""


def abstract_state(spec: StateSpec, mesh: Mesh) -> DeviceState:
    """Shapes, dtypes and shardings of the state, as ShapeDtypeStructs."""
    rows, replicated = spec.max_num_seqs, NamedSharding(mesh, P())

    def array(shape: tuple[int, ...], dtype: jnp.dtype | type, sharding: NamedSharding = replicated) -> jax.Array:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[return-value]

    pool = array(spec.kv.layer_shape, spec.kv.dtype, NamedSharding(mesh, KV_SPEC))
    return DeviceState(
        kv=[pool] * spec.kv.num_layers,
        last_tokens=array((rows,), jnp.int32),
        block_tables=array((rows, spec.max_blocks), jnp.int32),
        rows=RowState(
            output_counts=array((rows, spec.vocab_size), jnp.int32),
            prompt_mask=array((rows, spec.vocab_size), jnp.bool_),
            bias_ids=array((rows, MAX_LOGIT_BIAS), jnp.int32),
            bias_values=array((rows, MAX_LOGIT_BIAS), jnp.float32),
            stop_ids=array((rows, MAX_STOP_TOKEN_IDS), jnp.int32),
        ),
        hidden=array((spec.max_num_batched_tokens, spec.hidden_size), spec.dtype),
    )


def create_state(spec: StateSpec, mesh: Mesh) -> DeviceState:
    """Allocates the state, zeroed, each array straight to its sharding."""
    return _state_maker(spec, mesh)()


@lru_cache(maxsize=4)
def _state_maker(spec: StateSpec, mesh: Mesh) -> Callable[[], DeviceState]:
    """Compiled once per engine: rebuilding the state after a failure must not compile again."""
    abstract = abstract_state(spec, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract), out_shardings=shardings
    )


def state_bytes(spec: StateSpec) -> int:
    """Device bytes of the state without the KV pool."""
    per_row = 4 + 4 * spec.max_blocks + 5 * spec.vocab_size + 8 * MAX_LOGIT_BIAS + 4 * MAX_STOP_TOKEN_IDS
    hidden = spec.max_num_batched_tokens * spec.hidden_size * jnp.dtype(spec.dtype).itemsize
    return spec.max_num_seqs * per_row + hidden
