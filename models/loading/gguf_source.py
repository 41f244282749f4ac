"""Weights from a GGUF file, dequantised, under their Hugging Face names and in Hugging Face's order of rows."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from .errors import LoadError
from .gguf_file import GGUFFile, GGUFTensor
from .source import TensorInfo, copy_cast

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Read by gguf_config, or derived from its values: no parameters.
_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight")
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>[a-z_]+)\.(?P<kind>weight|bias)")


def hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; unknown names come back as they are."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer = match["layer"]
    module = (_TOP if layer is None else _LAYER).get(match["module"])
    if module is None:
        return name
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{module}.{match['kind']}"


def weight_types(file: GGUFFile) -> dict[str, str]:
    """The type of each matrix, by its module's Hugging Face name (without ``.weight``)."""
    return {
        hf_name(tensor.name).removesuffix(".weight"): tensor.type.name
        for tensor in file.tensors.values()
        if len(tensor.shape) == 2
    }


class GGUFSource:
    """A GGUF file as a ``WeightSource``.

    ``permuted_heads`` maps Hugging Face names to the number of heads whose rows llama.cpp has reordered (Llama's q
    and k: it rotates neighbouring pairs where Hugging Face rotates halves); their order is put back on reading.
    """

    def __init__(self, path: Path, permuted_heads: Mapping[str, int]) -> None:
        self._file = GGUFFile(path)
        self._permuted_heads = permuted_heads
        self._by_name: dict[str, GGUFTensor] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for tensor in self._file.tensors.values():
            if _NOT_WEIGHTS.fullmatch(tensor.name):
                continue
            name = hf_name(tensor.name)
            if name in self._by_name:
                raise LoadError(f"{tensor.name} and {self._by_name[name].name} are both {name}", file=path)
            self._by_name[name] = tensor
            self.tensors[name] = TensorInfo(name, tensor.shape, tensor.type.name, tensor.num_bytes, path)

    def check_readable(self, name: str) -> None:
        tensor, info = self._by_name[name], self.tensors[name]
        try:
            dequantize(self._file.raw(tensor)[:1], tensor.type)
        except NotImplementedError as error:
            raise LoadError(f"type {tensor.type.name} is not supported", file=info.file, tensor=name) from error

    def read_rows(self, name: str, start: int, stop: int, out: np.ndarray, columns: slice | None = None) -> None:
        tensor, info = self._by_name[name], self.tensors[name]
        raw = self._file.raw(tensor)
        heads = self._permuted_heads.get(name, 0)
        if len(tensor.shape) == 1:
            values = dequantize(raw, tensor.type).reshape(-1)
            copy_cast((values[_original_rows(len(values), heads)] if heads else values)[start:stop], out, info)
            return
        # Blocks run along a row, so rows can be put in order before they are dequantised, and all as one long row:
        # gguf goes through its argument 16 rows at a time, which is slow for short ones.
        rows = raw[_original_rows(len(raw), heads)[start:stop]] if heads else raw[start:stop]
        if columns is None:
            copy_cast(dequantize(rows.reshape(1, -1), tensor.type).reshape(out.shape), out, info)
            return
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        first = columns.start // block
        blocks = rows[:, first * block_bytes : -(-columns.stop // block) * block_bytes]
        table = dequantize(blocks.reshape(1, -1), tensor.type).reshape(len(out), -1)
        copy_cast(table[:, columns.start - first * block : columns.stop - first * block], out, info)

    def raw_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """u8 ``[stop - start, bytes of a row]`` of a matrix as stored, rows in Hugging Face's order."""
        raw, heads = self._file.raw(self._by_name[name]), self._permuted_heads.get(name, 0)
        return raw[_original_rows(len(raw), heads)[start:stop]] if heads else raw[start:stop]

    def close(self) -> None:
        self._file.close()


def _original_rows(num_rows: int, num_heads: int) -> np.ndarray:
    """For each row in Hugging Face's order, its place in the file. Raises ValueError if the heads do not divide."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
