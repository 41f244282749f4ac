"""Sizes of the grouped product's tiles. Imports nothing of Pallas."""

from dataclasses import dataclass, replace
from typing import Any

from ..tuning import measured_for, size_class

WARPGROUP_ROWS = 64
"""wgmma's M."""
TILE_IN = 64
"""Columns of a tile: 128 bytes, the widest swizzle."""
ROW_CLASSES = (1, 4, 16, 64, 256, 1024)
"""Tiles are measured for each of these numbers of rows a group, on average, and serve those down to the one before."""
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

    def __post_init__(self) -> None:
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups must be 1 to 4; got {self.warpgroups}")
        if self.tile_out not in (64, 128, 256):
            raise ValueError(f"tile_out must be 64, 128 or 256; got {self.tile_out}")
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2; got {self.stages}")

    @property
    def rows(self) -> int:
        """Of x in a work item."""
        return self.warpgroups * WARPGROUP_ROWS


def mosaic_tiles(num_rows: int, num_groups: int, out_sizes: tuple[int, ...], interpret: Any = None) -> MosaicTiles:
    """Tiles for products of so many rows in so many groups with weights of these output sizes: those that were
    measured on this GPU, or else by reasoning.

    Few rows a group, as in decode: reading the weights is what takes time, and one warpgroup holds a group. Many: two
    share each tile of the weight. Either way two thread blocks fit a multiprocessor's shared memory.
    """
    measured = measured_for("grouped_matmul", tile_facts(num_rows, num_groups, out_sizes), interpret) or {}
    tile_out = 128 if all(size % 128 == 0 for size in out_sizes) else 64
    many = num_rows > num_groups * WARPGROUP_ROWS
    return replace(MosaicTiles(2, tile_out, 3) if many else MosaicTiles(1, tile_out, 4), **measured)


def tile_facts(num_rows: int, num_groups: int, out_sizes: tuple[int, ...]) -> dict[str, Any]:
    """What measured tiles are chosen by."""
    rows = size_class(-(-num_rows // num_groups), ROW_CLASSES)
    return {"num_groups": num_groups, "out_sizes": list(out_sizes), "rows_a_group_up_to": rows}


def tiles_obstacle(in_size: int, out_size: int, dtype: str, tiles: MosaicTiles) -> str | None:
    """Why the kernel cannot multiply by such weights; None if it can."""
    if dtype not in _DTYPES:
        return f"dtype {dtype}: the grouped product takes {', '.join(_DTYPES)}"
    if in_size % TILE_IN or out_size % tiles.tile_out:
        return (
            f"weights of [{out_size}, {in_size}]: the grouped product takes multiples of {tiles.tile_out} by {TILE_IN}"
        )
    return None
