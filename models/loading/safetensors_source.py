"""Weights from a folder of safetensors files. The index, if there is one, decides which file holds what."""

import json
import mmap
import struct
import threading
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from .errors import LoadError, name_list
from .source import TensorInfo, copy_cast

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000
_DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_RAW_TYPES: dict[str, Any] = {
    "I8": np.int8,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
_READABLE = ("BF16", "F16", "F32", "F64")
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class SafetensorsSource:
    """A folder of safetensors files as a ``WeightSource``; every header is checked when it is made.

    At most two files are open at a time, so that the pages of files already read can leave memory.
    """

    _MAX_OPEN = 2

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._open_files: dict[Path, Any] = {}
        self._lock = threading.Lock()
        weight_map = _weight_map(folder)
        files = checkpoint_files(folder)
        for file in files:
            for info in read_header(file):
                if info.name in self.tensors:
                    raise LoadError(
                        "the tensor is in two files", file=self.tensors[info.name].file, tensor=info.name, found=file
                    )
                self.tensors[info.name] = info
        if weight_map is not None:
            self._check_index(folder / INDEX_NAME, weight_map)

    def _check_index(self, index: Path, weight_map: dict[str, str]) -> None:
        if missing := weight_map.keys() - self.tensors.keys():
            raise LoadError(f"names tensors that its files do not hold: {name_list(missing)}", file=index)
        if extra := self.tensors.keys() - weight_map.keys():
            raise LoadError(f"does not name tensors that its files hold: {name_list(extra)}", file=index)
        for name, file_name in weight_map.items():
            found = self.tensors[name].file.name
            if found != file_name:
                raise LoadError("is in another file", file=index, tensor=name, expected=file_name, found=found)

    def check_readable(self, name: str) -> None:
        info = self.tensors[name]
        if info.dtype not in _READABLE:
            expected = " or ".join(_READABLE)
            raise LoadError("dtype", file=info.file, tensor=name, expected=expected, found=info.dtype)

    def read_rows(self, name: str, start: int, stop: int, out: np.ndarray, columns: slice | None = None) -> None:
        info = self.tensors[name]
        try:
            with self._lock:
                handle = self._handle(info.file)
                # A single number has no rows.
                found = handle.get_slice(name) if info.shape else handle.get_tensor(name).reshape(1)
                rows = found[start:stop] if columns is None else found[start:stop, columns]
        except (SafetensorError, OSError) as error:
            raise LoadError(f"cannot be read: {error}", file=info.file, tensor=name) from error
        copy_cast(rows, out, info)

    def _handle(self, file: Path) -> Any:
        handle = self._open_files.pop(file, None)
        if handle is None:
            while len(self._open_files) >= self._MAX_OPEN:
                self._open_files.pop(next(iter(self._open_files)))
            handle = safe_open(str(file), framework="numpy")
        self._open_files[file] = handle  # the most recently used is last
        return handle

    def raw(self, name: str) -> np.ndarray:
        """A tensor as it is stored, not copied. Raises LoadError for a dtype that NumPy has no type for."""
        info = self.tensors[name]
        if info.dtype not in _RAW_TYPES:
            raise LoadError("dtype", file=info.file, tensor=name, expected=" or ".join(_RAW_TYPES), found=info.dtype)
        dtype = np.dtype(_RAW_TYPES[info.dtype])
        with info.file.open("rb") as stream:
            buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        # The mapping goes when the array goes.
        return np.frombuffer(buffer, dtype, info.num_bytes // dtype.itemsize, info.offset).reshape(info.shape)

    def close(self) -> None:
        self._open_files.clear()


def checkpoint_files(folder: Path) -> list[Path]:
    """The files that hold the weights, in order of name. Raises LoadError when there are none, saying why."""
    weight_map = _weight_map(folder)
    if weight_map is not None:
        files = [folder / name for name in sorted(set(weight_map.values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise LoadError(f"names files that are not there: {name_list(missing)}", file=folder / INDEX_NAME)
        return files
    single = folder / SINGLE_NAME
    if single.is_file():
        return [single]
    others = sorted(folder.glob("*.safetensors"))
    if others:
        names = name_list(file.name for file in others)
        raise LoadError(
            f"has {names}, but neither {SINGLE_NAME} nor {INDEX_NAME} to say which files are the model's", file=folder
        )
    if pickles := sorted(file.name for pattern in _PICKLE_PATTERNS for file in folder.glob(pattern)):
        raise LoadError(
            f"has only pickle files ({name_list(pickles)}); reading those can run code hidden in them, so Octavo does "
            "not. Use a safetensors version of the model, or convert it with transformers' save_pretrained",
            file=folder,
        )
    raise LoadError(
        f"has no weights: neither {SINGLE_NAME} nor {INDEX_NAME} is there (pickle files are not even downloaded)",
        file=folder,
    )


def _weight_map(folder: Path) -> dict[str, str] | None:
    """The index's tensor name -> file name, or None without an index."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return None
    raw = _json_object(index.read_bytes(), index).get("weight_map")
    if not isinstance(raw, dict) or not raw:
        raise LoadError("weight_map is missing or empty", file=index)
    for tensor, name in raw.items():
        # A plain name cannot lead out of the folder.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise LoadError("a file's name", file=index, tensor=tensor, expected="NAME.safetensors", found=repr(name))
    return raw


def _json_object(data: bytes, file: Path) -> dict[str, Any]:
    """A JSON object in which no key is there twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [key for key, _ in pairs]
            raise LoadError(f"names are there twice: {name_list({n for n in names if names.count(n) > 1})}", file=file)
        return result

    try:
        parsed = json.loads(data, object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise LoadError(f"is not JSON: {error}", file=file) from error
    if not isinstance(parsed, dict):
        raise LoadError("is not a JSON object", file=file, found=type(parsed).__name__)
    return parsed


def read_header(file: Path) -> list[TensorInfo]:
    """Every tensor of one file, its dtype, shape and byte range checked against the file's size.

    Raises LoadError. Source of the layout: the format section of the safetensors README.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise LoadError("is a Git LFS pointer, not the file itself; run `git lfs pull`", file=file)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise LoadError("is not a safetensors file, or is cut short", file=file, found=f"{size} bytes")
        header = _json_object(stream.read(length), file)
    header.pop("__metadata__", None)
    data_bytes = size - 8 - length
    infos, ranges = [], []
    for name, entry in header.items():
        info, begin, end = _entry(file, name, entry)
        if end > data_bytes:
            expected, found = f"{8 + length + end} bytes or more", f"{size} bytes"
            raise LoadError("the file is cut short", file=file, tensor=name, expected=expected, found=found)
        infos.append(replace(info, offset=8 + length + begin))
        ranges.append((begin, end, name))
    ranges.sort()
    for (_, before, _), (begin, _, name) in pairwise(ranges):
        if begin < before:
            raise LoadError("shares bytes with another tensor", file=file, tensor=name)
    return infos


def _entry(file: Path, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"the header's entry is malformed: {error!r}", file=file, tensor=name) from error
    if not sound:
        raise LoadError("shape or offsets are not whole numbers", file=file, tensor=name, found=entry)
    if dtype not in _DTYPE_BITS:
        raise LoadError("dtype is unknown", file=file, tensor=name, found=dtype)
    num_bytes = -(-prod(shape) * _DTYPE_BITS[dtype] // 8)
    if end - begin != num_bytes:
        expected = f"{num_bytes} for {dtype}{list(shape)}"
        raise LoadError("bytes", file=file, tensor=name, expected=expected, found=end - begin)
    return TensorInfo(name, shape, dtype, num_bytes, file), begin, end
