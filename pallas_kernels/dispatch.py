"""Which implementation of attention runs: chosen once at start, by name, never silently per call."""

import importlib
import logging
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from .compat import mosaic_missing
from .float8 import FLOAT8

logger = logging.getLogger(__name__)

Implementation = Literal["xla", "mosaic"]
"""``xla``: plain JAX, runs on every backend. ``mosaic``: Pallas for Hopper and later GPUs."""

FIRST_MOSAIC_CAPABILITY = (9, 0)
"""Compute capability of Hopper: TMA and wgmma, which the kernels are written in."""
MIN_INTERPRETER_THREADS = 4
"""XLA threads that the interpreter must find on a CPU: one each for the three warpgroups of the mixed kernel, which
wait for each other, and one for the program that calls it. With fewer it waits for ever."""
MAX_GROUP = 16
MOSAIC_HEAD_DIMS = (64, 96, 128, 256)
MOSAIC_BLOCK_SIZES = (16, 32, 64)
MOSAIC_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class AttentionShape:
    """What of a model and its pool decides whether the Mosaic kernels can serve it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    """Of queries."""
    kv_dtype: str | None = None
    """Of keys and values in the pool; None: as queries."""


@dataclass(frozen=True)
class Device:
    """Where attention will run."""

    platform: str
    """As JAX says: "cpu", "gpu", …"""
    compute_capability: tuple[int, int] | None = None
    """Of an NVIDIA GPU."""
    cpu_threads: int | None = None
    """Of a CPU: the threads that XLA runs programs on; None if unknown."""

    @classmethod
    def of(cls, device: Any) -> "Device":
        """From a ``jax.Device``."""
        if device.platform == "cpu":
            return cls("cpu", cpu_threads=xla_cpu_threads())
        capability = getattr(device, "compute_capability", None)
        numbers = str(capability).split(".") if capability else []
        known = len(numbers) == 2 and all(number.isdecimal() for number in numbers)
        return cls(device.platform, (int(numbers[0]), int(numbers[1])) if known else None)


@dataclass(frozen=True)
class Choice:
    """The implementation that was chosen, and why."""

    implementation: Implementation
    reason: str
    interpret: Any = None
    """On a CPU, what the Mosaic kernels take to be interpreted by (``gpu_interpreter``)."""


def select_implementation(device: Device, shape: AttentionShape, requested: str = "auto") -> Choice:
    """The implementation for ``shape`` on ``device``, logged once with its reason.

    ``requested`` is "auto", "xla" or "mosaic". Auto takes Mosaic where it can serve: a GPU of compute capability 9.0
    or later, JAX 0.11.2 or later, a shape within the kernels' limits; else xla. A named one is used or refused,
    never replaced. Mosaic on a CPU is interpreted, which is for tests. Raises ValueError for a name that is unknown
    and for "mosaic" where it cannot serve, naming what stands in the way.
    """
    if requested not in ("auto", *get_args(Implementation)):
        raise ValueError(f"attention_backend must be one of auto, xla, mosaic; got {requested!r}")
    obstacle = mosaic_obstacle(device, shape)
    if requested == "mosaic":
        if obstacle is not None:
            raise ValueError(f"attention_backend 'mosaic' cannot be used: {obstacle}")
        if device.platform == "cpu":
            logger.warning("the mosaic attention kernels are interpreted on a CPU: right, but slow; for tests only")
        choice = Choice("mosaic", "asked for", gpu_interpreter() if device.platform == "cpu" else None)
    elif requested == "xla":
        choice = Choice("xla", "asked for")
    elif device.platform == "cpu":
        choice = Choice("xla", "the mosaic kernels need a GPU")
    elif obstacle is not None:
        choice = Choice("xla", obstacle)
    else:
        choice = Choice("mosaic", "the device, JAX and the model's shape all allow it")
    logger.info("attention on %s: %s (%s)", device.platform, choice.implementation, choice.reason)
    return choice


def mosaic_obstacle(device: Device, shape: AttentionShape) -> str | None:
    """Why the Mosaic kernels cannot serve ``shape`` on ``device``; None if they can. A CPU interprets them."""
    if missing := mosaic_missing():
        return missing
    if device.platform == "gpu":
        capability = device.compute_capability
        if capability is None or capability < FIRST_MOSAIC_CAPABILITY:
            found = "an unknown one" if capability is None else f"{capability[0]}.{capability[1]}"
            return f"the kernels need a GPU of compute capability 9.0 or later, this is {found}"
    elif device.platform != "cpu":
        return f"the kernels are for NVIDIA GPUs, not for {device.platform}"
    elif device.cpu_threads is not None and device.cpu_threads < MIN_INTERPRETER_THREADS:
        return (
            f"interpreted on a CPU the kernels need {MIN_INTERPRETER_THREADS} threads of XLA and this process has "
            f"{device.cpu_threads}, which would wait for each other for ever; start it with the environment variable "
            f"NPROC={MIN_INTERPRETER_THREADS}"
        )
    try:
        check_mosaic_shapes(shape)
    except ValueError as error:
        return str(error)
    return None


def xla_cpu_threads() -> int | None:
    """The threads that XLA runs programs on in this process, once JAX has started its CPU backend; None if unknown.

    JAX has no question for it. As many as cores, or as ``NPROC`` said when the backend started; so the threads are
    counted where Linux lists them, which is right however they came to be.
    """
    try:
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    except OSError:  # not Linux, or a thread that ended meanwhile
        return None
    return names.count("tf_XLAEigen") or None


def check_mosaic_shapes(shape: AttentionShape) -> None:
    """Raises ValueError naming the first size that the Mosaic kernels cannot serve."""
    group, rest = divmod(shape.num_heads, shape.num_kv_heads)
    if rest or not 1 <= group <= MAX_GROUP:
        raise ValueError(
            f"{shape.num_heads} query heads over {shape.num_kv_heads} KV heads: the mosaic kernels take 1 to "
            f"{MAX_GROUP} query heads for each KV head"
        )
    for name, value, allowed in (
        ("head_dim", shape.head_dim, MOSAIC_HEAD_DIMS),
        ("block_size", shape.block_size, MOSAIC_BLOCK_SIZES),
        ("dtype", shape.dtype, MOSAIC_DTYPES),
    ):
        if value not in allowed:
            raise ValueError(f"{name} {value}: the mosaic kernels take {', '.join(map(str, allowed))}")
    if shape.kv_dtype not in (None, shape.dtype, FLOAT8.name):
        raise ValueError(
            f"a KV cache of {shape.kv_dtype}: the mosaic kernels take one of the model's type, {shape.dtype}, or of fp8"
        )


def check_implementation(name: str) -> None:
    """Raises ValueError if there is no implementation of that name."""
    if name not in get_args(Implementation):
        raise ValueError(f"implementation must be one of {', '.join(get_args(Implementation))}; got {name!r}")


def gpu_interpreter() -> Any:
    """The ``interpret`` argument of the Mosaic kernels on a CPU. Static and hashable; equal ones share a trace."""
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu").InterpretGPUParams()


def load_mosaic(operation: str) -> ModuleType:
    """The module ``mosaic`` of an operation's package, imported on first use: older versions of JAX lack what it needs.

    Raises NotImplementedError where they do.
    """
    if missing := mosaic_missing():
        raise NotImplementedError(missing)
    return importlib.import_module(f".{operation}.mosaic", __package__)
