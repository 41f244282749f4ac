"""Stored float8, and plain weights that are quantised while they are read; and the reader of each format.

FP8 as in transformers (per tensor, or in blocks), FBGEMM (per row) and compressed-tensors.
"""

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from ..quantization.packing import WORD_BITS, pack
from ..quantization.spec import Format
from .quantized_formats import AwqReader, GgufReader, GptqReader, IntQuantizedReader, PackQuantizedReader
from .quantized_reader import FLOATS, Module, Reader, WeightReader, row_scales, scale_shapes, units_of

FLOAT8_MAX = 448.0
_LEAST_SCALE = 2.0**-100


class Float8Reader(Reader):
    def _suffixes(self) -> Mapping[str, bool]:
        static = {"input_scale": True} if self.spec.activations == "static" else {}
        return {"weight": True, self.spec.scale_name: True, **static}

    def check(self) -> None:
        self.module.check("weight", [self.module.shape], ["F8_E4M3"])
        shapes = scale_shapes(self.out_size, self.num_groups)
        if self.spec.block_rows is not None:
            shapes = [(-(-self.out_size // self.spec.block_rows), self.num_groups)]
        self.module.check(self.spec.scale_name, shapes, (*FLOATS, "F8_E8M0"))
        if self.spec.activations == "static":
            self.module.check("input_scale", [(), (1,)], FLOATS)

    def rows(self, field: str, start: int, stop: int, columns: slice) -> np.ndarray:
        if field == "weight":
            return self.module.raw("weight")[start:stop, columns]
        stored = self.module.raw(self.spec.scale_name)
        groups = np.arange(0, self.in_size, self.module.group)[columns] // (self.spec.group_size or self.in_size)
        if self.spec.block_rows is None:
            found = row_scales(stored, start, stop)[:, groups]
        else:
            found = stored[np.arange(start, stop)[:, None] // self.spec.block_rows, groups]
        return self.module.finite(self.spec.scale_name, found.astype(np.float32))

    def vector(self, field: str) -> np.ndarray:
        scale = self.module.raw("input_scale").astype(np.float32).reshape(1)
        if not (np.isfinite(scale[0]) and scale[0] > 0):
            raise self.module.fail("input_scale", "a scale", expected="a positive number", found=float(scale[0]))
        return scale


class OnlineReader(Reader):
    """Plain weights. Float8 and 8 bits are symmetric, 4 bits have zero points; scales have bfloat16's precision, so
    that codes fit the scales that will be multiplied by. Groups are as on one device, whichever share is read: of one
    that is cut the whole is read, so that its scale is the same everywhere."""

    def check(self) -> None:
        self.module.source.check_readable(f"{self.module.name}.weight")
        info = self.module.source.tensors[f"{self.module.name}.weight"]
        if info.shape != self.module.shape:
            raise self.module.fail("weight", "shape", expected=self.module.shape, found=info.shape)

    def rows(self, field: str, start: int, stop: int, columns: slice) -> np.ndarray:
        is_codes = field in ("packed", "weight")
        wide = self.module.group if not is_codes else WORD_BITS // self.spec.bits if field == "packed" else 1
        size = self.spec.group_on_device(self.in_size)
        whole, _ = units_of(slice(columns.start * wide, columns.stop * wide), size)
        assert isinstance(whole, slice)
        read = slice(whole.start * size, whole.stop * size)
        plain = np.empty((stop - start, read.stop - read.start), np.float32)
        everything = plain.shape[1] == self.in_size
        self.module.source.read_rows(f"{self.module.name}.weight", start, stop, plain, None if everything else read)
        found = self._quantized(field, plain.reshape(stop - start, -1, size))
        if not is_codes:
            found = np.repeat(found, size // self.module.group, axis=1)
        return found[:, columns.start - read.start // wide : columns.stop - read.start // wide]

    def _quantized(self, field: str, groups: np.ndarray) -> np.ndarray:
        """A field of f32 ``[rows, groups, n]``."""
        if self.spec.kind == "float8":
            scales = np.maximum(np.abs(groups).max(-1) / FLOAT8_MAX, _LEAST_SCALE)
            if field == "scale":
                return scales
            scaled = np.clip(groups / scales[..., None], -FLOAT8_MAX, FLOAT8_MAX)
            return scaled.astype(ml_dtypes.float8_e4m3fn).reshape(len(groups), -1)
        scales, zeros, codes = _integers(groups, self.spec.bits, self.spec.has_zero)
        if field == "packed":
            return pack(codes.reshape(len(groups), -1), self.spec.bits)
        return scales if field == "scale" else zeros


def _integers(groups: np.ndarray, bits: int, has_zero: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """f32 ``[rows, groups, n]`` → scales f32 and zero points i8 ``[rows, groups]``, codes i8 ``[rows, groups, n]``."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    least, most = np.minimum(groups.min(-1), 0.0), np.maximum(groups.max(-1), 0.0)
    span = (most - least) / (high - low) if has_zero else np.maximum(most, -least) / high
    scales = np.maximum(span, _LEAST_SCALE).astype(ml_dtypes.bfloat16).astype(np.float32)
    zeros = np.clip(np.rint(low - least / scales), low, high) if has_zero else np.zeros_like(scales)
    codes = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], low, high)
    return scales, zeros.astype(np.int8), codes.astype(np.int8)


FORMATS: Mapping[Format, Callable[[Module], WeightReader]] = {
    "awq": AwqReader,
    "gptq": GptqReader,
    "gptq_v2": GptqReader,
    "pack-quantized": PackQuantizedReader,
    "int-quantized": IntQuantizedReader,
    "fp8": Float8Reader,
    "gguf": GgufReader,
    "online": OnlineReader,
}
