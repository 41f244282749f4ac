"""A new folder for a model that a command writes: config.json, the tokenizer's files, and beside them the weights."""

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
    """Raises ConfigError unless ``output`` is new or an empty folder."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output {output} is a file; name a folder that is new or empty")
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"output {output} is not empty; name a folder that is new or empty")


@contextmanager
def written_aside(output: Path) -> Iterator[Path]:
    """A folder beside ``output`` that takes its place in one step, when all is written; removed if that fails.

    Raises ConfigError if it cannot be written.
    """
    output = output.absolute()
    aside = output.with_name(f".{output.name}.partial-{secrets.token_hex(4)}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        yield aside
        aside.rename(output)
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
