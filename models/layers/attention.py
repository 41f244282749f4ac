"""Self-attention over the paged KV pool."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from ...pallas_kernels.paged_attention import paged_attention
from ...pallas_kernels.ragged_paged_attention import ragged_paged_attention
from ..attention_metadata import AttentionMetadata
from ..decoder_config import DecoderConfig, LayerSpec
from ..kv_cache import write_kv
from ..sharding import TP_AXIS, Placement
from .linear import Linear
from .norm import RMSNorm
from .rope import RopeTable, apply_rope

_HEADS, _POOL = P(None, TP_AXIS), P(None, None, TP_AXIS)


def _computed_once(*arrays: jax.Array) -> list[jax.Array]:
    """Norms on their way to rope. On a GPU XLA would compute each anew for either half of a head that rope takes, in a
    launch each: three more a layer. On a CPU it would lose by having to write the whole norm first."""
    return jax.lax.platform_dependent(
        *arrays, cpu=lambda *x: list(x), default=lambda *x: list(jax.lax.optimization_barrier(x))
    )


class Attention(nnx.Module):
    """q, k, v → norm → rope → write to the pool → attend → o.

    Parameters: ``qkv`` (rows of q, then k, then v: ``[(N + 2 K) H, D]``; on several shards each shard's share of
    them), ``o [D, N H]``, and by config ``q_norm``, ``k_norm``, ``sinks f32[N]`` and ``kv_scales f32[2]``, what the
    pool's keys and values are to be multiplied by.
    """

    def __init__(self, config: DecoderConfig, layer: LayerSpec, *, dtype: jnp.dtype, placement: Placement) -> None:
        q_size, kv_size, hidden = config.q_size, config.kv_size, config.hidden_size
        linear = partial(Linear, dtype=dtype, placement=placement)
        qkv, o = layer.weight_specs("qkv"), layer.weight_specs("o")
        self.qkv = linear(hidden, (q_size, kv_size, kv_size), bias=config.qkv_bias, specs=qkv)
        self.o = linear(q_size, hidden, bias=config.o_bias, specs=o, input_shards=placement.num_shards)
        q_norm = k_norm = None
        if config.qk_norm is not None:
            sizes = (config.head_dim,) * 2 if config.qk_norm == "head" else (q_size, kv_size)
            q_norm, k_norm = (
                RMSNorm(size, eps=config.norm_eps, plus_one=config.norm_plus_one, dtype=dtype) for size in sizes
            )
        self.q_norm, self.k_norm = q_norm, k_norm
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), jnp.float32)) if config.attention_sinks else None
        # Each shard has all of them: they are the layer's.
        self.kv_scales = nnx.Param(jnp.ones((2,), jnp.float32)) if config.scales_kv else None
        # Not the config itself: layers that differ only in what happens outside them share one trace.
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qk_norm, self.scale, self.softcap = config.qk_norm, config.scale, config.attention_softcap
        self.window = layer.window
        self.interleaved = layer.rope is not None and layer.rope.interleaved
        self.placement = placement

    def __call__(
        self, x: jax.Array, kv: jax.Array, rope: RopeTable | None, metadata: AttentionMetadata
    ) -> tuple[jax.Array, jax.Array]:
        """``x [T, D]``, ``kv [B, 2, K, S, H]`` → ``[T, D]`` and the pool with this step's keys and values."""
        q, k, v = self._project(x)
        if rope is not None:
            q, k = (apply_rope(part, rope, interleaved=self.interleaved) for part in (q, k))
        sinks, kv_scales = (None if param is None else param[...] for param in (self.sinks, self.kv_scales))
        attend = self._attend
        if self.placement.num_shards > 1:
            # Heads are independent, but XLA cannot see that through the kernel and would gather the whole pool.
            attend = jax.shard_map(
                attend,
                mesh=self.placement.mesh,
                in_specs=(_HEADS, _HEADS, _HEADS, _POOL, P(), P(TP_AXIS), P()),
                out_specs=(_HEADS, _POOL),
                check_vma=False,
            )
        attended, kv = attend(q, k, v, kv, metadata, sinks, kv_scales)
        return self.o(attended.reshape(x.shape[0], -1)), kv

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """→ q ``[T, N, H]``, k and v ``[T, K, H]``, normalised as the config asks."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        sizes = [count * self.head_dim for count in heads]
        q, k, v = self.qkv.split(x, sizes, self.placement.num_shards)
        if self.qk_norm == "full" and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.reshape(-1, count, self.head_dim) for part, count in zip((q, k, v), heads, strict=True))
        if self.qk_norm == "head" and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.qk_norm is not None:
            q, k = _computed_once(q, k)
        return q, k, v

    def _attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv: jax.Array,
        metadata: AttentionMetadata,
        sinks: jax.Array | None,
        kv_scales: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """q ``[T, N, H]``, k and v ``[T, K, H]`` → ``[T, N, H]`` and the pool; a shard's own heads on several."""
        kv = write_kv(kv, k, v, metadata.slot_mapping, kv_scales)
        scale, window, softcap = self.scale, self.window, self.softcap
        tables, lengths = metadata.block_tables, metadata.seq_lens
        implementation, interpret = self.placement.implementation, self.placement.interpret
        work = metadata.work_of(window)
        if metadata.decode_only:
            attended = paged_attention(
                q,
                kv,
                tables,
                lengths,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                implementation=implementation,
                interpret=interpret,
                kv_scales=kv_scales,
                work=work,
            )
        else:
            attended = ragged_paged_attention(
                q,
                kv,
                tables,
                metadata.query_start_loc,
                lengths,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                implementation=implementation,
                interpret=interpret,
                kv_scales=kv_scales,
                work=work,
            )
        return attended, kv
