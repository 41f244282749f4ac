"""The grouped product of experts: which rows an item has, interpreted against NumPy, compiled for an H200."""

import importlib
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.aot import aot_missing, compile_for
from octavo.pallas_kernels.compat import mosaic_missing
from octavo.pallas_kernels.grouped_matmul import (
    GroupItems,
    MosaicTiles,
    grouped_matmul,
    mosaic_tiles,
    plan_items,
    tiles_obstacle,
)
from octavo.pallas_kernels.grouped_matmul.items import num_items

NEEDS_MOSAIC = pytest.mark.skipif(mosaic_missing() is not None, reason=str(mosaic_missing()))
SIZES = {"uneven": (3, 0, 70, 1), "one": (0, 128, 0), "none": (0, 0), "long": (130, 5, 0, 64), "single rows": (1,) * 5}
SIZES["many groups, few rows"] = (0,) * 9 + (2, 0, 1) + (0,) * 8
SIZES["on the edge of a run"] = (64, 64, 0, 128, 1, 63)


def ends_of(sizes: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.cumsum(sizes), jnp.int32)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("padding", [0, 3, 200])
def test_every_row_is_in_one_item_of_its_group(sizes: tuple[int, ...], rows: int, padding: int) -> None:
    num_rows = sum(sizes) + padding
    items = plan_items(ends_of(sizes), num_rows, rows)
    assert items.group.shape == (num_items(num_rows, len(sizes), rows),)
    found = [
        (row, group)
        for group, first, count in zip(*(np.asarray(field) for field in items), strict=True)
        for row in range(first, first + count)
    ]
    assert found == list(enumerate(np.repeat(np.arange(len(sizes)), sizes)))
    assert max(np.asarray(items.num_rows), default=0) <= rows


def inputs(sizes: tuple[int, ...], dtype: str, out_size: int = 128) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """x with 5 rows of NaN after the groups, the weights, and what comes out."""
    rng, num_rows = np.random.default_rng(0), sum(sizes)
    x = rng.standard_normal((num_rows + 5, 320)).astype(np.float32)
    x[num_rows:] = np.nan
    weight = rng.standard_normal((len(sizes), out_size, 320)).astype(np.float32)
    x, weight = jnp.asarray(x, dtype), jnp.asarray(weight, dtype)
    chosen = np.asarray(weight, np.float32)[np.repeat(np.arange(len(sizes)), sizes)]
    return x, weight, np.einsum("ai,aoi->ao", np.asarray(x[:num_rows], np.float32), chosen)


def error_of(found: jax.Array, expected: np.ndarray) -> float:
    """The worst row's L2 error over its norm; infinite where something is not finite."""
    rows = np.asarray(found, np.float32)[: len(expected)]
    errors = np.linalg.norm(rows - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(np.max(np.where(np.isfinite(errors), errors, np.inf)))


@NEEDS_MOSAIC
@pytest.mark.parametrize(
    ("sizes", "tiles", "dtype"),
    [
        (SIZES["uneven"], MosaicTiles(1, 128, 3), "bfloat16"),
        (SIZES["long"], MosaicTiles(2, 64, 2), "float16"),
        (SIZES["single rows"], MosaicTiles(1, 64, 6), "bfloat16"),
    ],
    ids=["one warpgroup", "two warpgroups", "more stages than tiles"],
)
def test_interpreted_without_races(sizes: tuple[int, ...], tiles: MosaicTiles, dtype: str) -> None:
    plgpu = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    x, weight, expected = inputs(sizes, dtype)
    items = plan_items(ends_of(sizes), len(x), tiles.rows)
    assert error_of(grouped_matmul(x, weight, items, tiles=tiles, interpret=interpret), expected) < 5e-3
    moved = items._replace(group=jnp.roll(items.group, 1))
    assert error_of(grouped_matmul(x, weight, moved, tiles=tiles, interpret=interpret), expected) > 0.5


@NEEDS_MOSAIC
def test_gated_without_races() -> None:
    """silu(gate) * up of a weight of 256 rows, half of them gate's: two tiles of the result's columns."""
    plgpu = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    sizes, tiles = (2, 0, 1), MosaicTiles(1, 128, 2)
    x, weight, product = inputs(sizes, "bfloat16", out_size=256)
    gate, up = np.split(product, 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * up
    items = plan_items(ends_of(sizes), len(x), tiles.rows)
    multiply = partial(grouped_matmul, tiles=tiles, gated=True, interpret=plgpu.InterpretGPUParams(detect_races=True))
    found = multiply(x, weight, items)
    assert found.shape == (len(x), 128)
    assert error_of(found, expected) < 5e-3
    assert error_of(multiply(x, jnp.roll(weight, 128, axis=1), items), expected) > 0.5


@NEEDS_MOSAIC
@pytest.mark.skipif(aot_missing() is not None, reason=str(aot_missing()))
@pytest.mark.parametrize(
    ("num_rows", "num_groups", "in_size", "out_size", "gated"),
    [(512, 128, 2048, 1536, True), (16384, 128, 768, 2048, False), (4096, 8, 4096, 28672, True)],
    ids=["qwen3-30b-a3b, decode", "qwen3-30b-a3b, prefill, down", "mixtral-8x7b, prefill"],
)
def test_compiles_for_an_h200(num_rows: int, num_groups: int, in_size: int, out_size: int, gated: bool) -> None:
    tiles = mosaic_tiles(num_rows, num_groups, (out_size,))

    def product(x: jax.Array, weight: jax.Array, items: GroupItems) -> jax.Array:
        return grouped_matmul(x, weight, items, tiles=tiles, gated=gated)

    items = jax.eval_shape(
        lambda ends: plan_items(ends, num_rows, tiles.rows), jax.ShapeDtypeStruct((num_groups,), jnp.int32)
    )
    x = jax.ShapeDtypeStruct((num_rows, in_size), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((num_groups, out_size, in_size), jnp.bfloat16)
    report = compile_for("h200", product, x, weight, items)
    (kernel,) = report.kernels
    assert kernel.spill_bytes == 0
    assert kernel.uses("wgmma.mma_async")
    assert kernel.uses("cp.async.bulk.tensor")
    assert 2 * (kernel.shared_bytes + 1024) <= 228 * 1024  # two thread blocks on a multiprocessor
    assert 2 * kernel.registers * 128 * tiles.warpgroups <= 65536
    assert report.temp_bytes == 0
    assert report.launches.total() == 1


def test_what_does_not_fit_refuses() -> None:
    tiles = mosaic_tiles(64, 8, (128, 256))
    assert tiles_obstacle(64, 256, "bfloat16", tiles) is None
    assert "float32" in str(tiles_obstacle(64, 256, "float32", tiles))
    assert "[192, 64]" in str(tiles_obstacle(64, 192, "bfloat16", tiles))
    assert tiles_obstacle(64, 192, "bfloat16", replace(tiles, tile_out=64)) is None
    x, weight, _ = inputs((2, 3), "bfloat16", out_size=96)
    items = plan_items(ends_of((2, 3)), len(x), tiles.rows)
    with pytest.raises(ValueError, match=r"\[96, 320\]"):
        grouped_matmul(x, weight, items, tiles=tiles)
    with pytest.raises(ValueError, match="in groups"):
        grouped_matmul(x[:, :64], weight, items, tiles=tiles)
