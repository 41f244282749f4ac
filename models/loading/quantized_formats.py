"""Stored forms of quantised integers. Layouts: AutoAWQ's GEMM version, AutoGPTQ (checkpoint formats gptq and gptq_v2),
compressed-tensors, and ggml's blocks. Codes and zero points are counted from 0 here.
"""

from collections.abc import Mapping
from typing import cast

import numpy as np

from ..quantization.packing import WORD_BITS, unpack, unpack_awq
from .gguf_source import GGUFSource
from .quantized_reader import FLOATS, Columns, IntReader, row_scales, scale_shapes, units_of

RUN = 32
"""Codes that fill whole words, whatever their bits."""


def _words(start: int, stop: int, bits: int) -> tuple[slice, slice]:
    """The words along packed rows that hold [start, stop), and where in them it lies; in whole runs."""
    first, last = start // RUN, -(-stop // RUN)
    return slice(first * bits, last * bits), slice(start - first * RUN, stop - first * RUN)


class AwqReader(IntReader):
    main = "qweight"
    scale_name = "scales"

    def _suffixes(self) -> Mapping[str, bool]:
        return {"qweight": True, "qzeros": True, "scales": True}

    def check(self) -> None:
        if self.out_size % 8:
            raise self.module.fail("qweight", f"{self.out_size} output rows; AWQ packs them by 8")
        self.module.check("qweight", [(self.in_size, self.out_size // 8)], ["I32"])
        self.module.check("qzeros", [(self.num_groups, self.out_size // 8)], ["I32"])
        self.module.check("scales", [(self.num_groups, self.out_size)], FLOATS)

    def _unpacked(self, suffix: str, start: int, stop: int, which: Columns) -> np.ndarray:
        words, inside = _words(start, stop, 4)
        return unpack_awq(self.module.raw(suffix)[which, words])[:, inside].T

    def codes(self, start: int, stop: int, columns: Columns) -> np.ndarray:
        return self._unpacked("qweight", start, stop, columns)

    def zeros(self, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        return self._unpacked("qzeros", start, stop, groups)

    def scales(self, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        return self.module.raw("scales")[groups, start:stop].T


class GptqReader(IntReader):
    main = "qweight"
    scale_name = "scales"

    def _suffixes(self) -> Mapping[str, bool]:
        return {"qweight": True, "qzeros": True, "scales": True, "g_idx": self.spec.act_order}

    def check(self) -> None:
        bits, groups = self.spec.bits, self.num_groups
        if self.in_size % 32 or self.out_size * bits % 32:
            sizes = f"{self.in_size} to {self.out_size}"
            raise self.module.fail("qweight", f"{sizes} columns; GPTQ of {bits} bits fills whole words only")
        self.module.check("qweight", [(self.in_size * bits // 32, self.out_size)], ["I32"])
        self.module.check("qzeros", [(groups, self.out_size * bits // 32)], ["I32"])
        self.module.check("scales", [(groups, self.out_size)], FLOATS)
        if not self.module.has("g_idx"):
            return
        self.module.check("g_idx", [(self.in_size,)], ["I32"])
        index = self.module.raw("g_idx")
        self.module.check_groups("g_idx", index)
        in_order = np.arange(self.in_size) // (self.spec.group_size or self.in_size)
        if not self.spec.act_order and (index != in_order).any():
            raise self.module.fail("g_idx", "columns are out of order, but desc_act is false")

    def codes(self, start: int, stop: int, columns: Columns) -> np.ndarray:
        runs, inside = units_of(columns, RUN)
        words = self.module.raw("qweight").reshape(-1, self.spec.bits, self.out_size)[runs, :, start:stop]
        return unpack(words.reshape(-1, stop - start).T, self.spec.bits)[:, inside]

    def scales(self, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        if not self.spec.has_zero:
            self._check_symmetric(start, stop, groups)
        return self.module.raw("scales")[groups, start:stop].T

    def _stored_zeros(self, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        words, inside = _words(start, stop, self.spec.bits)
        return unpack(self.module.raw("qzeros")[groups, words], self.spec.bits)[:, inside].T

    def _check_symmetric(self, start: int, stop: int, groups: np.ndarray) -> None:
        middle = 1 << (self.spec.bits - 1)
        expected = middle if self.spec.format == "gptq_v2" else middle - 1
        stored = self._stored_zeros(start, stop, groups)
        if (stored != expected).any():
            found = int(stored[stored != expected][0])
            raise self.module.fail(
                "qzeros",
                f"symmetric, with checkpoint_format {self.spec.format}: zero points (if the file is of the other "
                "format, say so by hf_overrides of quantization_config.checkpoint_format)",
                expected=expected,
                found=found,
            )

    def zeros(self, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        stored = self._stored_zeros(start, stop, groups)
        if self.spec.format == "gptq_v2":
            return stored
        if (stored == (1 << self.spec.bits) - 1).any():
            raise self.module.fail(
                "qzeros",
                f"a zero point is stored as {(1 << self.spec.bits) - 1}, which in checkpoint_format gptq some programs "
                f"read as {1 << self.spec.bits} and others as 0; use a checkpoint in format gptq_v2",
            )
        return stored + np.uint8(1)

    def group_index(self) -> np.ndarray:
        return self.module.raw("g_idx")


class PackQuantizedReader(IntReader):
    main = "weight_packed"

    def _suffixes(self) -> Mapping[str, bool]:
        zero = {"weight_zero_point": True} if self.spec.has_zero else {}
        index = {"weight_g_idx": True} if self.spec.act_order else {}
        return {"weight_packed": True, "weight_scale": True, "weight_shape": False, **zero, **index}

    def check(self) -> None:
        bits, groups = self.spec.bits, self.num_groups
        if self.in_size * bits % 32:
            raise self.module.fail("weight_packed", f"{self.in_size} columns of {bits} bits do not fill whole words")
        self.module.check("weight_packed", [(self.out_size, self.in_size * bits // 32)], ["I32"])
        self.module.check("weight_scale", scale_shapes(self.out_size, groups), FLOATS)
        if self.module.has("weight_shape"):
            self.module.check("weight_shape", [(2,)], ["I64", "I32"])
            if (found := tuple(self.module.raw("weight_shape").tolist())) != self.module.shape:
                raise self.module.fail("weight_shape", "shape", expected=self.module.shape, found=found)
        if self.spec.has_zero:
            self.module.check("weight_zero_point", [(-(-self.out_size * bits // 32), groups)], ["I32"])
        if self.spec.act_order:
            self.module.check("weight_g_idx", [(self.in_size,)], ["I32"])
            self.module.check_groups("weight_g_idx", self.group_index())

    def codes(self, start: int, stop: int, columns: Columns) -> np.ndarray:
        words, inside = units_of(columns, WORD_BITS // self.spec.bits)
        return unpack(self.module.raw("weight_packed")[start:stop, words], self.spec.bits)[:, inside]

    def scales(self, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        return row_scales(self.module.raw("weight_scale"), start, stop)[:, groups]

    def zeros(self, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        words, inside = units_of(slice(start, stop), WORD_BITS // self.spec.bits)
        return unpack(self.module.raw("weight_zero_point")[words, groups].T, self.spec.bits)[:, inside].T

    def group_index(self) -> np.ndarray:
        index = self.module.raw("weight_g_idx")
        # The library's sign for "not set": the columns are in order.
        return np.arange(self.in_size) // (self.spec.group_size or self.in_size) if (index == -1).all() else index


class IntQuantizedReader(IntReader):
    def _suffixes(self) -> Mapping[str, bool]:
        zero = {"weight_zero_point": True} if self.spec.has_zero else {}
        # Of activations, which stay as they are.
        return {"weight": True, "weight_scale": True, **zero, "input_scale": False, "input_zero_point": False}

    def check(self) -> None:
        shapes = scale_shapes(self.out_size, self.num_groups)
        self.module.check("weight", [self.module.shape], ["I8"])
        self.module.check("weight_scale", shapes, FLOATS)
        if self.spec.has_zero:
            self.module.check("weight_zero_point", shapes, ["I8"])

    def codes(self, start: int, stop: int, columns: Columns) -> np.ndarray:
        return self.module.raw("weight")[start:stop, columns].view(np.uint8) ^ np.uint8(0x80)

    def scales(self, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        return row_scales(self.module.raw("weight_scale"), start, stop)[:, groups]

    def zeros(self, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        return row_scales(self.module.raw("weight_zero_point"), start, stop)[:, groups].astype(np.int16) + 128


class GgufReader(IntReader):
    """ggml's blocks of 32: a float16 scale, in Q4_1 a float16 minimum, then the codes."""

    scale_name = "weight"

    def check(self) -> None:
        info = self.module.source.tensors[f"{self.module.name}.weight"]
        if info.shape != self.module.shape:
            raise self.module.fail("weight", "shape", expected=self.module.shape, found=info.shape)

    def _blocks(self, start: int, stop: int) -> np.ndarray:
        """u8 ``[rows, blocks, bytes]``."""
        rows = cast(GGUFSource, self.module.source).raw_rows(f"{self.module.name}.weight", start, stop)
        return rows.reshape(stop - start, self.in_size // 32, -1)

    def _floats(self, place: int, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        halves = self._blocks(start, stop)[:, groups, 2 * place : 2 * place + 2]
        return np.ascontiguousarray(halves).view("<f2")[..., 0]

    def codes(self, start: int, stop: int, columns: Columns) -> np.ndarray:
        which, inside = units_of(columns, 32)
        blocks = self._blocks(start, stop)[:, which]
        if self.spec.bits == 8:
            return (blocks[..., 2:] ^ np.uint8(0x80)).reshape(stop - start, -1)[:, inside]
        # The first 16 codes are in the lower halves of the bytes, the others in the upper.
        stored = blocks[..., 4 if self.spec.has_minimum else 2 :]
        return np.concatenate([stored & 15, stored >> 4], axis=-1).reshape(stop - start, -1)[:, inside]

    def scales(self, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        return self._floats(0, start, stop, groups)

    def minima(self, start: int, stop: int, groups: np.ndarray) -> np.ndarray:
        return self._floats(1, start, stop, groups)
