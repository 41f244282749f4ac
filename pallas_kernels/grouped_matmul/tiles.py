"""Sizes of the grouped product's tiles. Imports nothing of Pallas."""

from dataclasses import dataclass

WARPGROUP_ROWS = 64
"""wgmma's M."""
TILE_IN = 64
"""Columns of a tile: 128 bytes, the widest swizzle."""
_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class MosaicTiles:
    """What a thread block computes at once."""

    warpgroups: int
    """Each has 64 rows of x, and all share a tile of the weight."""
    tile_out: int
    """Rows of a tile of the weight."""
    stages: int
    """Tiles on their way at once."""

    @property
    def rows(self) -> int:
        """Of x in a work item."""
        return self.warpgroups * WARPGROUP_ROWS


def mosaic_tiles(num_rows: int, num_groups: int, out_sizes: tuple[int, ...]) -> MosaicTiles:
    """Tiles for products of so many rows in so many groups with weights of these output sizes. Not measured yet.

    Few rows a group, as in decode: reading the weights is what takes time, and one warpgroup holds a group. Many: two
    share each tile of the weight. Either way two thread blocks fit a multiprocessor's shared memory.
    """
    tile_out = 128 if all(size % 128 == 0 for size in out_sizes) else 64
    return MosaicTiles(2, tile_out, 3) if num_rows > num_groups * WARPGROUP_ROWS else MosaicTiles(1, tile_out, 4)


def tiles_obstacle(in_size: int, out_size: int, dtype: str, tiles: MosaicTiles) -> str | None:
    """Why the kernel cannot multiply by such weights; None if it can."""
    if dtype not in _DTYPES:
        return f"dtype {dtype}: the grouped product takes {', '.join(_DTYPES)}"
    if in_size % TILE_IN or out_size % tiles.tile_out:
        return (
            f"weights of [{out_size}, {in_size}]: the grouped product takes multiples of {tiles.tile_out} by {TILE_IN}"
        )
    return None
