"""Token ids to vectors and, for the chosen rows only, vectors to logits."""

import jax
import jax.numpy as jnp
from flax import nnx

from .linear import matmul


class Embedding(nnx.Module):
    """A table of the vocabulary. Parameter: ``weight [V, D]``; used at the input, at the output, or (tied) at both."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((vocab_size, hidden_size), dtype))

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """i32 ``[T]`` → ``[T, D]``. Ids outside the vocabulary clamp; the engine refuses them earlier."""
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """``[R, D]`` → f32 ``[R, V]``."""
        return matmul(hidden, self.weight[...], out_dtype=jnp.dtype(jnp.float32))
