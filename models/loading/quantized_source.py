"""Quantised checkpoints for the loader: each field of a quantised weight as if it were a tensor of the checkpoint."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..architectures.base import WeightMapping
from ..decoder_config import DecoderConfig
from ..quantization.spec import WeightSpec
from .errors import LoadError
from .quantized_float import FORMATS
from .quantized_reader import Module, WeightReader
from .source import TensorInfo, WeightSource, copy_cast
from .targets import Target

_LINEAR = re.compile(r"layers\.(\d+)\.\w+\.(\w+)\.weight")
_ROWS_ELEMENTS = 1 << 20
"""Weights that are unpacked at a time, by one thread."""


@dataclass(frozen=True)
class Field:
    """One array of a quantised weight, under a name that no checkpoint has: ``MODULE.weight.FIELD``."""

    module: str
    name: str
    shape: tuple[int, ...]
    spec: WeightSpec
    weight_shape: tuple[int, int]
    """Of the plain weight: (out, in)."""


def expand_quantized(
    mappings: Iterable[WeightMapping], config: DecoderConfig, targets: Mapping[str, Target]
) -> tuple[list[WeightMapping], dict[str, Field]]:
    """The mappings of quantised weights as one of each array; and the sources of these, by name."""
    expanded: list[WeightMapping] = []
    fields: dict[str, Field] = {}
    for mapping in mappings:
        match = _LINEAR.fullmatch(mapping.target)
        specs = config.layers[int(match[1])].weight_specs(match[2]) if match else ()
        if not specs:
            expanded.append(mapping)
            continue
        for target in targets:
            if target.startswith(f"{mapping.target}."):
                suffix = target.removeprefix(f"{mapping.target}.")
                expanded.append(_field_mapping(mapping, specs, suffix, targets[target][0].shape, fields))
    return expanded, fields


def _field_mapping(
    mapping: WeightMapping,
    specs: Sequence[WeightSpec | None],
    suffix: str,
    shape: tuple[int, ...],
    fields: dict[str, Field],
) -> WeightMapping:
    """The mapping of one array, its sources entered into ``fields``."""
    target = f"{mapping.target}.{suffix}"
    sources = list(zip(mapping.sources, mapping.shapes, specs, strict=True))
    *part, name = re.sub(r"^parts\.(\d+)$", r"parts.\1.", suffix).split(".")
    if part:
        index = int(part[1])
        copies = (mapping.copies[index],) if mapping.copies else ()
        heads = (mapping.permuted_heads[index],) if mapping.permuted_heads else ()
        rows = mapping.shapes[index][0]
        mapping = replace(mapping, permuted_heads=heads, parts=(rows,), copies=copies)
        sources = [sources[index]]
    if not name:  # a part that is not quantised
        return replace(mapping, target=target, sources=(sources[0][0],), shapes=(sources[0][1],))
    names, shapes = [], []
    for source, weight_shape, spec in sources:
        assert spec is not None
        field_shape = _field_shape(name, shape, weight_shape)
        names.append(f"{source}.{name}")
        shapes.append(field_shape)
        module = source.removesuffix(".weight")
        fields[names[-1]] = Field(module, name, field_shape, spec, (weight_shape[0], weight_shape[1]))
    if len(shape) == 1:
        mapping = replace(mapping, parts=(), copies=())
    return replace(mapping, target=target, sources=tuple(names), shapes=tuple(shapes))


def _field_shape(name: str, shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> tuple[int, ...]:
    if name == "input_scale":
        return (1,)
    return shape if len(shape) == 1 else (weight_shape[0], shape[1])


class QuantizedSource:
    """A checkpoint whose quantised weights are offered as ``fields``, in place of the tensors they are stored in.

    ``names`` are the plain tensors of the model. Raises LoadError for a tensor that is missing or of another shape or
    dtype than its format has.
    """

    def __init__(self, base: WeightSource, fields: Mapping[str, Field], names: Iterable[str]) -> None:
        self._base, self._fields = base, fields
        self._readers: dict[str, WeightReader] = {}
        wanted, infos = set(names), dict(base.tensors)
        for full_name, field in fields.items():
            reader = self._readers.get(field.module)
            if reader is None:
                reader = self._readers[field.module] = _reader(base, field, fields)
                for used in reader.tensor_names():
                    infos.pop(used, None)
                self._drop_empty_bias(f"{field.module}.bias", field.weight_shape[0], wanted, infos)
            num_bytes = reader.num_bytes() if field.name in ("packed", "weight") else 0
            infos[full_name] = TensorInfo(full_name, field.shape, field.spec.format, num_bytes, reader.file)
        self.tensors: Mapping[str, TensorInfo] = infos

    def _drop_empty_bias(self, name: str, size: int, wanted: set[str], infos: dict[str, TensorInfo]) -> None:
        """Some GPTQ checkpoints have biases of zeros that the model has not."""
        if name not in infos or name in wanted:
            return
        info = infos[name]
        if info.shape != (size,):
            raise LoadError("shape", file=info.file, tensor=name, expected=(size,), found=info.shape)
        self._base.check_readable(name)
        values = np.empty(info.shape, np.float32)
        self._base.read_rows(name, 0, size, values)
        if not values.any():
            del infos[name]

    def check_readable(self, name: str) -> None:
        if name not in self._fields:
            self._base.check_readable(name)

    def read_rows(self, name: str, start: int, stop: int, out: np.ndarray, columns: slice | None = None) -> None:
        field = self._fields.get(name)
        if field is None:
            self._base.read_rows(name, start, stop, out, columns)
            return
        reader, info = self._readers[field.module], self.tensors[name]
        if len(field.shape) == 1:
            copy_cast(reader.vector(field.name)[start:stop], out, info)
            return
        columns = slice(0, field.shape[1]) if columns is None else columns
        step = max(1, _ROWS_ELEMENTS * field.shape[1] // (field.weight_shape[1] * (columns.stop - columns.start)))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            copy_cast(reader.rows(field.name, first, last, columns), out[first - start : last - start], info)

    def close(self) -> None:
        self._base.close()


def _reader(base: WeightSource, field: Field, fields: Mapping[str, Field]) -> WeightReader:
    num_groups = fields[f"{field.module}.weight.scale"].shape[1]
    module = Module(base, field.module, field.spec, field.weight_shape, field.weight_shape[1] // num_groups)
    reader = FORMATS[field.spec.format](module)
    missing = [name for name in reader.required() if name not in base.tensors]
    if missing:
        raise LoadError(f"the checkpoint lacks {missing[0]}, which {field.spec.format} weights have")
    reader.check()
    return reader
