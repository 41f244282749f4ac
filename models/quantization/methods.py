"""What a checkpoint's ``quantization_config`` says: a ``WeightSpec`` for every linear layer by its name. No jax here.

Layouts and keys: AutoAWQ, AutoGPTQ and GPTQModel, transformers' fine-grained FP8 and FBGEMM, compressed-tensors.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import ModelConfigError
from .compressed_tensors import CompressedTensors
from .fields import Fields
from .spec import WeightSpec


class QuantizationMethod(Protocol):
    """One quantised checkpoint, or a quantisation to be made while loading."""

    @property
    def name(self) -> str:
        """As ``--quantization`` calls it."""

    def weight_spec(self, module: str) -> WeightSpec | None:
        """Of the linear layer with this name in the checkpoint (without ``.weight``); None: it is not quantised.

        Raises ModelConfigError for one that cannot be served.
        """


@dataclass(frozen=True)
class Awq:
    group_size: int | None
    not_converted: tuple[str, ...]
    name: str = "awq"

    @classmethod
    def read(cls, fields: Fields) -> "Awq":
        bits = fields.integer("w_bit" if "w_bit" in fields else "bits", None)
        if bits != 4:
            fields.refuse("bits", bits, "4")
        version = str(fields.get("version", "gemm")).lower()
        if version != "gemm":
            fields.refuse("version", version, "gemm")
        if not fields.boolean("zero_point", True):
            fields.refuse("zero_point", False, "true")
        group_size = fields.group_size("group_size" if "group_size" in fields else "q_group_size")
        return cls(group_size, fields.names("modules_to_not_convert"))

    def weight_spec(self, module: str) -> WeightSpec | None:
        if module == "lm_head" or any(name in module for name in self.not_converted):
            return None
        return WeightSpec("awq", "int", bits=4, group_size=self.group_size, has_zero=True)


@dataclass(frozen=True)
class Gptq:
    common: WeightSpec
    dynamic: tuple[tuple[str, WeightSpec | None], ...]
    """Regular expressions in order, the first that matches a module's name decides; None: it is not quantised."""
    only: tuple[str, ...]
    """Ends of the names of the modules that are quantised; empty: all are."""
    name: str = "gptq"

    @classmethod
    def read(cls, fields: Fields) -> "Gptq":
        form = str(fields.get("checkpoint_format", fields.get("format", "gptq"))).lower()
        if form not in ("gptq", "gptq_v2"):
            fields.refuse("checkpoint_format", form, "gptq, gptq_v2")
        if fields.get("pack_dtype", "int32") != "int32":
            fields.refuse("pack_dtype", fields.get("pack_dtype"), "int32")
        if fields.boolean("lm_head", False):
            fields.refuse("lm_head", True, "false: the output layer is served unquantised only")
        only = fields.nested_names("modules_in_block_to_quantize")
        dynamic = []
        for pattern, changes in fields.mapping("dynamic").items():
            sign, _, regex = pattern.partition(":") if pattern[:2] in ("+:", "-:") else ("+", "", pattern)
            compiled = fields.regex("dynamic", regex)
            kept = None if sign == "-" else cls._spec(fields.over(changes, f"dynamic[{pattern!r}]"), form)
            dynamic.append((compiled, kept))
        return cls(cls._spec(fields, form), tuple(dynamic), only)

    @staticmethod
    def _spec(fields: Fields, form: str) -> WeightSpec:
        bits = fields.integer("bits", None)
        if bits not in (2, 3, 4, 8):
            fields.refuse("bits", bits, "2, 3, 4, 8")
        # Without "sym" the zero points are read as they are stored, which is right for both.
        return WeightSpec(
            "gptq_v2" if form == "gptq_v2" else "gptq",
            "int",
            bits=bits,
            group_size=fields.group_size("group_size"),
            has_zero=not fields.boolean("sym", False),
            act_order=fields.boolean("desc_act", False),
        )

    def weight_spec(self, module: str) -> WeightSpec | None:
        if module == "lm_head" or (self.only and not any(f".{module}".endswith(f".{name}") for name in self.only)):
            return None
        for regex, spec in self.dynamic:
            if re.match(regex, module):
                return spec
        return self.common


