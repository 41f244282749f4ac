"""A model's name -> files on this machine."""

import logging
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .errors import LoadError

logger = logging.getLogger(__name__)

_TEXT_PATTERNS = ["*.json", "*.txt", "*.jinja", "tokenizer.model", "*.tiktoken"]
_WEIGHT_PATTERNS = ["*.safetensors"]
# Second copies of the weights, under other names or for other programs.
_IGNORED_PATTERNS = ["consolidated*", "*/*.safetensors", "original/*", "onnx/*"]


def fetch_model(model: str, *, revision: str | None, download_dir: str | None, with_weights: bool = True) -> Path:
    """A local path (a folder or a .gguf file) as it is; a hub id through the hub's cache, downloading what lacks.

    Only safetensors, JSON and tokenizer files are fetched, never pickles or code. ``download_dir`` is the cache's
    folder (None: the hub's default). Raises LoadError naming the id and what to do.
    """
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            logger.warning("revision %s is not used: %s is on this machine, not on the hub", revision, path)
        return path
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or path.suffix == ".gguf":
        raise LoadError(f"no such file or folder: {model}")
    patterns = _TEXT_PATTERNS + (_WEIGHT_PATTERNS if with_weights else [])
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=patterns,
            ignore_patterns=_IGNORED_PATTERNS,
        )
    except GatedRepoError as error:
        raise LoadError(
            f"{model} is gated: accept its terms on huggingface.co, then set HF_TOKEN or run `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise LoadError(f"{model} has no revision {revision!r} on the hub") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise LoadError(
            f"{model} is neither a local path nor a model on the hub (if it is private, set HF_TOKEN)"
        ) from error
    except Exception as error:  # the hub's client also lets errors of its HTTP library through
        raise LoadError(
            f"{model} is not in the hub's cache and could not be downloaded ({type(error).__name__}); check the "
            "network, or download it elsewhere and pass the folder's path"
        ) from error
    return Path(folder)
