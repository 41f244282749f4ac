"""Kernel sizes that were measured on a GPU, read from ``tuned/<device kind>/<operation>.json`` in the package.

``octavo tune`` writes them, into the package or into a folder of the user's, which ``--tuned-config-folder`` names and
which goes first. Such a file is a list of ``{"when": {...}, "config": {...}}``: ``config`` holds the fields of the
operation's ``MosaicTuningConfig`` and applies where all of ``when``, some of the call's facts (``facts_of`` for
attention), hold. The first that does counts. Without a file, or an entry that fits, the operation's own reasoning
decides. Fields that are left out keep what the operation's reasoning gives them.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax

from .dispatch import AttentionShape, check_mosaic_shapes
from .float8 import FLOAT8

FOLDER = Path(__file__).parent / "tuned"
HOPPER_MULTIPROCESSORS = 132
"""Of H100 SXM and H200."""

_user_folder: Path | None = None
_forced: dict[str, dict[str, Any]] = {}


def use_folder(folder: Path | None) -> None:
    """From now on, in this process, the files in ``folder`` go before the package's own. None: as it was at start."""
    global _user_folder
    _user_folder = folder
    _read.cache_clear()


def user_files() -> tuple[tuple[str, str], ...]:
    """Name and text of all files in the user's folder: what compiled programs follow from besides the package."""
    if _user_folder is None:
        return ()
    paths = sorted(_user_folder.glob("*/*.json"))
    return tuple((path.relative_to(_user_folder).as_posix(), path.read_text(encoding="utf-8")) for path in paths)


@contextmanager
def forced(operation: str, fields: Mapping[str, Any]) -> Iterator[None]:
    """Calls that are traced inside take ``fields``, whatever was measured: how ``octavo tune`` tries a candidate."""
    _forced[operation] = dict(fields)
    try:
        yield
    finally:
        del _forced[operation]


def find_tuned(
    operation: str, device_kind: str, facts: Mapping[str, Any], folder: Path | None = None
) -> dict[str, Any] | None:
    """The fields measured for ``facts`` on a GPU of ``device_kind`` (``jax.Device.device_kind``); None: nothing was.

    ``folder`` stands in for those that are looked into else. Raises ValueError for a file that is not such a list.
    """
    if operation in _forced:
        return dict(_forced[operation])
    folders = [folder] if folder is not None else [f for f in (_user_folder, FOLDER) if f is not None]
    for place in folders:
        for entry in _read(place, device_kind, operation):
            if all(facts.get(name) == value for name, value in entry["when"].items()):
                return dict(entry["config"])
    return None


def write_tuned(
    operation: str, device_kind: str, when: Mapping[str, Any], config: Mapping[str, Any], folder: Path = FOLDER
) -> Path:
    """Adds an entry, or replaces the one with the same ``when``; entries with more conditions come first.

    Returns the file. Raises ValueError if the file that is there is malformed, OSError if it cannot be written.
    """
    _read.cache_clear()
    others = [entry for entry in _read(folder, device_kind, operation) if entry["when"] != dict(when)]
    entries = [{"when": dict(when), "config": dict(config)}, *others]
    entries.sort(key=lambda entry: -len(entry["when"]))
    path = tuned_path(folder, device_kind, operation)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    _read.cache_clear()
    return path


def tuned_path(folder: Path, device_kind: str, operation: str) -> Path:
    return folder / device_kind.lower().replace(" ", "-") / f"{operation}.json"


def facts_of(q: jax.ShapeDtypeStruct | jax.Array, kv: jax.ShapeDtypeStruct | jax.Array) -> dict[str, Any]:
    """What the entries for a call to attention are chosen by. q ``[T or R, N, H]``; kv ``[B, 2, K, S, H]``."""
    num_kv_heads, block_size, head_dim = kv.shape[2:]
    return {
        "num_heads": q.shape[1],
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "kv_dtype": str(kv.dtype),
    }


def measured_sizes(
    operation: str, q: jax.ShapeDtypeStruct | jax.Array, kv: jax.ShapeDtypeStruct | jax.Array, interpret: Any
) -> dict[str, Any] | None:
    """The fields of an attention kernel's tuning that were measured for such a call on this GPU; None: reason.

    Raises ValueError for a shape or pool type that the Mosaic kernels cannot serve.
    """
    num_kv_heads, block_size, head_dim = kv.shape[2:]
    check_mosaic_shapes(AttentionShape(q.shape[1], num_kv_heads, head_dim, block_size, str(q.dtype)))
    if kv.dtype not in (q.dtype, FLOAT8):
        raise ValueError(f"the mosaic kernels take a pool of q's type {q.dtype} or of {FLOAT8}; got {kv.dtype}")
    return measured_for(operation, facts_of(q, kv), interpret)


def measured_for(operation: str, facts: Mapping[str, Any], interpret: Any) -> dict[str, Any] | None:
    """The fields of a kernel's tuning that were measured for ``facts`` on this GPU; None: there is none, nothing was,
    or ``interpret`` says that the kernel is interpreted."""
    gpu = None if interpret is not None else current_gpu()
    return find_tuned(operation, gpu, facts) if gpu else None


def size_class(size: int, classes: Sequence[int]) -> int | None:
    """The first of ``classes``, which rise, that is no less than ``size``; None if all are."""
    return next((bound for bound in classes if size <= bound), None)


def current_gpu() -> str | None:
    """The kind of the GPU that JAX runs on; None on other devices."""
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None


def num_multiprocessors() -> int:
    """Of the GPU that JAX runs on. On other devices, where kernels are compiled for a described GPU or interpreted, and
    where JAX does not know, as many as an H100 SXM or an H200 has."""
    device = jax.devices()[0]
    known = getattr(device, "core_count", None) if device.platform == "gpu" else None
    return int(known or HOPPER_MULTIPROCESSORS)


@cache
def _read(folder: Path, device_kind: str, operation: str) -> tuple[dict[str, Any], ...]:
    path = tuned_path(folder, device_kind, operation)
    if not path.is_file():
        return ()
    entries = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise ValueError(f"{path}: a list of entries is expected; got {type(entries).__name__}")
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), dict) for key in ("when", "config")):
            raise ValueError(f"{path}: an entry needs the objects 'when' and 'config'; got {entry!r}")
    return tuple(entries)
