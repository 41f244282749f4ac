"""What differs between JAX versions, and what a version can do. Imports nothing of Pallas."""

from typing import Any

import jax

MOSAIC_SINCE = (0, 11, 2)
"""The first JAX whose ``plgpu.kernel`` and GPU interpreter these kernels are written for."""


def jax_version() -> tuple[int, ...]:
    return jax.__version_info__


def mosaic_missing() -> str | None:
    """Why the Mosaic kernels cannot be built with this JAX; None if they can."""
    if jax_version() >= MOSAIC_SINCE:
        return None
    wanted = ".".join(map(str, MOSAIC_SINCE))
    return f"the Mosaic GPU kernels need JAX >= {wanted} (Python >= 3.12); this is JAX {jax.__version__}"


def interpret_option(interpret: Any) -> dict[str, Any]:
    """The keyword of ``plgpu.kernel`` for ``interpret``; left out when it is None, so that JAX's own default holds."""
    return {} if interpret is None else {"interpret": interpret}
