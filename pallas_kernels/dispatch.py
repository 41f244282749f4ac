"""Which implementation of a kernel runs: chosen once at start, by name, never silently per call."""

import logging
from typing import Literal, get_args

logger = logging.getLogger(__name__)

Implementation = Literal["xla", "mosaic"]
"""``xla``: plain JAX, runs on every backend. ``mosaic``: Pallas for Hopper and later GPUs."""


def select_implementation(backend: str, requested: str = "auto") -> Implementation:
    """The implementation to use on ``backend`` (``jax.default_backend()``: "cpu", "gpu", …).

    ``requested`` is "auto", "xla" or "mosaic"; a named one is used or refused, never replaced.
    Raises ValueError for any other name, NotImplementedError for "mosaic", which does not exist yet.
    """
    check_implementation(requested, allowed=("auto", *get_args(Implementation)))
    logger.info("attention implementation on %s: xla (asked for: %s)", backend, requested)
    return "xla"


def check_implementation(name: str, allowed: tuple[str, ...] = get_args(Implementation)) -> None:
    """Raises ValueError if ``name`` is not in ``allowed``, NotImplementedError if it does not exist yet."""
    if name not in allowed:
        raise ValueError(f"implementation must be one of {', '.join(allowed)}; got {name!r}")
    if name == "mosaic":
        raise NotImplementedError("the 'mosaic' attention kernels do not exist yet; use 'xla' or 'auto'")
