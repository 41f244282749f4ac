"""What lies beside the arrays of an Orbax checkpoint that ``octavo convert`` wrote. No jax here: API processes read it.

The folder holds ``config.json`` and the tokenizer's files as the original model has them, ``params`` (the Orbax
checkpoint) and the index: a JSON object with the arrays' shapes and types, the files' sizes and how the linear layers
are quantised.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..quantization.spec import WeightSpec
from .errors import LoadError, name_list

INDEX_NAME = "octavo_orbax.json"
PARAMS_FOLDER = "params"
FORMAT_VERSION = 1
"""Of the index and of how parameters are named and cut; a reader takes its own version only."""
_ORBAX_FILE = "_CHECKPOINT_METADATA"


@dataclass(frozen=True)
class StoredQuantization:
    """The weights' forms as they were found, or made, when the checkpoint was converted."""

    name: str
    specs: Mapping[str, WeightSpec]
    """By the layer's name in the original checkpoint; layers that are not here are plain."""

    def weight_spec(self, module: str) -> WeightSpec | None:
        return self.specs.get(module)


@dataclass(frozen=True)
class StoredArray:
    shape: tuple[int, ...]
    dtype: str
    """As NumPy (with ml_dtypes) calls it."""


@dataclass(frozen=True)
class OrbaxIndex:
    architecture: str
    arrays: Mapping[str, StoredArray]
    """By dotted name."""
    files: Mapping[str, int]
    """Path below the folder of parameters → bytes."""
    quantization: StoredQuantization | None = None

    def write(self, folder: Path) -> None:
        quantization = None
        if self.quantization is not None:
            known = list(dict.fromkeys(self.quantization.specs.values()))
            modules = {module: known.index(spec) for module, spec in self.quantization.specs.items()}
            specs = [asdict(spec) for spec in known]
            quantization = {"name": self.quantization.name, "specs": specs, "modules": modules}
        document = {
            "format_version": FORMAT_VERSION,
            "architecture": self.architecture,
            "quantization": quantization,
            "arrays": {name: asdict(array) for name, array in self.arrays.items()},
            "files": dict(self.files),
        }
        (folder / INDEX_NAME).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def is_converted(folder: Path) -> bool:
    """Whether ``octavo convert`` wrote the folder."""
    return (folder / INDEX_NAME).is_file()


def refuse_foreign(folder: Path) -> None:
    """Raises LoadError for an Orbax checkpoint of somebody else, whose parameters mean something unknown."""
    for place in (folder, folder / PARAMS_FOLDER):
        if (place / _ORBAX_FILE).is_file() and not is_converted(folder):
            raise LoadError(
                f"is an Orbax checkpoint without {INDEX_NAME}: Octavo loads those that `octavo convert` wrote",
                file=folder,
            )


def read_index(folder: Path) -> OrbaxIndex:
    """The index of a converted checkpoint. Raises LoadError if it is missing, damaged or of another version."""
    path = folder / INDEX_NAME
    refuse_foreign(folder)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"has no {INDEX_NAME}: `octavo convert` did not write this folder", file=folder) from None
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot be read: {error}", file=path) from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise LoadError("format_version", file=path, expected=FORMAT_VERSION, found=version)
    try:
        return OrbaxIndex(
            architecture=str(document["architecture"]),
            arrays={
                str(name): StoredArray(tuple(int(size) for size in array["shape"]), str(array["dtype"]))
                for name, array in document["arrays"].items()
            },
            files={str(name): int(size) for name, size in document["files"].items()},
            quantization=_read_quantization(document["quantization"]),
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise LoadError(f"is damaged: {type(error).__name__}: {error}", file=path) from error


def _read_quantization(found: Any) -> StoredQuantization | None:
    if found is None:
        return None
    known = {field.name for field in fields(WeightSpec)}
    if strange := {name for spec in found["specs"] for name in spec} - known:
        raise ValueError(f"unknown keys {name_list(strange)}")
    specs = [WeightSpec(**spec) for spec in found["specs"]]
    return StoredQuantization(
        str(found["name"]), {str(module): specs[place] for module, place in found["modules"].items()}
    )


def check_files(folder: Path, index: OrbaxIndex) -> None:
    """Raises LoadError naming the first file of the parameters that is missing or of another size than was written.

    Orbax reads a part that is not there as zeros.
    """
    for name, size in index.files.items():
        path = folder / PARAMS_FOLDER / name
        found = path.stat().st_size if path.is_file() else None
        if found is None:
            raise LoadError("is missing: the checkpoint is incomplete", file=path)
        if found != size:
            raise LoadError("the checkpoint is damaged: bytes", file=path, expected=size, found=found)
