"""What of the products is tuned: with packed weights (``quantized_matmul``), and of experts (``grouped_matmul``)."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .autotune import SHARED_MEMORY_BYTES, Round, compile_candidate, normal, time_calls
from .grouped_matmul import GroupItems, MosaicTiles, grouped_matmul, mosaic_tiles, plan_items
from .grouped_matmul.tiles import TILE_IN, WARPGROUP_ROWS, tile_facts
from .quantized_matmul import quantized_matmul, tuning_facts
from .quantized_matmul.config import MIN_TILE, MosaicTuningConfig, mosaic_tuning
from .tuning import forced, num_multiprocessors

WEIGHT_BYTES = 1 << 30
"""Of the weights that the layers of a timed chain take turns with: many times the L2 cache."""
MAX_LAYERS = 16


@dataclass(frozen=True)
class QuantizedTask:
    """``num_tokens`` tokens times a weight ``[out_size, in_size]`` of 4 or 8 bits."""

    out_size: int
    in_size: int
    bits: int
    group_size: int
    has_zero: bool
    num_tokens: int
    dtype: str = "bfloat16"
    operation: str = "quantized_matmul"

    @property
    def title(self) -> str:
        shape = f"w{self.bits}a16 {self.out_size} x {self.in_size}, groups of {self.group_size}"
        return f"{self.operation}, {shape}, {self.num_tokens} tokens"

    def when(self) -> dict[str, Any]:
        return tuning_facts(self.num_tokens, (self.out_size, self.in_size), self.bits, self.group_size)

    def default(self) -> MosaicTuningConfig:
        return mosaic_tuning(
            self.num_tokens,
            self.out_size,
            self.in_size,
            bits=self.bits,
            group_size=self.group_size,
            num_multiprocessors=num_multiprocessors(),
        )

    def rounds(self) -> Sequence[Round]:
        return (self._tiles, self._splits)

    def fields(self, config: MosaicTuningConfig) -> dict[str, Any]:
        return asdict(config)

    def _tiles(self, best: MosaicTuningConfig) -> Iterator[MosaicTuningConfig]:
        """What a thread block multiplies in a turn."""
        yield best
        for warpgroups in (1, 2, 4):
            for tile_in in (64, 128, 256):
                for tile_tokens in (8, 16, 32, 64):
                    candidate = replace(best, warpgroups=warpgroups, tile_in=tile_in, tile_tokens=tile_tokens)
                    if self._fits(candidate) and self.num_tokens // 4 <= tile_tokens < 2 * self.num_tokens:
                        yield candidate

    def _splits(self, best: MosaicTuningConfig) -> Iterator[MosaicTuningConfig]:
        """How much is on its way, and how many thread blocks there are."""
        for stages in (2, 3, 4, 6, 8):
            for num_splits in (1, 2, 4, 8, 16):
                candidate = replace(best, stages=stages, num_splits=num_splits)
                if self._fits(candidate):
                    yield candidate

    def _fits(self, config: MosaicTuningConfig) -> bool:
        """Whether the kernel can be built so."""
        tile, group = config.tile_in, self.group_size
        stage = tile * (config.tile_out * self.bits // 8 + 2 * config.tile_tokens)
        return (
            self.out_size % config.tile_out == 0
            and self.in_size % tile == 0
            and (group % tile == 0 or tile % group == 0)
            and config.num_splits <= self.in_size // tile
            and config.stages * stage <= SHARED_MEMORY_BYTES
            and tile >= MIN_TILE
        )

    def measure(self, config: MosaicTuningConfig) -> tuple[float, ...]:
        weight_bytes = self.out_size * self.in_size * self.bits // 8
        weights = [self.make_weight(i) for i in range(max(2, min(MAX_LAYERS, WEIGHT_BYTES // weight_bytes)))]
        x = normal((self.num_tokens, self.in_size), self.dtype, 0)
        with forced(self.operation, asdict(config)):
            program = compile_candidate(self.chain, x, weights)
        return (time_calls(lambda x: program(x, weights), x) / len(weights),)

    def chain(self, x: jax.Array, weights: list[tuple[jax.Array, ...]], interpret: Any = None) -> jax.Array:
        """Layers after one another: a few numbers of a result become the next one's tokens'."""
        for weight in weights:
            options = {"bits": self.bits, "group_size": self.group_size, "interpret": interpret}
            result = quantized_matmul(x, *weight, implementation="mosaic", **options)
            x = x.at[_two(x), :8].set(result[:2, :8])
        return x

    def make_weight(self, seed: int) -> tuple[jax.Array, ...]:
        """Random codes, scales and, if there are any, zero points."""
        keys = jax.random.split(jax.random.key(seed), 3)
        groups = (self.out_size, self.in_size // self.group_size)
        codes = jax.random.bits(keys[0], (self.out_size, self.in_size * self.bits // 32), jnp.uint32)
        scale = jax.random.uniform(keys[1], groups, jnp.float32, 0.5, 1.5) * self.in_size**-0.5 / 2 ** (self.bits - 2)
        weight = (jax.lax.bitcast_convert_type(codes, jnp.int32), scale.astype(self.dtype))
        limit = 1 << (self.bits - 1)
        return (*weight, jax.random.randint(keys[2], groups, -limit, limit, jnp.int8)) if self.has_zero else weight


@dataclass(frozen=True)
class GroupedTask:
    """The two products of ``num_experts`` experts of ``hidden`` by ``ffn``, ``rows_a_group`` rows each on average."""

    num_experts: int
    hidden: int
    ffn: int
    rows_a_group: int
    dtype: str = "bfloat16"
    operation: str = "grouped_matmul"

    @property
    def title(self) -> str:
        shape = f"{self.num_experts} experts of {self.hidden} x {self.ffn}"
        return f"{self.operation}, {shape}, {self.rows_a_group} rows each"

    @property
    def num_rows(self) -> int:
        return self.num_experts * self.rows_a_group

    @property
    def out_sizes(self) -> tuple[int, int]:
        return 2 * self.ffn, self.hidden

    def when(self) -> dict[str, Any]:
        return tile_facts(self.num_rows, self.num_experts, self.out_sizes)

    def default(self) -> MosaicTiles:
        return mosaic_tiles(self.num_rows, self.num_experts, self.out_sizes)

    def rounds(self) -> Sequence[Round]:
        return (self._tiles, self._stages)

    def fields(self, config: MosaicTiles) -> dict[str, Any]:
        return asdict(config)

    def _tiles(self, best: MosaicTiles) -> Iterator[MosaicTiles]:
        yield best
        for warpgroups in (1, 2, 4):
            for tile_out in (64, 128, 256):
                candidate = replace(best, warpgroups=warpgroups, tile_out=tile_out)
                if self._fits(candidate):
                    yield candidate

    def _stages(self, best: MosaicTiles) -> Iterator[MosaicTiles]:
        for stages in (2, 3, 4, 5, 6, 8):
            candidate = replace(best, stages=stages)
            if self._fits(candidate):
                yield candidate

    def _fits(self, tiles: MosaicTiles) -> bool:
        """Whether the kernel can be built so: a result takes the place of tiles of the weight."""
        rows = tiles.warpgroups * WARPGROUP_ROWS
        weights = max(tiles.stages * tiles.tile_out * TILE_IN, rows * tiles.tile_out)
        shared = 2 * (tiles.stages * rows * TILE_IN + weights)
        return all(size % tiles.tile_out == 0 for size in self.out_sizes) and shared <= SHARED_MEMORY_BYTES

    def measure(self, config: MosaicTiles) -> tuple[float, ...]:
        layer_bytes = 2 * 3 * self.num_experts * self.hidden * self.ffn
        layers = [self.make_experts(i) for i in range(max(2, min(MAX_LAYERS, WEIGHT_BYTES // layer_bytes)))]
        x = normal((self.num_rows, self.hidden), self.dtype, 0)
        program = compile_candidate(partial(self.chain, tiles=config), x, layers, self.group_ends())
        ends = jnp.asarray(self.group_ends())
        return (time_calls(lambda x: program(x, layers, ends), x) / len(layers),)

    def chain(
        self,
        x: jax.Array,
        layers: list[tuple[jax.Array, jax.Array]],
        group_ends: jax.Array,
        tiles: MosaicTiles,
        interpret: Any = None,
    ) -> jax.Array:
        """Layers after one another, what is planned for each included."""
        for gate_up, down in layers:
            items: GroupItems = plan_items(group_ends, len(x), tiles.rows)
            product = partial(grouped_matmul, items=items, tiles=tiles, interpret=interpret)
            result = product(product(x, gate_up, gated=True), down)
            x = x.at[_two(x), :8].set(result[:2, :8])
        return x

    def make_experts(self, seed: int) -> tuple[jax.Array, jax.Array]:
        """Random ``gate_up [E, 2F, D]`` and ``down [E, D, F]``."""
        shapes = (self.num_experts, 2 * self.ffn, self.hidden), (self.num_experts, self.hidden, self.ffn)
        gate_up, down = (normal(shape, self.dtype, 2 * seed + i) for i, shape in enumerate(shapes))
        return gate_up * self.hidden**-0.5, down * self.ffn**-0.5

    def group_ends(self) -> np.ndarray:
        """As if each row chose its expert at random; i32 ``[E]``."""
        chosen = np.random.default_rng(0).integers(self.num_experts, size=self.num_rows)
        return np.bincount(chosen, minlength=self.num_experts).cumsum(dtype=np.int32)


def _two(x: jax.Array) -> jax.Array:
    """Its first rows: of one alone, XLA would make a copy outside the command buffer."""
    return jnp.arange(min(2, len(x)))
