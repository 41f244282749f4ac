"""Parameters to and from an Orbax checkpoint, in a form that any number of devices can share.

Parameters are stored by their dotted names as on one device, but for fused weights: their parts (q, k, v; gate, up) are
arrays of their own, ``NAME.0``, ``NAME.1``, …, since each device holds a share of each. A device reads its shares and
puts them together. Arrays are stored in up to ``STORED_PIECES`` pieces along the axis that devices share, so that no
device reads much of another's.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..architectures.base import Architecture, WeightMapping
from ..decoder_config import DecoderConfig
from ..sharding import TP_AXIS, as_in_checkpoint
from .errors import LoadError, name_list
from .kv_scales import split_off_kv_scales, warn_of_absent_scales
from .orbax_index import PARAMS_FOLDER, OrbaxIndex, StoredArray, read_index
from .quantized_source import expand_quantized
from .targets import Target, param_targets

STORED_PIECES = 8
_COPY_AXIS = "copy"
_SCALES = ".attention.kv_scales"
_BYTES_IN_FLIGHT = 10**9
"""Host memory for what is read and not yet on the devices, more only for an array that is larger."""


@dataclass(frozen=True)
class Part:
    """A stored array: a whole parameter, or one of the parts it is fused from."""

    name: str
    shape: tuple[int, ...]
    """As stored."""
    copies: int = 1
    """Devices that hold the same share of it (a KV head on several)."""


@dataclass(frozen=True)
class Layout:
    """One parameter and what it is put together from, along ``axis``."""

    name: str
    axis: int
    parts: tuple[Part, ...]
    leaf: jax.ShapeDtypeStruct
    sharding: NamedSharding
    padding: int = 0
    """Rows of zeros after those stored."""
    repeats: int = 1
    """Columns that each stored one becomes: scales whose group straddles two devices."""

    @property
    def splits_rows(self) -> bool:
        return self.sharding.spec[self.axis : self.axis + 1] == (TP_AXIS,)


def layouts(
    architecture: Architecture, config: DecoderConfig, dtype: jax.typing.DTypeLike, mesh: Mesh
) -> tuple[list[Layout], jax.tree_util.PyTreeDef]:
    """Of all parameters in the order of the tree's leaves; and the tree. ``config`` as split over ``mesh``."""
    plain = as_in_checkpoint(config)
    targets, treedef = param_targets(config, dtype, mesh)
    one_device = Mesh(mesh.devices.reshape(-1)[:1], (TP_AXIS,))
    stored = {name: leaf for name, (leaf, _) in param_targets(plain, dtype, one_device)[0].items()}
    scales, others = split_off_kv_scales(targets)
    mappings, _ = expand_quantized(
        [mapping.split_as(config) for mapping in architecture.weight_mappings(plain)], config, others
    )
    found = {m.target: _layout(m, stored[m.target].shape, targets[m.target]) for m in mappings}
    found |= {name: Layout(name, 0, (Part(name, target[0].shape),), *target) for name, target in scales.items()}
    return [found[name] for name in targets], treedef


def _layout(mapping: WeightMapping, stored: tuple[int, ...], target: Target) -> Layout:
    leaf, sharding = target
    axis = 1 if mapping.num_experts else 0
    sizes = mapping.parts if len(stored) > axis and mapping.parts else (stored[axis],)
    copies = mapping.copies or (1,) * len(sizes)
    names = [mapping.target] if len(sizes) == 1 else [f"{mapping.target}.{index}" for index in range(len(sizes))]
    shapes = [(*stored[:axis], size, *stored[axis + 1 :]) for size in sizes]
    parts = tuple(Part(*part) for part in zip(names, shapes, copies, strict=True))
    repeats = leaf.shape[-1] // stored[-1] if len(stored) == 2 else 1
    return Layout(mapping.target, axis, parts, leaf, sharding, mapping.padding, repeats)


