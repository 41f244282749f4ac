"""Each device's share of a checkpoint is read by itself: the right bytes, and no others."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tiny_model import tiny_model

from octavo.models.architectures import get_architecture
from octavo.models.architectures.base import WeightMapping
from octavo.models.decoder import param_partition_specs
from octavo.models.decoder_config import DecoderConfig
from octavo.models.loading import loader
from octavo.models.loading.gguf_source import GGUFSource
from octavo.models.loading.resolve import resolve_model
from octavo.models.loading.safetensors_source import SafetensorsSource
from octavo.models.sharding import split_over

SHARDS = 4


class CountingSlice:
    """What ``safe_open`` gives for a tensor, counting what is read of it."""

    def __init__(self, real: Any, counts: list[int]) -> None:
        self.real, self.counts = real, counts

    def __getitem__(self, index: Any) -> np.ndarray:
        values = self.real[index]
        self.counts.append(values.nbytes)
        return values


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read from a safetensors file."""
    found: list[int] = []
    real = SafetensorsSource._handle

    class Handle:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def get_slice(self, name: str) -> CountingSlice:
            return CountingSlice(self.handle.get_slice(name), found)

    monkeypatch.setattr(SafetensorsSource, "_handle", lambda self, file: Handle(real(self, file)))
    return found


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, DecoderConfig, list[WeightMapping]]:
    """4 query heads, 2 KV heads, a vocabulary of 301; as 4 devices share it."""
    folder = tiny_model(tmp_path, vocab_size=301)
    resolved = resolve_model(str(folder))
    architecture = get_architecture(resolved.config.architecture)
    plain = architecture.decoder_config(resolved.config)
    shared = split_over(plain, SHARDS)
    return folder, shared, [mapping.split_as(shared) for mapping in architecture.weight_mappings(plain)]


def axes_of(config: DecoderConfig) -> dict[str, tuple[Any, ...]]:
    """Parameter -> its partition."""
    leaves = jax.tree_util.tree_leaves_with_path(
        param_partition_specs(config), is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec)
    )
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(spec) for path, spec in leaves}


def place_of(shape: tuple[int, ...], axes: tuple[Any, ...], shard: int) -> tuple[tuple[int, int], ...]:
    padded = (*axes, *(None,) * (len(shape) - len(axes)))
    return tuple(
        (0, size) if axis is None else (shard * size // SHARDS, (shard + 1) * size // SHARDS)
        for size, axis in zip(shape, padded, strict=True)
    )


def read(source: Any, mapping: WeightMapping, place: tuple[tuple[int, int], ...], num_shards: int) -> np.ndarray:
    with ThreadPoolExecutor(2) as pool:
        return loader._assemble(source, mapping, np.dtype(np.float32), num_shards, place, pool)


def test_a_shard_reads_its_own_bytes_only(model, counts) -> None:
    folder, config, mappings = model
    axes, source = axes_of(config), SafetensorsSource(folder)
    split = 0
    for mapping in mappings:
        everything = tuple((0, size) for size in mapping.shape)
        whole = read(source, mapping, everything, SHARDS)
        for shard in range(SHARDS):
            place = place_of(mapping.shape, axes[mapping.target], shard)
            counts.clear()
            found = read(source, mapping, place, SHARDS)
            np.testing.assert_array_equal(found, whole[tuple(slice(*ends) for ends in place)])
            padding = max(0, place[0][1] - (mapping.shape[0] - mapping.padding)) * math.prod(found.shape[1:])
            assert sum(counts) == found.nbytes - 4 * padding, mapping.target
            split += "tp" in axes[mapping.target] and sum(counts) < whole.nbytes / 2
    assert split == SHARDS * (2 + 4 * config.num_layers)


def test_padding_is_zeros(model) -> None:
    folder, _, mappings = model
    embed = next(mapping for mapping in mappings if mapping.target == "embed.weight")
    last = read(SafetensorsSource(folder), embed, ((228, 304), (0, 64)), SHARDS)
    assert np.all(last[-3:] == 0)
    assert np.all(np.any(last[:-3] != 0, axis=1))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32])
def test_columns_of_a_gguf_file_within_blocks_and_across_them(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    values = np.random.default_rng(0).standard_normal((6, 128)).astype(np.float32)
    file = tmp_path / "model.gguf"
    writer = GGUFWriter(str(file), "llama")
    stored = quantize(values, kind)
    writer.add_tensor("blk.0.ffn_down.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = dequantize(stored, kind)
    source = GGUFSource(file, {})
    for start, stop in ((0, 128), (32, 64), (48, 80), (3, 5), (100, 128)):
        out = np.empty((4, stop - start), np.float32)
        source.read_rows("model.layers.0.mlp.down_proj.weight", 1, 5, out, slice(start, stop))
        np.testing.assert_array_equal(out, expected[1:5, start:stop])
