"""Stored forms of quantised integers. Layouts: AutoAWQ's GEMM version, AutoGPTQ (checkpoint formats gptq and gptq_v2),
compressed-tensors, and ggml's blocks. Codes and zero points are counted from 0 here.
"""

from collections.abc import Mapping
from typing import cast

import numpy as np

from ..quantization.packing import unpack, unpack_awq
from .gguf_source import GGUFSource
from .quantized_reader import FLOATS, IntReader, row_scales, scale_shapes


def _words(start: int, stop: int, bits: int) -> tuple[slice, slice]:
    """The words along packed columns that hold [start, stop), and where in them it lies; in whole runs of 32 codes."""
    first, last = start // 32, -(-stop // 32)
    return slice(first * bits, last * bits), slice(start - first * 32, stop - first * 32)


class AwqReader(IntReader):
    main = "qweight"

    def _suffixes(self) -> Mapping[str, bool]:
        return {"qweight": True, "qzeros": True, "scales": True}

    def check(self) -> None:
        if self.out_size % 8:
            raise self.module.fail("qweight", f"{self.out_size} output rows; AWQ packs them by 8")
        self.module.check("qweight", [(self.in_size, self.out_size // 8)], ["I32"])
        self.module.check("qzeros", [(self.num_groups, self.out_size // 8)], ["I32"])
        self.module.check("scales", [(self.num_groups, self.out_size)], FLOATS)

    def _unpacked(self, suffix: str, start: int, stop: int) -> np.ndarray:
        words, inside = _words(start, stop, 4)
        return unpack_awq(self.module.raw(suffix)[:, words])[:, inside].T

    def codes(self, start: int, stop: int) -> np.ndarray:
        return self._unpacked("qweight", start, stop)

    def zeros(self, start: int, stop: int) -> np.ndarray:
        return self._unpacked("qzeros", start, stop)

    def scales(self, start: int, stop: int) -> np.ndarray:
        return self.module.raw("scales")[:, start:stop].T


class GptqReader(IntReader):
    main = "qweight"

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
        if index.min() < 0 or index.max() >= groups:
            raise self.module.fail("g_idx", "a column's group", expected=f"0 to {groups - 1}", found=int(index.max()))
        in_order = np.arange(self.in_size) // (self.spec.group_size or self.in_size)
        if not self.spec.act_order and (index != in_order).any():
            raise self.module.fail("g_idx", "columns are out of order, but desc_act is false")

    def codes(self, start: int, stop: int) -> np.ndarray:
        return unpack(self.module.raw("qweight")[:, start:stop].T, self.spec.bits)

    def scales(self, start: int, stop: int) -> np.ndarray:
        if not self.spec.has_zero:
            self._check_symmetric(start, stop)
        return self.module.raw("scales")[:, start:stop].T

    def _stored_zeros(self, start: int, stop: int) -> np.ndarray:
        words, inside = _words(start, stop, self.spec.bits)
        return unpack(self.module.raw("qzeros")[:, words], self.spec.bits)[:, inside].T

    def _check_symmetric(self, start: int, stop: int) -> None:
        middle = 1 << (self.spec.bits - 1)
        expected = middle if self.spec.format == "gptq_v2" else middle - 1
        stored = self._stored_zeros(start, stop)
        if (stored != expected).any():
            found = int(stored[stored != expected][0])
            raise self.module.fail(
                "qzeros",
                f"symmetric, with checkpoint_format {self.spec.format}: zero points (if the file is of the other "
                "format, say so by hf_overrides of quantization_config.checkpoint_format)",
                expected=expected,
                found=found,
            )

    def zeros(self, start: int, stop: int) -> np.ndarray:
        stored = self._stored_zeros(start, stop)
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

    def codes(self, start: int, stop: int) -> np.ndarray:
        return unpack(self.module.raw("weight_packed")[start:stop], self.spec.bits)

    def scales(self, start: int, stop: int) -> np.ndarray:
        return row_scales(self.module.raw("weight_scale"), start, stop)

    def zeros(self, start: int, stop: int) -> np.ndarray:
        return unpack(self.module.raw("weight_zero_point").T, self.spec.bits).T[start:stop]

    def group_index(self) -> np.ndarray:
        return self.module.raw("weight_g_idx")


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

    def codes(self, start: int, stop: int) -> np.ndarray:
        return self.module.raw("weight")[start:stop].view(np.uint8) ^ np.uint8(0x80)

    def scales(self, start: int, stop: int) -> np.ndarray:
        return row_scales(self.module.raw("weight_scale"), start, stop)

    def zeros(self, start: int, stop: int) -> np.ndarray:
        return row_scales(self.module.raw("weight_zero_point"), start, stop).astype(np.int16) + 128


class GgufReader(IntReader):
    """ggml's blocks of 32: a float16 scale, in Q4_1 a float16 minimum, then the codes."""

    def check(self) -> None:
        info = self.module.source.tensors[f"{self.module.name}.weight"]
        if info.shape != self.module.shape:
            raise self.module.fail("weight", "shape", expected=self.module.shape, found=info.shape)

    def _blocks(self, start: int, stop: int) -> np.ndarray:
        """u8 ``[rows, blocks, bytes]``."""
        rows = cast(GGUFSource, self.module.source).raw_rows(f"{self.module.name}.weight", start, stop)
        return rows.reshape(stop - start, self.in_size // 32, -1)

    def _floats(self, place: int, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(self._blocks(start, stop)[..., 2 * place : 2 * place + 2]).view("<f2")[..., 0]

    def codes(self, start: int, stop: int) -> np.ndarray:
        blocks = self._blocks(start, stop)
        if self.spec.bits == 8:
            return (blocks[..., 2:] ^ np.uint8(0x80)).reshape(stop - start, -1)
        # The first 16 codes are in the lower halves of the bytes, the others in the upper.
        stored = blocks[..., 4 if self.spec.has_minimum else 2 :]
        return np.concatenate([stored & 15, stored >> 4], axis=-1).reshape(stop - start, -1)

    def scales(self, start: int, stop: int) -> np.ndarray:
        return self._floats(0, start, stop)

    def minima(self, start: int, stop: int) -> np.ndarray:
        return self._floats(1, start, stop)