def save_params(folder: Path, params: Any, architecture: Architecture, config: DecoderConfig) -> dict[str, StoredArray]:
    """Writes ``params`` of one device, float types as they are, into a new folder ``params`` below ``folder``.

    ``params`` is emptied: what has been cut for writing is not kept twice. The KV scales of layers that have none
    (1.0) are left out. Returns what was stored.
    """
    leaves = jax.tree.leaves(params)
    params.clear()
    mesh = Mesh(np.array(jax.devices()[:1]), (TP_AXIS,))
    arrays: dict[str, Any] = {}
    found, _ = layouts(architecture, config, jnp.float32, mesh)
    for place, layout in enumerate(found):
        whole, leaves[place] = np.asarray(leaves[place]), None
        if layout.name.endswith(_SCALES) and (whole == 1.0).all():
            continue
        ends = np.cumsum([part.shape[layout.axis] for part in layout.parts])[:-1]
        for part, values in zip(layout.parts, np.split(whole, ends, axis=layout.axis), strict=True):
            arrays[part.name] = _in_pieces(values, layout.sharding.spec)
        del whole
    stored = {name: StoredArray(array.shape, array.dtype.name) for name, array in arrays.items()}
    with ocp.Checkpointer(_handler(0)) as checkpointer:
        checkpointer.save((folder / PARAMS_FOLDER).absolute(), args=ocp.args.PyTreeSave(_nested(arrays)))
    return stored


def _in_pieces(values: np.ndarray, spec: PartitionSpec) -> Any:
    """On several CPU devices, as many as divide the shared axis: Orbax stores what each has by itself."""
    axes = [axis for axis, name in enumerate(spec) if name == TP_AXIS]
    devices = jax.devices("cpu")[:STORED_PIECES]
    count = math.gcd(values.shape[axes[0]], 1 << (len(devices).bit_length() - 1)) if axes else 1
    if count == 1:
        return values
    return jax.device_put(values, NamedSharding(Mesh(np.array(devices[:count]), (TP_AXIS,)), spec))


def restore_params(
    folder: Path, architecture: Architecture, config: DecoderConfig, *, dtype: jax.typing.DTypeLike, mesh: Mesh
) -> Any:
    """The parameters as ``loader.load_params`` returns them. Raises LoadError for another model's or damaged arrays."""
    index = read_index(folder)
    found, treedef = layouts(architecture, config, dtype, mesh)
    absent = [layout for layout in found if layout.name.endswith(_SCALES) and layout.name not in index.arrays]
    present = [layout for layout in found if not layout.name.endswith(_SCALES) or layout.name in index.arrays]
    _check(folder, index, architecture, present, with_scales=config.scales_kv)
    parts = {part.name: (layout, part) for layout in present for part in layout.parts}
    unused = dict.fromkeys(index.arrays.keys() - parts.keys(), ocp.RestoreArgs(restore_type=np.ndarray))
    wanted = _nested(unused | {name: _restore_args(*pair) for name, pair in parts.items()})
    largest = max(math.prod(part.shape) * 4 for _, part in parts.values())
    path = (folder / PARAMS_FOLDER).absolute()
    try:
        with ocp.Checkpointer(_handler(max(_BYTES_IN_FLIGHT, 2 * largest))) as checkpointer, _only_errors():
            item = jax.tree.map(lambda _: 0, wanted)
            restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=item, restore_args=wanted))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise LoadError(f"Orbax cannot read the checkpoint: {reason[0][:300]}", file=path) from error
    arrays = {layout.name: _put_together(layout, restored, index) for layout in present}
    for layout in absent:
        arrays[layout.name] = jax.device_put(np.ones(layout.leaf.shape, np.float32), layout.sharding)
    if absent:
        warn_of_absent_scales(len(absent), config.num_layers)
    return treedef.unflatten([arrays[layout.name] for layout in found])


