"""``quantization_config`` of the compressed-tensors library (LLM Compressor's checkpoints). No jax here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .fields import Fields
from .spec import Activations, WeightSpec

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")


@dataclass(frozen=True)
class CompressedTensors:
    groups: tuple[tuple[tuple[str, ...], WeightSpec], ...]
    """Targets and what they are quantised to; the first that fits a module decides."""
    ignored: tuple[str, ...]
    name: str = "compressed-tensors"

    @classmethod
    def read(cls, fields: Fields) -> "CompressedTensors":
        if fields.get("quantization_status", "compressed") != "compressed":
            fields.refuse("quantization_status", fields.get("quantization_status"), "compressed")
        if (sparsity := fields.object("sparsity_config").get("format", "dense")) != "dense":
            fields.refuse("sparsity_config.format", sparsity, "dense")
        cache = fields.object("kv_cache_scheme")
        if (kind := (cache.get("type", "float"), cache.integer("num_bits", 8))) != ("float", 8):
            fields.refuse("kv_cache_scheme", f"{kind[0]}{kind[1]}", "float with 8 bits")
        common = fields.get("format", "dense")
        groups = []
        for key in fields.mapping("config_groups"):
            group = fields.object("config_groups").object(key)
            targets = group.names("targets")
            for target in targets:
                group.regex("targets", target.removeprefix("re:"))
            if group.get("output_activations"):
                group.refuse("output_activations", group.get("output_activations"), "null")
            groups.append((targets, _weight_spec(group, str(group.get("format", common)))))
        ignored = fields.names("ignore")
        for pattern in ignored:
            fields.regex("ignore", pattern.removeprefix("re:"))
        return cls(tuple(groups), ignored)

    def weight_spec(self, module: str) -> WeightSpec | None:
        if _matches(self.ignored, module):
            return None
        # A module that is named goes before its class, in whatever order the groups are.
        for candidates in (lambda name: name != "Linear", lambda name: name == "Linear"):
            for targets, spec in self.groups:
                if _matches([name for name in targets if candidates(name)], module):
                    return spec
        return None


def _matches(targets: Sequence[str], module: str) -> bool:
    """Whether a linear layer is meant: by its class, its name, or ``re:`` and what its name begins with."""
    return any(
        re.match(target[3:], module) is not None if target.startswith("re:") else target in ("Linear", module)
        for target in targets
    )


def _weight_spec(group: Fields, form: str) -> WeightSpec:
    if form not in _FORMATS:
        group.refuse("format", form, ", ".join(_FORMATS))
    weights = group.object("weights")
    bits, kind = weights.integer("num_bits", None), weights.get("type", "int")
    size = weights.get("group_size")
    strategy = weights.get("strategy", "tensor" if size is None else "channel" if size == -1 else "group")
    group_size = weights.group_size("group_size") if strategy == "group" else None
    symmetric = weights.boolean("symmetric", True)
    act_order = weights.get("actorder") in ("group", "dynamic", True)
    if strategy not in ("tensor", "channel", "group", "block"):
        weights.refuse("strategy", strategy, "tensor, channel, group, block")
    if weights.get("dynamic", False) is not False:
        weights.refuse("dynamic", weights.get("dynamic"), "false")
    if form == "naive-quantized":  # either of these two, as the library calls it where activations stay as they are
        form = "float-quantized" if kind == "float" else "int-quantized"
    if form == "float-quantized":
        if (bits, kind, symmetric) != (8, "float", True):
            weights.refuse("type", f"{kind}{bits}", "symmetric float with 8 bits (e4m3)")
        return _float_spec(group, weights, strategy, group_size)
    if kind != "int" or strategy == "block" or (act_order and form == "int-quantized"):
        weights.refuse("type", f"{kind}{bits} by {strategy}", f"int by tensor, channel or group for {form}")
    if bits not in ((4, 8) if form == "pack-quantized" else (8,)):
        weights.refuse("num_bits", bits, "4, 8" if form == "pack-quantized" else "8")
    if form == "pack-quantized":
        return WeightSpec("pack-quantized", "int", bits, group_size, has_zero=not symmetric, act_order=act_order)
    return WeightSpec("int-quantized", "int", bits, group_size, has_zero=not symmetric)


def _float_spec(group: Fields, weights: Fields, strategy: str, group_size: int | None) -> WeightSpec:
    if strategy == "block":
        block = weights.block("block_structure")
        if block is None:
            weights.refuse("block_structure", None, "[rows, columns]")
        return WeightSpec("fp8", "float8", group_size=block[1], block_rows=block[0])
    activations: Activations = "none"
    if "input_activations" in group and group_size is None:
        inputs = group.object("input_activations")
        if inputs.get("type", "float") != "float" or inputs.integer("num_bits", 8) != 8:
            inputs.refuse("type", inputs.get("type"), "float with 8 bits")
        activations = "token" if inputs.get("dynamic", False) else "static"
    return WeightSpec("fp8", "float8", group_size=group_size, activations=activations)
