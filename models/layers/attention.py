"""Self-attention over the paged KV pool."""

import jax
import jax.numpy as jnp
from flax import nnx

from ...pallas_kernels.dispatch import Implementation
from ...pallas_kernels.paged_attention import paged_attention
from ...pallas_kernels.ragged_paged_attention import ragged_paged_attention
from ..attention_metadata import AttentionMetadata
from ..decoder_config import DecoderConfig, LayerSpec
from ..kv_cache import write_kv
from .linear import Linear
from .norm import RMSNorm
from .rope import RopeTable, apply_rope


class Attention(nnx.Module):
    """q, k, v → norm → rope → write to the pool → attend → o.

    Parameters: ``qkv`` (rows of q, then k, then v: ``[(N + 2 K) H, D]``), ``o [D, N H]``, and by config
    ``q_norm``, ``k_norm`` and ``sinks f32[N]``.
    """

    def __init__(
        self, config: DecoderConfig, layer: LayerSpec, *, dtype: jnp.dtype, implementation: Implementation
    ) -> None:
        q_size, kv_size, hidden = config.q_size, config.kv_size, config.hidden_size
        self.qkv = Linear(hidden, q_size + 2 * kv_size, bias=config.qkv_bias, dtype=dtype)
        self.o = Linear(q_size, hidden, bias=config.o_bias, dtype=dtype)
        q_norm = k_norm = None
        if config.qk_norm is not None:
            sizes = (config.head_dim,) * 2 if config.qk_norm == "head" else (q_size, kv_size)
            q_norm, k_norm = (
                RMSNorm(size, eps=config.norm_eps, plus_one=config.norm_plus_one, dtype=dtype) for size in sizes
            )
        self.q_norm, self.k_norm = q_norm, k_norm
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), jnp.float32)) if config.attention_sinks else None
        self.config = config
        self.window = layer.window
        self.implementation: Implementation = implementation

    def __call__(
        self, x: jax.Array, kv: jax.Array, rope: RopeTable | None, metadata: AttentionMetadata
    ) -> tuple[jax.Array, jax.Array]:
        """``x [T, D]``, ``kv [B, 2, K, S, H]`` → ``[T, D]`` and the pool with this step's keys and values."""
        q, k, v = self._project(x)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        kv = write_kv(kv, k, v, metadata.slot_mapping)
        attended = self._attend(q, kv, metadata)
        return self.o(attended.reshape(x.shape[0], self.config.q_size)), kv

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """→ q ``[T, N, H]``, k and v ``[T, K, H]``, normalised as the config asks."""
        config, tokens = self.config, x.shape[0]
        q, k, v = jnp.split(self.qkv(x), [config.q_size, config.q_size + config.kv_size], axis=-1)
        if config.qk_norm == "full" and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.reshape(tokens, config.num_heads, config.head_dim)
        k, v = (part.reshape(tokens, config.num_kv_heads, config.head_dim) for part in (k, v))
        if config.qk_norm == "head" and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _attend(self, q: jax.Array, kv: jax.Array, metadata: AttentionMetadata) -> jax.Array:
        """``[T, N, H]`` → ``[T, N, H]``."""
        scale, window, softcap = self.config.scale, self.window, self.config.attention_softcap
        sinks = None if self.sinks is None else self.sinks[...]
        tables, lengths = metadata.block_tables, metadata.seq_lens
        if metadata.decode_only:
            return paged_attention(
                q,
                kv,
                tables,
                lengths,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                implementation=self.implementation,
            )
        return ragged_paged_attention(
            q,
            kv,
            tables,
            metadata.query_start_loc,
            lengths,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            implementation=self.implementation,
        )
