"""Tensor parallelism: how a decoder is cut over the mesh axis "tp", and what can be cut."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from ..pallas_kernels.dispatch import Implementation
from .decoder_config import DecoderConfig
from .errors import ModelConfigError

TP_AXIS = "tp"
"""Mesh axis of tensor parallelism."""


@dataclass(frozen=True)
class Placement:
    """What a decoder's code depends on besides its config: the attention kernels, and the mesh if there is one."""

    implementation: Implementation = "xla"
    mesh: Mesh | None = None
    interpret: Any = None
    """What GPU kernels are interpreted by on a CPU (``dispatch.gpu_interpreter``); None where they are compiled."""

    @property
    def num_shards(self) -> int:
        """Devices along "tp"."""
        return 1 if self.mesh is None else int(self.mesh.shape[TP_AXIS])

    @property
    def platform(self) -> str:
        """Of the devices, as JAX names it."""
        return jax.default_backend() if self.mesh is None else str(self.mesh.devices.flat[0].platform)

    def check(self, config: DecoderConfig) -> None:
        """Raises ModelConfigError naming the first size that the shards cannot share equally."""
        for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"):
            if getattr(config, name) % self.num_shards:
                raise ModelConfigError(
                    f"{name} ({getattr(config, name)}) cannot be split over {self.num_shards} devices"
                )
