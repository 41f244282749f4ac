"""The persistent compile cache, and a count of compiles."""

import hashlib
import logging
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_PROGRAM_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_dtype_bits",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_debug_nans",
    "jax_debug_infs",
)
_without_lock = threading.Lock()
_num_without = 0
_was_enabled = True


class CompileCounter:
    """Counts backend compiles of this process, cached or not, since ``start``.

    After ready there must be none: a compile in mid-traffic stalls every stream for seconds.
    """

    def __init__(self) -> None:
        self.total = 0
        self._baseline = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def mark_ready(self) -> None:
        """Compiles from here on are counted by ``after_ready``."""
        self._baseline = self.total

    @property
    def after_ready(self) -> int:
        return self.total - self._baseline

    def _on_event(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.total += 1


COMPILES = CompileCounter()
"""JAX's listeners cannot be taken off again, so one counter serves the process."""


def machine_key() -> str:
    """Names what makes a compiled program unusable elsewhere: CPU features, JAX version, device kind."""
    device = jax.devices()[0]
    parts = [jax.__version__, device.platform, device.device_kind, platform.machine()]
    if device.platform == "cpu":
        parts.append(_cpu_features())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def enable_compile_cache(folder: str | None) -> Path | None:
    """Turns on JAX's persistent cache in a sub-folder of ``folder`` for this kind of machine; None on failure.

    A folder that cannot be written, or no home to put it in, is a warning, not an error: the server still starts.
    """
    try:
        root = Path(folder) if folder else Path.home() / ".cache" / "octavo" / "compiled"
    except RuntimeError as error:  # a user id without a name and a home, as containers have
        logger.warning("compiled programs are not kept: %s; give a compile_cache_dir", error)
        return None
    path = root / machine_key()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("compiled programs are not kept: %s cannot be written (%s)", path, error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def program_settings(device: jax.Device) -> tuple[tuple[str, str], ...]:
    """What the process around an engine may have set that changes what a program computes, and what runs below JAX.

    XLA_FLAGS of the environment are not among it: who tries some gives another ``compile_cache_dir``.
    """
    settings = [(name, repr(jax.config.values.get(name))) for name in _PROGRAM_OPTIONS]
    return (*settings, ("platform", device.client.platform_version))


@contextmanager
def without_jax_cache() -> Iterator[None]:
    """JAX's persistent cache is neither read nor written meanwhile.

    For programs that are kept as executables: one that JAX has read from its cache loses its code when it is
    serialized again (seen on CPU with JAX 0.10 to 0.12: "Function ... not found" at its first call).
    """
    global _num_without, _was_enabled
    with _without_lock:
        if _num_without == 0:
            _was_enabled = jax.config.values["jax_enable_compilation_cache"]
        _num_without += 1
        _enable_jax_cache(False)
    try:
        yield
    finally:
        with _without_lock:
            _num_without -= 1
            if _num_without == 0:  # engines may start side by side
                _enable_jax_cache(_was_enabled)


def _enable_jax_cache(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()  # or JAX goes by what it found when it compiled first


def _cpu_features() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.split(":", 1)[1].split()))
    except OSError:
        pass
    return platform.processor()
