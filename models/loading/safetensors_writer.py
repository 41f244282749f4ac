"""Writes a checkpoint of safetensors files tensor by tensor, a file at a time in memory."""

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from .safetensors_source import INDEX_NAME, SINGLE_NAME

MAX_FILE_BYTES = 2 << 30
"""Of tensors, if not given otherwise; a larger tensor has a file of its own."""


class SafetensorsWriter:
    """``add`` every tensor once, then ``close``. One file if all fit into ``max_bytes``, else several and an index.

    Both raise OSError for what cannot be written, such as on a full disk.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        self._folder, self._max_bytes = folder, max_bytes or MAX_FILE_BYTES
        self._pending: dict[str, np.ndarray] = {}
        self._files: list[tuple[Path, list[str]]] = []
        self.num_bytes = 0
        """Of all tensors so far."""

    def add(self, name: str, array: np.ndarray) -> None:
        waiting = sum(tensor.nbytes for tensor in self._pending.values())
        if self._pending and waiting + array.nbytes > self._max_bytes:
            self._flush()
        self._pending[name] = np.ascontiguousarray(array).reshape(array.shape)
        self.num_bytes += array.nbytes

    def close(self) -> None:
        self._flush()
        if len(self._files) == 1:
            self._files[0][0].rename(self._folder / SINGLE_NAME)
            return
        weight_map = {}
        for place, (path, names) in enumerate(self._files, start=1):
            name = f"model-{place:05d}-of-{len(self._files):05d}.safetensors"
            path.rename(self._folder / name)
            weight_map.update(dict.fromkeys(names, name))
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        path = self._folder / f"part-{len(self._files)}.safetensors"
        path.touch()
        mode = path.stat().st_mode & 0o777  # of any new file here; the library would leave it to its owner alone
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        path.chmod(mode)
        self._files.append((path, list(self._pending)))
        self._pending = {}
