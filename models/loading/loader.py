"""A checkpoint -> the decoder's parameters on their devices, one tensor at a time."""

import importlib
import os
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm  # type: ignore[import-untyped]

from ..architectures.base import Architecture, WeightMapping
from ..decoder_config import DecoderConfig
from ..sharding import as_in_checkpoint
from .dummy import dummy_params
from .errors import LoadError, name_list
from .gguf_source import GGUFSource
from .kv_scales import kv_scale_pattern, read_kv_scales, split_off_kv_scales
from .quantized_source import Field, QuantizedSource, expand_quantized
from .resolve import ResolvedModel, WeightFormat, resolve_model
from .safetensors_source import SafetensorsSource
from .source import WeightSource
from .targets import Target, param_targets

_CHUNK_ELEMENTS = 1 << 17
"""What one thread converts at a time: the temporaries of dequantising stay in cache, and every core is busy."""
_MAX_THREADS = 8
Place = tuple[tuple[int, int], ...]
"""First and last + 1 along each axis of a parameter."""


def load_params(
    model_path: Path,
    architecture: Architecture,
    decoder_config: DecoderConfig,
    *,
    dtype: jax.typing.DTypeLike,
    mesh: Mesh,
    load_format: WeightFormat,
    progress: bool = False,
) -> Any:
    """The nested dict of arrays that ``models.decoder`` describes, sharded over ``mesh`` (axis "tp").

    ``decoder_config`` is as ``sharding.split_over`` made it for the mesh. Each device's share is read from the file by
    itself, none of another's, and cast to ``dtype`` on the host; there is one share of one tensor at a time, beside the
    pages of at most two open files. ``progress`` shows a bar of bytes on standard error. Raises LoadError before
    anything is read if a tensor is missing, unexpected, or of another shape or dtype than the model's.
    """
    if load_format == "dummy":
        return dummy_params(decoder_config, dtype=dtype, mesh=mesh)
    if load_format == "orbax":
        return _load_orbax().restore_params(model_path, architecture, decoder_config, dtype=dtype, mesh=mesh)
    targets, treedef = param_targets(decoder_config, dtype, mesh)
    kv_scales, targets_of_mappings = split_off_kv_scales(targets)
    mappings = [
        mapping.split_as(decoder_config) for mapping in architecture.weight_mappings(as_in_checkpoint(decoder_config))
    ]
    expanded, fields = expand_quantized(mappings, decoder_config, targets_of_mappings)
    _check_mappings(expanded, targets_of_mappings, architecture.name)
    with closing(_open(model_path, load_format, mappings, fields)) as source:
        mappings = expanded
        ignorable = (*architecture.ignorable_names(decoder_config), kv_scale_pattern(architecture))
        mappings = architecture.as_named(mappings, source.tensors)
        _check_tensors(source, mappings, ignorable, model_path)
        arrays = read_kv_scales(source, architecture, kv_scales)
        arrays |= _read(source, mappings, targets, progress)
    return treedef.unflatten([arrays[name] for name in targets])


def _load_orbax() -> Any:
    """Importing Orbax takes a second, which a start from other files need not wait for."""
    return importlib.import_module(".orbax_checkpoint", __package__)


def _open(
    path: Path, load_format: WeightFormat, mappings: list[WeightMapping], fields: Mapping[str, Field]
) -> WeightSource:
    """The checkpoint, ``fields`` of quantised weights among its tensors."""
    source = _open_plain(path, load_format, mappings)
    names = (name for mapping in mappings for name in mapping.sources)
    return QuantizedSource(source, fields, names) if fields else source


def _open_plain(path: Path, load_format: WeightFormat, mappings: list[WeightMapping]) -> WeightSource:
    if load_format == "safetensors":
        return SafetensorsSource(path)
    heads = {
        name: heads
        for mapping in mappings
        if mapping.permuted_heads
        for name, heads in zip(mapping.sources, mapping.permuted_heads, strict=True)
    }
    return GGUFSource(path, heads)


def _check_mappings(mappings: list[WeightMapping], targets: dict[str, Target], architecture: str) -> None:
    """The architecture's table against the decoder's parameters."""
    names = [mapping.target for mapping in mappings]
    if len(names) != len(set(names)) or set(names) != targets.keys():
        differing = set(names) ^ targets.keys()
        raise LoadError(f"{architecture}'s table of weights does not fit the decoder: {name_list(differing)}")
    for mapping in mappings:
        expected = targets[mapping.target][0].shape
        if mapping.shape != expected:
            raise LoadError(f"{architecture}'s shape of {mapping.target}", expected=expected, found=mapping.shape)


