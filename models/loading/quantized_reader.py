"""What reads the stored form of a quantised weight into the fields of ``models.quantization.weights``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from ..quantization.packing import WORD_BITS, pack
from ..quantization.spec import WeightSpec
from .errors import LoadError
from .safetensors_source import SafetensorsSource
from .source import WeightSource

FLOATS = ("F16", "BF16", "F32")
Shape = tuple[int, ...]
Columns = slice | np.ndarray
"""A range of columns, both ends said; or their numbers, in any order."""


class WeightReader(Protocol):
    """Reads one weight."""

    @property
    def file(self) -> Path: ...

    def tensor_names(self) -> Sequence[str]:
        """Of the checkpoint, that the weight is read from, or that say nothing beside them."""

    def required(self) -> Sequence[str]:
        """Those that must be there."""

    def num_bytes(self) -> int: ...

    def check(self) -> None:
        """Raises LoadError for a shape or dtype that the format does not have."""

    def rows(self, field: str, start: int, stop: int, columns: slice) -> np.ndarray:
        """Rows of a field ``[out, …]``, a range of its columns (words, groups); reads no more than belongs to them."""

    def vector(self, field: str) -> np.ndarray:
        """A field with one axis."""


@dataclass(frozen=True)
class Module:
    """One linear layer of a checkpoint."""

    source: WeightSource
    name: str
    spec: WeightSpec
    shape: tuple[int, int]
    """(out, in)."""
    group: int
    """Columns per scale on the device, a divisor of the checkpoint's."""

    @property
    def num_groups(self) -> int:
        """Of the checkpoint."""
        return 1 if self.spec.group_size is None else -(-self.shape[1] // self.spec.group_size)

    def raw(self, suffix: str) -> np.ndarray:
        return cast(SafetensorsSource, self.source).raw(f"{self.name}.{suffix}")

    def has(self, suffix: str) -> bool:
        return f"{self.name}.{suffix}" in self.source.tensors

    def fail(self, suffix: str, message: str, **sides: Any) -> LoadError:
        name = f"{self.name}.{suffix}"
        return LoadError(message, file=self.source.tensors[name].file, tensor=name, **sides)

    def check(self, suffix: str, shapes: Sequence[Shape], dtypes: Sequence[str]) -> None:
        info = self.source.tensors[f"{self.name}.{suffix}"]
        if info.shape not in shapes:
            expected = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
            raise self.fail(suffix, "shape", expected=expected, found=info.shape)
        if info.dtype not in dtypes:
            raise self.fail(suffix, "dtype", expected=" or ".join(dtypes), found=info.dtype)

    def check_groups(self, suffix: str, index: np.ndarray) -> None:
        """Raises LoadError unless the group of each column is one that there is."""
        outside = index[(index < 0) | (index >= self.num_groups)]
        if outside.size:
            expected = f"0 to {self.num_groups - 1}"
            raise self.fail(suffix, "a column's group", expected=expected, found=int(outside[0]))

    def finite(self, suffix: str, scales: np.ndarray) -> np.ndarray:
        """``scales``, which were read from a tensor. Raises LoadError for NaN and infinity; 0 fits a group of zeros."""
        sound = np.isfinite(scales)
        if not sound.all():
            raise self.fail(suffix, "a scale", expected="a finite number", found=float(scales[~sound][0]))
        return scales


class Reader:
    """What all readers share. ``main`` is the tensor of the weights themselves."""

    main = "weight"

    def __init__(self, module: Module) -> None:
        self.module, self.spec = module, module.spec
        out_size, in_size = module.shape
        self.out_size, self.in_size, self.num_groups = out_size, in_size, module.num_groups

    @property
    def file(self) -> Path:
        return self.module.source.tensors[f"{self.module.name}.{self.main}"].file

    def _suffixes(self) -> Mapping[str, bool]:
        """Tensors → whether they must be there."""
        return {self.main: True}

    def tensor_names(self) -> list[str]:
        return [f"{self.module.name}.{suffix}" for suffix in self._suffixes()]

    def required(self) -> list[str]:
        return [f"{self.module.name}.{suffix}" for suffix, must in self._suffixes().items() if must]

    def vector(self, field: str) -> np.ndarray:
        raise NotImplementedError(field)

    def num_bytes(self) -> int:
        return self.module.source.tensors[f"{self.module.name}.{self.main}"].num_bytes


class IntReader(Reader):
    """Integers with scales. Formats say where codes, scales (``scale_name`` is their tensor) and zero points are."""

    scale_name = "weight_scale"

    def codes(self, start: int, stop: int, columns: Columns) -> np.ndarray:
        """u8 ``[rows, columns]``, counted from 0."""
        raise NotImplementedError

    def scales(self, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        """``[rows, groups]``; ``groups`` are the checkpoint's numbers of those that are wanted."""
        raise NotImplementedError

    def zeros(self, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        """Integers ``[rows, groups]``, counted from 0."""
        raise NotImplementedError

    def minima(self, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        """``[rows, groups]``."""
        raise NotImplementedError

    def group_index(self) -> np.ndarray | None:
        """i32 ``[in]``: the group of each column, where the checkpoint says it."""
        return None

    @cached_property
    def _order(self) -> tuple[np.ndarray | None, np.ndarray]:
        """The order in which columns are kept (None: as they are), and each kept group's group in the checkpoint."""
        size = self.spec.group_size or self.in_size
        groups, order = np.arange(self.in_size) // size, None
        if self.spec.act_order:
            found = cast(np.ndarray, self.group_index())
            order = np.argsort(found, kind="stable")
            groups = found[order]
        kept = groups.reshape(-1, self.module.group)
        if (kept != kept[:, :1]).any():
            raise LoadError(f"{self.module.name}: g_idx has groups of other sizes than {self.module.group} columns")
        return order, kept[:, 0]

    def rows(self, field: str, start: int, stop: int, columns: slice) -> np.ndarray:
        order, groups = self._order
        if field == "packed":
            in_word = WORD_BITS // self.spec.device_bits
            wide = slice(columns.start * in_word, columns.stop * in_word)
            codes = self.codes(start, stop, wide if order is None else order[wide])
            middle = np.uint8(1 << (self.spec.bits - 1))
            signed = codes.astype(np.int8, copy=False) - middle.astype(np.int8)
            return pack(signed, self.spec.device_bits)
        if field == "scale":
            return self.module.finite(self.scale_name, self.scales(start, stop, groups[columns]))
        if field == "minimum":
            return self.module.finite(self.main, self.minima(start, stop, groups[columns]))
        zeros = self.zeros(start, stop, groups[columns]).astype(np.int16) - (1 << (self.spec.bits - 1))
        return zeros.astype(np.int8)

    def vector(self, field: str) -> np.ndarray:
        order, _ = self._order
        assert order is not None, field
        return order.astype(np.int32)


def units_of(columns: Columns, size: int) -> tuple[Columns, Columns]:
    """The units of ``size`` columns that hold ``columns``, and where in these units, one after another, those lie."""
    if isinstance(columns, slice):
        first = columns.start // size
        return slice(first, -(-columns.stop // size)), slice(columns.start - first * size, columns.stop - first * size)
    units = np.unique(columns // size)
    return units, np.searchsorted(units, columns // size) * size + columns % size


def scale_shapes(out_size: int, num_groups: int) -> list[Shape]:
    """Of scales by row; those of a whole row come in several shapes."""
    whole = [(), (1,), (1, 1), (out_size,)] if num_groups == 1 else []
    return [(out_size, num_groups), *whole]


def row_scales(stored: np.ndarray, start: int, stop: int) -> np.ndarray:
    """``[rows, groups]`` of a tensor with one of ``scale_shapes``."""
    if stored.size == 1:
        return np.broadcast_to(stored.reshape(1, 1), (stop - start, 1))
    return stored[start:stop].reshape(stop - start, -1)
