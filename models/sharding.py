"""Tensor parallelism: how a decoder is cut over the mesh axis "tp", and what can be cut."""

from dataclasses import dataclass, replace
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


ONE_DEVICE = Placement()


def split_over(config: DecoderConfig, num_shards: int) -> DecoderConfig:
    """The decoder in the form in which ``num_shards`` devices share it equally; ``config`` itself for one.

    With more devices than KV heads each head is there more than once (a device holds one), and the vocabulary is
    padded to a multiple. ``as_in_checkpoint`` undoes both. Raises ModelConfigError naming what cannot be divided.
    """
    if num_shards == 1:
        return config
    heads, kv_heads = config.num_heads, config.num_kv_heads
    for name, size in (("num_attention_heads", heads), *_ffn_sizes(config)):
        if size % num_shards:
            raise ModelConfigError(
                f"tensor_parallel_size {num_shards} does not divide the model's {name} of {size}{_possible(config)}"
            )
    if kv_heads % num_shards and num_shards % kv_heads:
        raise ModelConfigError(
            f"tensor_parallel_size {num_shards} neither divides the model's num_key_value_heads of {kv_heads} nor is a "
            f"multiple of it{_possible(config)}"
        )
    copies, padding = max(1, num_shards // kv_heads), -config.vocab_size % num_shards
    return replace(
        config,
        num_kv_heads=kv_heads * copies,
        kv_head_copies=copies,
        vocab_size=config.vocab_size + padding,
        vocab_padding=padding,
    )


def _possible(config: DecoderConfig) -> str:
    """The sizes that ``split_over`` takes, for its errors."""
    sizes = [size for _, size in _ffn_sizes(config)]
    kv_heads = config.num_kv_heads
    possible = [
        str(count)
        for count in range(2, config.num_heads + 1)
        if not any(size % count for size in (config.num_heads, *sizes)) and not (kv_heads % count and count % kv_heads)
    ]
    return f"; possible: {', '.join(possible)}" if possible else "; no size but 1 is possible"


def as_in_checkpoint(config: DecoderConfig) -> DecoderConfig:
    """The decoder before ``split_over``: as the checkpoint's tensors have it."""
    return replace(
        config,
        num_kv_heads=config.num_kv_heads // config.kv_head_copies,
        kv_head_copies=1,
        vocab_size=config.vocab_size - config.vocab_padding,
        vocab_padding=0,
    )


def _ffn_sizes(config: DecoderConfig) -> list[tuple[str, int]]:
    """Of the feed-forward layers that there are."""
    mixtures = [layer.moe for layer in config.layers if layer.moe is not None]
    experts = {spec.intermediate_size for spec in mixtures}
    shared = {spec.shared_intermediate_size for spec in mixtures if spec.shared_intermediate_size is not None}
    dense = [("intermediate_size", config.intermediate_size)] if any(x.moe is None for x in config.layers) else []
    dense += [("moe_intermediate_size", size) for size in sorted(experts)]
    return dense + [("shared_expert_intermediate_size", size) for size in sorted(shared)]
