"""Calibration for ``octavo quantize``: samples of a text, run through the decoder layer by layer, and what is kept of
the inputs of each linear layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..models.attention_metadata import AttentionMetadata
from ..models.decoder import DecoderLayer
from ..models.decoder_config import DecoderConfig, LayerSpec
from ..models.kv_cache import KVCacheSpec
from ..models.layers.rope import RopeTable, rope_table
from ..models.quantization.activation_aware import Inputs
from ..models.sharding import ONE_DEVICE
from .errors import ConfigError
from .tokenizer import Tokenizer

_BLOCK_SIZE = 16
LINEARS = {
    "qkv": ("attention", "qkv"),
    "o": ("attention", "o"),
    "gate_up": ("mlp", "gate_up"),
    "up": ("mlp", "up"),
    "down": ("mlp", "down"),
}
"""Part of the decoder → where a layer has it."""
Sums = dict[str, tuple[jax.Array, jax.Array]]
"""Part → sums over tokens of ``x xᵀ`` and of ``|x|``."""


@dataclass(frozen=True)
class Samples:
    """Which text a model is calibrated with."""

    file: Path
    count: int = 128
    length: int = 512
    """Tokens of each."""

    def read(self, tokenizer: Tokenizer) -> np.ndarray:
        """i32 ``[count, length]``: spread evenly over the text, each begun as the tokenizer begins a text.

        Raises ConfigError for a file that cannot be read, is not UTF-8, or is too short.
        """
        try:
            text = self.file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"calibration file {self.file} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"calibration file {self.file} is not UTF-8: {error.reason} at byte {error.start}"
            ) from error
        begin = tokenizer.encode("")
        ids, own = tokenizer.encode(text, add_special_tokens=False), self.length - len(begin)
        if own < 1 or len(ids) < self.count * own:
            raise ConfigError(
                f"calibration file {self.file} is too short: {len(ids)} tokens, but {self.count} samples of "
                f"{self.length} take {self.count * max(own, 1)}; give a longer text, or fewer or shorter samples"
            )
        starts = np.linspace(0, len(ids) - own, self.count).astype(int)
        return np.asarray([begin + ids[start : start + own] for start in starts], np.int32)


class _Recorder:
    """Stands in a layer's place for one linear layer, and notes what it is given."""

    def __init__(self, linear: Any, name: str, seen: dict[str, jax.Array]) -> None:
        self._linear, self._name, self._seen = linear, name, seen

    def __call__(self, x: jax.Array) -> jax.Array:
        self._seen[self._name] = x
        return self._linear(x)

    def split(self, x: jax.Array, *sizes: Any) -> list[jax.Array]:
        self._seen[self._name] = x
        return self._linear.split(x, *sizes)


class LayerRunner:
    """Runs samples i32 ``[N, L]`` through one layer after the other, in float32; keeps their hidden states."""

    def __init__(self, config: DecoderConfig, length: int) -> None:
        self._config = config
        num_blocks = -(-length // _BLOCK_SIZE) + 1
        spec = KVCacheSpec(1, num_blocks, config.num_kv_heads, _BLOCK_SIZE, config.head_dim, jnp.dtype(jnp.float32))
        self._kv = jnp.zeros(spec.layer_shape, spec.dtype)
        positions = jnp.arange(length, dtype=jnp.int32)
        metadata = AttentionMetadata(
            positions=positions,
            slot_mapping=positions + _BLOCK_SIZE,  # block 0 is the null block
            block_tables=jnp.arange(1, num_blocks, dtype=jnp.int32)[None],
            query_start_loc=jnp.asarray([0, length], jnp.int32),
            seq_lens=jnp.asarray([length], jnp.int32),
            decode_only=False,
        )
        windows = (layer.window for layer in config.layers)
        self._metadata = metadata.with_xla_plans(windows, _BLOCK_SIZE, jax.default_backend())
        self._ropes = {spec: rope_table(positions, spec) for spec in config.rope_specs}
        self._graphs: dict[LayerSpec, nnx.GraphDef[DecoderLayer]] = {}

    def outputs(self, layer: LayerSpec, params: dict[str, Any], hidden: np.ndarray) -> np.ndarray:
        """``hidden [N, L, D]`` → the same after the layer."""
        after, on_device = np.empty_like(hidden), jax.tree.map(jnp.asarray, params)
        for index, sample in enumerate(hidden):
            after[index] = _outputs(*self._arguments(layer, on_device, sample))
        return after

    def inputs(self, layer: LayerSpec, params: dict[str, Any], hidden: np.ndarray) -> Mapping[str, Inputs]:
        """What the layer's linear parts are given for ``hidden [N, L, D]``: means over all its tokens."""
        sums, on_device = None, jax.tree.map(jnp.asarray, params)
        for sample in hidden:
            found = _input_sums(*self._arguments(layer, on_device, sample))
            sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
        assert sums is not None
        count = hidden.shape[0] * hidden.shape[1]
        return {name: Inputs(*(np.asarray(total) / np.float32(count) for total in pair)) for name, pair in sums.items()}

    def _arguments(self, layer: LayerSpec, params: dict[str, Any], x: np.ndarray) -> tuple[Any, ...]:
        if layer not in self._graphs:
            made = nnx.eval_shape(
                lambda: DecoderLayer(self._config, layer, dtype=jnp.dtype(jnp.float32), placement=ONE_DEVICE)
            )
            self._graphs[layer] = nnx.split(made)[0]
        rope = None if layer.rope is None else self._ropes[layer.rope]
        return self._graphs[layer], params, x, self._kv, rope, self._metadata


@partial(jax.jit, static_argnums=0)
def _outputs(
    graph: nnx.GraphDef[DecoderLayer],
    params: dict[str, Any],
    x: jax.Array,
    kv: jax.Array,
    rope: RopeTable | None,
    metadata: AttentionMetadata,
) -> jax.Array:
    return nnx.merge(graph, params)(x, kv, rope, metadata)[0]


@partial(jax.jit, static_argnums=0)
def _input_sums(
    graph: nnx.GraphDef[DecoderLayer],
    params: dict[str, Any],
    x: jax.Array,
    kv: jax.Array,
    rope: RopeTable | None,
    metadata: AttentionMetadata,
) -> Sums:
    layer, seen = nnx.merge(graph, params), dict[str, jax.Array]()
    for name, (block, part) in LINEARS.items():
        module = getattr(layer, block)
        if hasattr(module, part):
            setattr(module, part, _Recorder(getattr(module, part), name, seen))
    layer(x, kv, rope, metadata)
    return {name: (inputs.T @ inputs, jnp.abs(inputs).sum(0)) for name, inputs in seen.items()}