@dataclass(frozen=True)
class Fp8:
    spec: WeightSpec
    not_converted: tuple[str, ...]
    name: str = "fp8"

    @classmethod
    def read(cls, fields: Fields) -> "Fp8":
        if fields.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            fields.refuse("fmt", fields.get("fmt"), "e4m3")
        scheme = fields.get("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            fields.refuse("activation_scheme", scheme, "dynamic, static")
        not_converted = fields.names("modules_to_not_convert") + fields.names("ignored_layers")
        block = fields.block("weight_block_size")
        if block is None:
            spec = WeightSpec("fp8", "float8", activations="token" if scheme == "dynamic" else "static")
        elif scheme != "dynamic":
            fields.refuse("activation_scheme", scheme, "dynamic (with weight_block_size)")
        else:
            rows, columns = block
            spec = WeightSpec("fp8", "float8", group_size=columns, block_rows=rows, scale_name="weight_scale_inv")
        return cls(spec, not_converted)

    @classmethod
    def read_fbgemm(cls, fields: Fields) -> "Fp8":
        """FBGEMM's: a scale per output row, activations per token."""
        spec = WeightSpec("fp8", "float8", activations="token")
        return cls(spec, fields.names("modules_to_not_convert"), "fbgemm_fp8")

    def weight_spec(self, module: str) -> WeightSpec | None:
        if module == "lm_head" or any(f".{name}." in f".{module}." for name in self.not_converted):
            return None
        return self.spec


@dataclass(frozen=True)
class Gguf:
    """Weights of a GGUF file that stay packed."""

    types: Mapping[str, str]
    """Module → GGUF type."""
    name: str = "gguf"

    def weight_spec(self, module: str) -> WeightSpec | None:
        kind = self.types.get(module)
        if kind not in GGUF_PACKED:
            return None
        bits = 8 if kind == "Q8_0" else 4
        return WeightSpec("gguf", "int", bits=bits, group_size=32, has_minimum=kind == "Q4_1")


@dataclass(frozen=True)
class Online:
    """Plain weights that are quantised while they are loaded, each linear layer of the decoder."""

    name: str

    def weight_spec(self, module: str) -> WeightSpec | None:
        return None if module == "lm_head" else ONLINE[self.name]


GGUF_PACKED = ("Q8_0", "Q4_0", "Q4_1")
"""GGUF types that can stay packed; the others are dequantised while they are loaded."""
ONLINE: Mapping[str, WeightSpec] = {
    "fp8": WeightSpec("online", "float8", activations="token"),
    "int8": WeightSpec("online", "int", bits=8),
    "int4": WeightSpec("online", "int", bits=4, group_size=128, has_zero=True),
}
"""Methods for plain checkpoints: fp8 and int8 with a scale per output row, int4 with one per 128 columns."""
_STORED: Mapping[str, Callable[[Fields], QuantizationMethod]] = {
    "awq": Awq.read,
    "gptq": Gptq.read,
    "fp8": Fp8.read,
    "fbgemm_fp8": Fp8.read_fbgemm,
    "compressed-tensors": CompressedTensors.read,
}
_ALIASES = {"awq_marlin": "awq", "gptq_marlin": "gptq"}
METHODS = (*_STORED, "gguf", "int8", "int4", *_ALIASES)
"""What ``--quantization`` may say. The names of vLLM's kernels for a format stand for the format."""


def read_method(found: Any, where: str = "quantization_config") -> QuantizationMethod | None:
    """From config.json's ``quantization_config``, or another file ``where`` it is; None where there is none.

    Raises ModelConfigError, naming the key, for a method or an option that is not served.
    """
    if not found:
        return None
    fields = Fields(found, where)
    method = str(fields.get("quant_method", "unnamed")).lower()
    if method not in _STORED:
        raise ModelConfigError(f"{where}: method {method!r} is not supported; supported: {', '.join(_STORED)}")
    return _STORED[method](fields)


def choose_method(
    asked: str | None, stored: QuantizationMethod | None, gguf_types: Mapping[str, str] | None
) -> QuantizationMethod | None:
    """The checkpoint's own method, or the one asked for by ``--quantization``; ``gguf_types`` are a GGUF file's.

    Raises ModelConfigError if what is asked for is unknown or not what the checkpoint is.
    """
    if asked is None:
        return stored
    if asked not in METHODS:
        raise ModelConfigError(f"quantization {asked!r} is unknown; known: {', '.join(METHODS)}")
    asked = _ALIASES.get(asked, asked)
    if stored is not None:
        if asked != stored.name:
            raise ModelConfigError(f"quantization {asked!r} was asked for, but the checkpoint is {stored.name!r}")
        return stored
    if asked == "gguf" and gguf_types is not None:
        return Gguf(gguf_types)
    if asked not in ONLINE:
        kind = "is not quantised" if gguf_types is None else "is a GGUF file"
        raise ModelConfigError(f"quantization {asked!r} was asked for, but the checkpoint {kind}")
    return Online(asked)
