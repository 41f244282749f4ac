"""A new folder for a model that a command writes: config.json, the tokenizer's files, and beside them the weights."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..models.loading.orbax_index import INDEX_NAME
from .errors import ConfigError

_COPIED = ("*.json", "*.txt", "*.jinja", "tokenizer.model", "*.tiktoken", "LICENSE*", "NOTICE*")
_NOT_COPIED = ("*.index.json", INDEX_NAME)
"""Of those: what speaks of the weights' files."""
_TEMPLATES_FOLDER = "additional_chat_templates"


def check_output(output: Path) -> None:
    """Raises ConfigError unless ``output`` is new or an empty folder, in a folder that can be written."""
    try:
        _check_place(output, output.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, with a NUL, a loop of links
        raise ConfigError(f"output {output} cannot be written: {error}") from error


def _check_place(output: Path, place: Path) -> None:
    """``place`` is where ``output`` leads."""
    if place.exists() and not place.is_dir():
        raise ConfigError(f"output {output} is a file; name a folder that is new or empty")
    if place.is_dir() and any(place.iterdir()):
        raise ConfigError(f"output {output} is not empty; name a folder that is new or empty")
    if os.path.ismount(place):
        raise ConfigError(f"output {output} is a mount point, which cannot be replaced; name a new folder in it")
    above = next(folder for folder in place.parents if folder.exists())
    if not above.is_dir():
        raise ConfigError(f"output {output} cannot be written: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"output {output} cannot be written: {above} is not writable")


def left_over(output: Path) -> list[Path]:
    """Folders that runs to ``output`` were writing when they were killed, or still are."""
    place = output.resolve()
    return sorted(path for path in place.parent.glob(".*") if path.name.startswith(f".{place.name}.partial-"))


@contextmanager
def written_aside(output: Path) -> Iterator[Path]:
    """A folder beside ``output`` that takes its place in one step, when all is written; removed if that fails.

    Raises ConfigError if it cannot be written.
    """
    place = output.resolve()
    aside = place.with_name(f".{place.name}.partial-{secrets.token_hex(4)}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        yield aside
        aside.rename(place)
    except OSError as error:
        raise ConfigError(f"output {output} cannot be written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def copy_texts(source: Path, folder: Path) -> None:
    """Copies from one folder to another what is not the weights'."""
    for path in sorted({path for pattern in _COPIED for path in source.glob(pattern)}):
        if path.is_file() and not any(path.match(pattern) for pattern in _NOT_COPIED):
            shutil.copyfile(path, folder / path.name)
    if (source / _TEMPLATES_FOLDER).is_dir():
        shutil.copytree(source / _TEMPLATES_FOLDER, folder / _TEMPLATES_FOLDER)
