"""What every kind of checkpoint offers the loader."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from .errors import LoadError


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, known from the headers alone."""

    name: str
    """The Hugging Face name, also for GGUF."""
    shape: tuple[int, ...]
    dtype: str
    """As the file calls it: BF16, F32, Q4_1, …"""
    num_bytes: int
    """In the file."""
    file: Path
    offset: int = 0
    """Of its first byte in the file; safetensors only."""


class WeightSource(Protocol):
    """A checkpoint whose headers have been checked against its files. Reading may happen from several threads."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def check_readable(self, name: str) -> None:
        """Raises LoadError if the tensor's dtype cannot be turned into floats."""

    def read_rows(self, name: str, start: int, stop: int, out: np.ndarray, columns: slice | None = None) -> None:
        """Fills ``out`` (shape ``[stop - start, …]``, a float dtype) with rows of a tensor, or with some ``columns`` of
        them; reads no others. Raises LoadError."""

    def close(self) -> None: ...


def copy_cast(values: np.ndarray, out: np.ndarray, info: TensorInfo) -> None:
    """Copies with a cast to ``out.dtype``. A value that float16 cannot hold raises LoadError, never becomes inf."""
    with np.errstate(over="ignore"):
        np.copyto(out, values, casting="unsafe")
    if out.dtype == np.float16 and not np.isfinite(out).all():
        raise LoadError(
            "a weight is beyond the range of float16; use bfloat16 or float32", file=info.file, tensor=info.name
        )
