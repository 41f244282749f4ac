"""Arrays that lie in a vector."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedArray:
    """An array that lies somewhere in a vector, in C order. A kernel reads it there: cutting it out first would be a
    launch of its own."""

    vector: Any
    """``[V]``, NumPy's or JAX's."""
    start: int = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, array: Any) -> "PackedArray":
        """Of an array itself, or one that is packed already."""
        return array if isinstance(array, cls) else cls(array.reshape(-1), 0, tuple(array.shape))

    def unpack(self) -> Any:
        return self.vector[self.start : self.start + math.prod(self.shape)].reshape(self.shape)