def _check_tensors(source: WeightSource, mappings: list[WeightMapping], ignorable: tuple[str, ...], path: Path) -> None:
    """Each tensor of the model is there, nothing else is, and all have the right shape and a readable dtype."""
    wanted = {name: shape for m in mappings for name, shape in zip(m.sources, m.stored_shapes, strict=True)}
    if missing := wanted.keys() - source.tensors.keys():
        raise LoadError(f"the checkpoint lacks {len(missing)} tensors: {name_list(missing)}", file=path)
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignorable) or r"(?!)")
    unexpected = [name for name in source.tensors if name not in wanted and not ignored.fullmatch(name)]
    if unexpected:
        raise LoadError(
            f"the checkpoint has {len(unexpected)} tensors that the model does not use: {name_list(unexpected)}",
            file=path,
        )
    for name, shape in wanted.items():
        info = source.tensors[name]
        if info.shape != shape:
            raise LoadError("shape", file=info.file, tensor=name, expected=shape, found=info.shape)
        source.check_readable(name)


def _read(
    source: WeightSource, mappings: list[WeightMapping], targets: dict[str, Target], progress: bool
) -> dict[str, jax.Array]:
    # By file, so that each file is opened once (a fused tensor may span two neighbours).
    ordered = sorted(mappings, key=lambda mapping: str(source.tensors[mapping.sources[0]].file))
    num_bytes = {m.target: sum(source.tensors[name].num_bytes for name in m.sources) for m in ordered}
    arrays: dict[str, jax.Array] = {}
    bar = tqdm(
        total=sum(num_bytes.values()),
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=not progress,
        file=sys.stderr,
    )
    with bar, ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        for mapping in ordered:
            arrays[mapping.target] = _read_one(source, mapping, *targets[mapping.target], pool)
            bar.update(num_bytes[mapping.target])
    return arrays


def _read_one(
    source: WeightSource,
    mapping: WeightMapping,
    leaf: jax.ShapeDtypeStruct,
    sharding: NamedSharding,
    pool: ThreadPoolExecutor,
) -> jax.Array:
    """One parameter on its devices. Waits, so that the host's copy is gone before the next one is made."""
    shards: dict[Place, list[jax.Device]] = {}
    arrays: list[jax.Array] = []
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        assert index is not None
        place = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
        shards.setdefault(place, []).append(device)
    for place, devices in shards.items():
        buffer = _assemble(source, mapping, np.dtype(leaf.dtype), sharding.mesh.size, place, pool)
        arrays += [jax.device_put(buffer, device) for device in devices]
        jax.block_until_ready(arrays)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def _assemble(
    source: WeightSource,
    mapping: WeightMapping,
    dtype: np.dtype,
    num_shards: int,
    place: Place,
    pool: ThreadPoolExecutor,
) -> np.ndarray:
    """The part of a parameter at ``place``, from its sources."""
    buffer = np.empty([end - start for start, end in place], dtype)
    if not mapping.num_experts:
        _fill(buffer, source, mapping, num_shards, place, pool)
        return buffer
    for expert in range(*place[0]):
        _fill(buffer[expert - place[0][0]], source, mapping.expert(expert), num_shards, place[1:], pool)
    return buffer


def _fill(
    buffer: np.ndarray,
    source: WeightSource,
    mapping: WeightMapping,
    num_shards: int,
    place: Place,
    pool: ThreadPoolExecutor,
) -> None:
    """``buffer`` with a matrix or vector at ``place``, by row ranges in parallel."""
    (row, row_end), *rest = place
    buffer[max(0, mapping.shape[0] - mapping.padding - row) :] = 0
    columns = slice(*rest[0]) if rest and rest[0] != (0, mapping.shape[1]) else None
    step = max(1, _CHUNK_ELEMENTS // max(1, int(np.prod(buffer.shape[1:]))))
    jobs = []
    for index, first, last, at in mapping.pieces(num_shards):
        first, last, at = first + max(0, row - at), min(last, first + row_end - at), max(at, row) - row
        for start in range(first, last, step):
            stop = min(start + step, last)
            rows = buffer[at + start - first : at + stop - first]
            read = _read_transposed if mapping.transposed else type(source).read_rows
            jobs.append(pool.submit(read, source, mapping.sources[index], start, stop, rows, columns))
    for job in jobs:
        job.result()


def _read_transposed(
    source: WeightSource, name: str, start: int, stop: int, out: np.ndarray, columns: slice | None
) -> None:
    """Fills ``out`` with rows of our matrix, which are columns of the stored one."""
    first, last = (0, source.tensors[name].shape[0]) if columns is None else (columns.start, columns.stop)
    stored = np.empty((last - first, stop - start), out.dtype)
    source.read_rows(name, first, last, stored, slice(start, stop))
    out[...] = stored.T


__all__ = ["ResolvedModel", "load_params", "resolve_model"]
