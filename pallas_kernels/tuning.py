"""Kernel sizes that were measured on a GPU, read from ``tuned/<device kind>/<operation>.json`` in the package.

Such a file is a list of ``{"when": {...}, "config": {...}}``: ``config`` holds the fields of the operation's
``MosaicTuningConfig`` and applies where all of ``when`` (say ``{"head_dim": 128}``) holds. The first that does counts.
Without a file, or an entry that fits, the operation's own reasoning decides.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax

FOLDER = Path(__file__).parent / "tuned"


def find_tuned(
    operation: str, device_kind: str, facts: Mapping[str, Any], folder: Path = FOLDER
) -> dict[str, Any] | None:
    """The fields measured for ``facts`` on a GPU of ``device_kind`` (``jax.Device.device_kind``); None: nothing was.

    ``folder`` stands in for the package's own. Raises ValueError for a file that is not such a list.
    """
    entries = _read(folder, device_kind, operation)
    for entry in entries:
        if all(facts.get(name) == value for name, value in entry["when"].items()):
            return dict(entry["config"])
    return None


def current_gpu() -> str | None:
    """The kind of the GPU that JAX runs on; None on other devices."""
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None


@cache
def _read(folder: Path, device_kind: str, operation: str) -> tuple[dict[str, Any], ...]:
    path = folder / device_kind.lower().replace(" ", "-") / f"{operation}.json"
    if not path.is_file():
        return ()
    entries = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise ValueError(f"{path}: a list of entries is expected; got {type(entries).__name__}")
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), dict) for key in ("when", "config")):
            raise ValueError(f"{path}: an entry needs the objects 'when' and 'config'; got {entry!r}")
    return tuple(entries)
