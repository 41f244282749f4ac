"""Compiled programs kept between starts, found without tracing.

JAX's own persistent cache is keyed by the lowered program, and tracing and lowering a model takes longer than reading
the result. Here a program is keyed by all that it follows from: this package's source, the libraries' versions, the
machine, and what the caller built it from. A file is native code: the folder must be as trusted as the package.
"""

import hashlib
import importlib.metadata
import logging
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from .config import PROGRAM_WRITER

logger = logging.getLogger(__name__)

KEPT_DAYS = 14
"""Programs of other versions and settings are removed when they were not used for so long."""
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
_SOURCES = ("engine", "models", "pallas_kernels")
_being_written: dict[Path, Thread] = {}
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")


@cache
def source_digest() -> bytes:
    """sha256 over every file that a compiled program can depend on: code, tuned configurations, and the libraries'
    versions."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".json") and path.is_file():
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    for library in _LIBRARIES:
        digest.update(f"{library} {importlib.metadata.version(library)}\0".encode())
    return digest.digest()


class ExecutableCache:
    """Executables in ``folder``, one sub-folder for each set of ``inputs``; a folder of None keeps nothing.

    ``inputs``: the text of all that the programs follow from besides the source. A memory address in it would mean
    something else in the next process, so then nothing is kept.
    """

    def __init__(self, folder: Path | None, inputs: Sequence[str], devices: Sequence[jax.Device]) -> None:
        self._devices = list(devices)
        self._folder: Path | None = None
        self._new: list[tuple[Path, jax.stages.Compiled]] = []
        self.num_loaded = 0
        if folder is None or any(_ADDRESS.search(text) for text in inputs):
            return
        digest = hashlib.sha256(source_digest())
        for text in inputs:
            digest.update(text.encode() + b"\0")
        self._folder = folder / f"programs-{digest.hexdigest()[:16]}"
        _remove_unused(folder, self._folder)

    def get(self, name: str, compile_it: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
        """The program of that name from the folder, or else from ``compile_it``, and then kept."""
        path = None if self._folder is None else self._folder / name
        program = None if path is None else self._load(path)
        if program is not None:
            self.num_loaded += 1
            return program
        program = compile_it()
        if path is not None:
            self._new.append((path, program))
        return program

    def keep(self) -> None:
        """Writes what was compiled, in the background: it takes seconds, which a start need not wait for.

        The thread is called ``PROGRAM_WRITER``; the process does not end before it is done, unless it is killed.
        """
        new, self._new = self._new, []
        if not new:
            return
        writer = Thread(target=_store_all, args=(new,), name=PROGRAM_WRITER)
        _being_written.update(dict.fromkeys((path for path, _ in new), writer))
        writer.start()

    def _load(self, path: Path) -> jax.stages.Compiled | None:
        if path in _being_written:
            _being_written[path].join()
        try:
            data = path.read_bytes()
        except OSError:
            return None
        try:
            payload, in_tree, out_tree = pickle.loads(data)
            return deserialize_and_load(payload, in_tree, out_tree, execution_devices=self._devices)
        except Exception as error:  # whatever a damaged file leads to, compiling still works
            logger.warning("a kept program could not be read and is compiled again: %s (%r)", path, error)
            return None


def _store_all(programs: Sequence[tuple[Path, jax.stages.Compiled]]) -> None:
    for path, program in programs:
        _store(path, program)


def _store(path: Path, program: jax.stages.Compiled) -> None:
    """Keeps a program; a disk that is full or gone costs a warning."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(pickle.dumps(serialize(program)))
        part.replace(path)
    except Exception as error:  # some backends cannot serialize
        logger.warning("a compiled program is not kept: %r", error)
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _remove_unused(folder: Path, current: Path) -> None:
    """Marks ``current`` as used now, and removes what has not been for ``KEPT_DAYS``."""
    try:
        if current.exists():
            os.utime(current)
        for other in folder.glob("programs-*"):
            if other != current and time.time() - other.stat().st_mtime > KEPT_DAYS * 24 * 3600:
                shutil.rmtree(other)
    except OSError as error:
        logger.warning("old compiled programs are left in %s: %s", folder, error)
