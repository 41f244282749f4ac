"""How one linear layer of a checkpoint is quantised, as data. No jax here."""

from dataclasses import dataclass
from math import gcd
from typing import Literal

Format = Literal["awq", "gptq", "gptq_v2", "fp8", "pack-quantized", "int-quantized", "gguf", "online"]
"""Where the stored tensors lie and how; ``models.loading.quantized`` has a reader for each."""
Activations = Literal["none", "token", "static"]
"""What activations are rounded to where float8 is multiplied by float8: see ``weights.Float8Weight``."""


@dataclass(frozen=True)
class WeightSpec:
    """One weight of a checkpoint. Equal specs are kept alike on the device and can be fused."""

    format: Format
    kind: Literal["int", "float8"]
    bits: int = 8
    """In the checkpoint: 2, 3, 4 or 8."""
    group_size: int | None = None
    """Input columns that share a scale; None: a whole row's."""
    block_rows: int | None = None
    """Output rows that share a scale, if more than one does and not all (fp8 in blocks)."""
    has_zero: bool = False
    """Zero points are read from the checkpoint; else they are in the middle, ``2 ** (bits - 1)``."""
    has_minimum: bool = False
    act_order: bool = False
    """Columns belong to groups as ``g_idx`` says."""
    activations: Activations = "none"
    scale_name: str = "weight_scale"
    """Of fp8 and compressed-tensors: the tensor's name."""

    @property
    def device_bits(self) -> int:
        """Codes of 2 and 3 bits are kept in 4."""
        return 8 if self.bits == 8 else 4

    def group_on_device(self, in_size: int, shards: int = 1) -> int:
        """Columns per scale as kept, where ``in_size`` columns are cut over ``shards`` devices.

        Where a group of the checkpoint is cut short, by the last column or by the end of a shard, all groups become
        as small as that takes, and scales repeat.
        """
        return in_size if self.group_size is None else gcd(self.group_size, in_size // shards)


WeightSpecs = tuple[WeightSpec | None, ...]
"""Of the checkpoint tensors that one of our weights is fused from; None for one that is not quantised."""


def can_fuse(specs: WeightSpecs) -> bool:
    """Whether the parts can lie in one array. Columns in an order of their own keep a part apart."""
    first = specs[0]
    return len(specs) == 1 or (all(spec == first for spec in specs) and (first is None or not first.act_order))