def _check(
    folder: Path, index: OrbaxIndex, architecture: Architecture, found: Sequence[Layout], *, with_scales: bool
) -> None:
    """The stored arrays against the model's."""
    if index.architecture != architecture.name:
        raise LoadError("architecture", file=folder, expected=architecture.name, found=index.architecture)
    wanted = {part.name: (part, layout.leaf.dtype) for layout in found for part in layout.parts}
    if missing := wanted.keys() - index.arrays.keys():
        raise LoadError(f"the checkpoint lacks {len(missing)} arrays: {name_list(missing)}", file=folder)
    unused = [name for name in index.arrays.keys() - wanted.keys() if with_scales or not name.endswith(_SCALES)]
    if unused:
        raise LoadError(
            f"the checkpoint has {len(unused)} arrays that the model does not use: {name_list(unused)}", file=folder
        )
    for name, (part, dtype) in wanted.items():
        stored = index.arrays[name]
        if stored.shape != part.shape:
            raise LoadError("shape", file=folder, tensor=name, expected=part.shape, found=stored.shape)
        if stored.dtype != dtype.name and not {stored.dtype, dtype.name} <= {"float32", "bfloat16", "float16"}:
            raise LoadError("dtype", file=folder, tensor=name, expected=dtype.name, found=stored.dtype)


def _restore_args(layout: Layout, part: Part) -> ocp.ArrayRestoreArgs:
    """Where the devices' shares of a stored array go."""
    mesh, spec, shape = layout.sharding.mesh, layout.sharding.spec, list(part.shape)
    if layout.splits_rows:
        shape[layout.axis] += layout.padding
        # Neighbours along the axis of copies get the same share.
        places = mesh.devices.reshape(-1, part.copies)
        mesh = Mesh(places, (TP_AXIS, _COPY_AXIS))
    elif layout.repeats > 1:
        spec = PartitionSpec()
    return ocp.ArrayRestoreArgs(
        sharding=NamedSharding(mesh, spec),
        dtype=layout.leaf.dtype,
        global_shape=tuple(shape),
        strict=tuple(shape) == part.shape,
    )


def _put_together(layout: Layout, restored: Mapping[str, Any], index: OrbaxIndex) -> jax.Array:
    """The parameter from its parts, which are taken out of ``restored``."""
    arrays = [_taken(restored, part.name) for part in layout.parts]
    for part, array in zip(layout.parts, arrays, strict=True):
        narrowed = array.dtype == jnp.float16 and index.arrays[part.name].dtype != "float16"
        if narrowed and not bool(jnp.isfinite(array).all()):
            raise LoadError("a weight is beyond the range of float16; use bfloat16 or float32", tensor=part.name)
    shards: list[jax.Array] = []
    by_device = [{shard.device: shard.data for shard in array.addressable_shards} for array in arrays]
    for device, place in layout.sharding.addressable_devices_indices_map(layout.leaf.shape).items():
        pieces = [pieces.pop(device) for pieces in by_device]
        data = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=layout.axis)
        copies = layout.parts[0].copies
        if copies > 1 and not layout.splits_rows:  # a norm over all heads, of which every device has the whole
            data = jnp.repeat(data.reshape(layout.sharding.mesh.size // copies, -1), copies, axis=0).reshape(-1)
        if layout.repeats > 1:
            data = jnp.repeat(data, layout.repeats, axis=-1)
            if not layout.splits_rows:
                assert place is not None
                data = data[place]
        shards.append(data)
    return jax.make_array_from_single_device_arrays(layout.leaf.shape, layout.sharding, shards)


def _handler(bytes_in_flight: int) -> ocp.PyTreeCheckpointHandler:
    """Without compression, which gains little on weights and costs most of the time."""
    in_flight = max(1, math.ceil(bytes_in_flight / 10**9))
    return ocp.PyTreeCheckpointHandler(use_compression=False, restore_concurrent_gb=in_flight)


@contextmanager
def _only_errors() -> Iterator[None]:
    """Orbax warns that the devices are others than when the checkpoint was written, as they are meant to be."""
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        yield
    finally:
        absl.setLevel(level)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as dicts in dicts."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _taken(tree: Mapping[str, Any], name: str) -> jax.Array:
    *path, last = name.split(".")
    node: Any = tree
    for key in path:
        node = node[key]
    return node.pop(last)
