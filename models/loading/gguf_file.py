"""The layout of a GGUF file: metadata, tensor table, and the bytes of each tensor.

Follows the format description of the ggml project (docs/gguf.md), versions 2 and 3, little endian. The tensor types
and their block sizes come from the ``gguf`` package; its own reader makes an array object of every vocabulary entry
and takes seconds where this takes a tenth.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from .errors import LoadError

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
# GGUF value type -> struct format.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]
    """Outermost first, as NumPy and checkpoints have it (the file stores it innermost first)."""
    type: GGMLQuantizationType
    offset: int
    """From the start of the file, bytes."""
    num_bytes: int


class _Cursor:
    """Reads forward through the header and never beyond the file."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer, self.path, self.position, self.size = buffer, path, 0, len(buffer)

    def take(self, num_bytes: int) -> int:
        start, self.position = self.position, self.position + num_bytes
        if self.position > self.size:
            raise LoadError(f"the file ends within its header ({self.size} bytes)", file=self.path)
        return start

    def scalar(self, fmt: str) -> Any:
        return struct.unpack_from(fmt, self.buffer, self.take(struct.calcsize(fmt)))[0]

    def string(self) -> str:
        length = self.scalar("<Q")
        start = self.take(length)
        # llama.cpp's vocabularies may hold pieces that are not whole characters.
        return self.buffer[start : start + length].decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        """The loop of a vocabulary of 100,000 entries: kept flat."""
        if count > (self.size - self.position) // 8:
            raise LoadError(f"an array of {count} strings is longer than the file", file=self.path)
        buffer, position, size, unpack = self.buffer, self.position, self.size, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            if position + 8 > size:
                raise LoadError("the file ends within an array of strings", file=self.path)
            start = position + 8
            position = start + unpack(buffer, position)[0]
            if position > size:
                raise LoadError("the file ends within an array of strings", file=self.path)
            found.append(buffer[start:position].decode("utf-8", errors="replace"))
        self.position = position
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("<I"), self.scalar("<Q")
            if item == _STRING:
                return self.strings(count)
            fmt = _SCALARS.get(item)
            if fmt is None:
                raise LoadError(f"unknown GGUF array item type {item}", file=self.path)
            start = self.take(count * struct.calcsize(fmt))
            return np.frombuffer(self.buffer, dtype=np.dtype(fmt), count=count, offset=start).tolist()
        fmt = _SCALARS.get(kind)
        if fmt is None:
            raise LoadError(f"unknown GGUF value type {kind}", file=self.path)
        return self.scalar(fmt)


class GGUFFile:
    """An open GGUF file whose table has been checked against the file's size.

    ``metadata`` maps keys to Python values (float32 values as the shortest decimal that gives them again);
    ``tensors`` maps GGUF names to ``GGUFTensor``. Raises LoadError for anything that is not a whole, single,
    little-endian GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise LoadError(f"cannot read the file: {error}", file=path) from error
        cursor = _Cursor(self._buffer, path)
        num_tensors, num_keys = self._read_preamble(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key, kind = cursor.string(), cursor.scalar("<I")
            if key in self.metadata:
                raise LoadError(f"metadata key {key!r} is there twice", file=path)
            value = cursor.value(kind)
            self.metadata[key] = _shortest(value) if kind == 6 else value
        if self.metadata.get("split.count", 0) > 1:
            raise LoadError(
                "one part of a split GGUF; join the parts first with llama.cpp's `llama-gguf-split --merge`", file=path
            )
        self.tensors = self._read_table(cursor, num_tensors)

    def _read_preamble(self, cursor: _Cursor) -> tuple[int, int]:
        start = cursor.take(4)
        magic = self._buffer[start : start + 4]
        if magic != _MAGIC:
            raise LoadError("not a GGUF file", file=self.path, expected=_MAGIC, found=magic)
        version = cursor.scalar("<I")
        if version not in (2, 3):
            reason = "big-endian GGUF files are not read" if version & 0xFFFF == 0 else "unknown GGUF version"
            raise LoadError(reason, file=self.path, expected="2 or 3", found=version)
        return cursor.scalar("<Q"), cursor.scalar("<Q")

    def _read_table(self, cursor: _Cursor, count: int) -> dict[str, GGUFTensor]:
        rows = []
        for _ in range(count):
            name, num_dims = cursor.string(), cursor.scalar("<I")
            if num_dims > _MAX_DIMS:
                raise LoadError("too many dimensions", file=self.path, tensor=name, expected="<= 4", found=num_dims)
            shape = tuple(reversed([cursor.scalar("<Q") for _ in range(num_dims)]))
            rows.append((name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise LoadError("general.alignment must be a positive integer", file=self.path, found=alignment)
        data_start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in rows:
            if name in tensors:
                raise LoadError("the tensor is there twice", file=self.path, tensor=name)
            tensors[name] = self._checked(name, shape, kind, data_start + offset)
        return tensors

    def _checked(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        try:
            tensor_type = GGMLQuantizationType(kind)
        except ValueError as error:
            raise LoadError(f"unknown tensor type {kind}", file=self.path, tensor=name) from error
        block, block_bytes = GGML_QUANT_SIZES[tensor_type]
        if not shape or shape[-1] % block:
            raise LoadError(
                f"{tensor_type.name} needs rows of a multiple of {block}", file=self.path, tensor=name, found=shape
            )
        num_bytes = prod(shape) // block * block_bytes
        if offset + num_bytes > len(self._buffer):
            raise LoadError(
                "the file is cut short",
                file=self.path,
                tensor=name,
                expected=f"{offset + num_bytes} bytes or more",
                found=f"{len(self._buffer)} bytes",
            )
        return GGUFTensor(name, shape, tensor_type, offset, num_bytes)

    def raw(self, tensor: GGUFTensor) -> np.ndarray:
        """uint8[rows, bytes of a row], not copied; a vector is one row. Valid until ``close``."""
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        flat = np.frombuffer(self._buffer, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return flat.reshape(-1, tensor.shape[-1] // block * block_bytes)

    def close(self) -> None:
        try:
            self._buffer.close()
        except BufferError:
            # An array over the mapping is still alive somewhere; the mapping goes when that goes.
            return


def _shortest(value: float) -> float:
    """1e-05 stored as float32 reads back as 9.99999974e-06; the short form is what the model's config said."""
    return float(str(np.float32(value)))
