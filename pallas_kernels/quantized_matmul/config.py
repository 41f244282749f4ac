"""Sizes that the Mosaic kernel is tuned by, and which products it serves."""

from dataclasses import dataclass
from math import gcd

WARPGROUP_ROWS = 64
"""wgmma's M: rows of the weight that one warpgroup multiplies."""
BITS = (4, 8)
DTYPES = ("bfloat16", "float16")
MIN_GROUP = 32
"""Columns that the layout of 4-bit integers in registers takes at a time."""
MIN_TILE = 64
"""Columns; TMA and the swizzle take 32 bytes at least."""
MAX_KERNEL_TOKENS = 256
"""Above that a product is cheaper by making the weight bfloat16 once. By reasoning, not measured: widened weights cost
4.5 bytes a weight (0.5 read, 2 written, 2 read), 9 times the packed ones, and the kernel reads those once for all
tiles of 64 tokens, but converts them for each: 4 tiles take about half of that time, and 8 as long."""
BLOCKS_A_MULTIPROCESSOR = 2
"""Thread blocks that run together."""
TOKEN_CLASSES = (8, 16, 32, 64, 128, 256)
"""Sizes are measured for each of these numbers of tokens and serve those down to the one before."""
STAGE_BYTES = 96 * 1024
"""For the stages of a thread block, of 227 KiB of shared memory that two blocks divide."""
MAX_SPLITS = 16


@dataclass(frozen=True)
class MosaicTuningConfig:
    """Sizes of the Mosaic kernel."""

    warpgroups: int
    """Each has 64 rows of the weight; they share the tokens in shared memory."""
    tile_tokens: int
    """wgmma's N: a multiple of 8."""
    tile_in: int
    """Columns of the weight in a stage; a multiple or a divisor of the group."""
    stages: int
    """Tiles in shared memory, on their way or in use."""
    num_splits: int
    """Ranges of the inner axis, each for thread blocks of its own, with float32 partial sums."""
    stage_a_in_smem: bool = False
    """Widened weights reach wgmma through shared memory, as the interpreter needs, instead of from registers."""

    def __post_init__(self) -> None:
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups must be 1 to 4; got {self.warpgroups}")
        if self.tile_tokens % 8 or not 8 <= self.tile_tokens <= 128:
            raise ValueError(f"tile_tokens must be a multiple of 8 from 8 to 128; got {self.tile_tokens}")
        if self.tile_in not in (64, 128, 256):
            raise ValueError(f"tile_in must be 64, 128 or 256; got {self.tile_in}")
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2; got {self.stages}")
        if self.num_splits < 1:
            raise ValueError(f"num_splits must be at least 1; got {self.num_splits}")

    @property
    def tile_out(self) -> int:
        """Rows of the weight in a thread block."""
        return self.warpgroups * WARPGROUP_ROWS


def check_mosaic_sizes(out_size: int, in_size: int, group_size: int, dtype: str) -> None:
    """Raises ValueError naming the first size that the Mosaic kernel cannot serve."""
    if dtype not in DTYPES:
        raise ValueError(f"x of {dtype}: the mosaic kernel takes {', '.join(DTYPES)}")
    if out_size % WARPGROUP_ROWS:
        raise ValueError(f"{out_size} output rows: the mosaic kernel takes a multiple of {WARPGROUP_ROWS}")
    if in_size % MIN_TILE:
        raise ValueError(f"{in_size} input columns: the mosaic kernel takes a multiple of {MIN_TILE}")
    if group_size != MIN_GROUP and group_size % MIN_TILE:
        raise ValueError(f"group_size {group_size}: the mosaic kernel takes {MIN_GROUP} or a multiple of {MIN_TILE}")


def tile_columns(in_size: int, group_size: int, bits: int, num_tokens: int) -> int:
    """Columns of a tile, of a weight that the kernel can serve.

    A row of a tile takes 128 bytes; of 4-bit codes 64, from 17 tokens on, where more columns would take the registers
    of a second thread block. Or as few bytes less as it takes for tiles to divide the row and to fit its groups.
    """
    tile = 256 if bits == 4 and num_tokens <= 16 else 128
    while in_size % tile or gcd(tile, group_size) not in (tile, group_size):
        tile //= 2
    return tile


def mosaic_tuning(
    num_tokens: int,
    out_size: int,
    in_size: int,
    *,
    bits: int,
    group_size: int,
    num_multiprocessors: int = 132,
    interpreted: bool = False,
) -> MosaicTuningConfig:
    """Sizes by reasoning, for Hopper (multiprocessors with 228 KiB of shared memory each); not measured.

    - Tokens: as few columns as hold them, as each costs shared memory and registers; at most 64.
    - Two warpgroups of 64 rows read the same tokens, which halves what comes of those from the L2 cache; with 32
      tokens a tile of tokens is then as large as a tile of weights. Two such thread blocks share a multiprocessor, so
      that one's products and barriers hide behind the other's conversion.
    - Stages: what 96 KiB hold, at most 6. Some 36-48 KB of weights on their way to a multiprocessor keep up with the
      memory.
    - Splits: as in ``_num_splits``.

    Interpreted: as small as the kernel allows, so that tests see several tiles, turns and splits cheaply. The sizes
    must be ones that ``check_mosaic_sizes`` accepts.
    """
    tile_in = tile_columns(in_size, group_size, bits, num_tokens)
    tile_tokens = next(size for size in (8, 16, 32, 64) if size >= min(num_tokens, 64))
    warpgroups = 2 if out_size % (2 * WARPGROUP_ROWS) == 0 else 1
    if interpreted:
        tile_tokens, tile_in = min(tile_tokens, 16), min(tile_in, 64)
        num_splits = min(2, in_size // tile_in)
        return MosaicTuningConfig(warpgroups, tile_tokens, tile_in, 2, num_splits, stage_a_in_smem=True)
    tile_out = warpgroups * WARPGROUP_ROWS
    stages = max(2, min(6, STAGE_BYTES // (tile_in * (tile_out * bits // 8 + 2 * tile_tokens))))
    num_blocks = -(-num_tokens // tile_tokens) * (out_size // tile_out)
    turn_bytes = tile_out * tile_in * bits // 8
    partial_turns = 2 * 4 * tile_out * tile_tokens / turn_bytes
    blocks_at_once = BLOCKS_A_MULTIPROCESSOR * num_multiprocessors
    num_splits = _num_splits(num_blocks, in_size // tile_in, partial_turns, blocks_at_once)
    return MosaicTuningConfig(warpgroups, tile_tokens, tile_in, stages, num_splits)


def _num_splits(num_blocks: int, turns: int, partial_turns: float, blocks_at_once: int) -> int:
    """The cheapest number of ranges of the inner axis, for ``num_blocks`` thread blocks of ``turns`` without.

    In units of a turn: a wave of thread blocks takes its turns and about two more to begin and to end; a range's
    partial sums are written and read back, which costs as its bytes do, ``partial_turns`` for each thread block.
    """

    def cost(splits: int) -> float:
        blocks = num_blocks * splits
        waves = -(-blocks // blocks_at_once)
        return waves * (-(-turns // splits) + 2) + blocks / blocks_at_once * partial_turns

    return min(range(1, min(turns, MAX_SPLITS) + 1), key=cost)
