"""The decode kernel's work list: every visible key in exactly one item, whatever the lengths."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.paged_attention.work import num_work_items, plan_work

BLOCK, TILE, MIN_KEYS, MAX_KEYS = 16, 64, 128, 4096


def plan(lens, window=None, target_blocks=48, num_kv_heads=4):
    max_keys = MAX_KEYS if window is None else min(MAX_KEYS, window + BLOCK - 1)
    num_items = num_work_items(len(lens), max_keys, num_kv_heads, target_blocks, MIN_KEYS)
    make = partial(plan_work, num_items=num_items, block_size=BLOCK, tile_kv=TILE, min_keys=MIN_KEYS, window=window)
    return [np.asarray(x) for x in jax.jit(make)(jnp.asarray(lens, jnp.int32))]


RNG = np.random.default_rng(0)
LENGTHS = {
    "empty": [0] * 5,
    "one": [1],
    "one long": [4096],
    "long among short": [1] * 7 + [4000] + [0, 17],
    "equal": [1000] * 16,
    "all long": [4096] * 9,
    **{f"random {i}": RNG.integers(0, RNG.choice([20, 300, 4097]), size=12).tolist() for i in range(12)},
}


@pytest.mark.parametrize("window", [None, 1, 100, 1500])
@pytest.mark.parametrize("name", LENGTHS)
def test_items_cover_each_visible_key_once(name, window):
    lens = LENGTHS[name]
    items, row_items = plan(lens, window)
    used = int(row_items[-1])
    assert row_items[0] == 0
    assert not items[used:].any()
    for row, length in enumerate(lens):
        low = 0 if window is None else max(0, length - window)
        mine = items[row_items[row] : row_items[row + 1]]
        assert len(mine) > 0 or length == 0
        keys = []
        for item_row, first, end, first_seen in mine:
            assert item_row == row
            assert first % BLOCK == 0
            assert first <= first_seen < end
            assert end == length or (end - first) % TILE == 0
            keys += range(max(first, first_seen), end)
        assert keys == list(range(low, length))
        assert all(first > low - BLOCK for _, first, _, _ in mine)


@pytest.mark.parametrize("name", LENGTHS)
def test_items_are_about_equal_and_not_too_short(name):
    lens = np.asarray(LENGTHS[name])
    items, row_items = plan(lens)
    sizes = (items[:, 2] - items[:, 1])[: row_items[-1]]
    spare = len(items) - len(lens)
    fair = max(MIN_KEYS, -(-lens.sum() // spare) if spare else lens.max())
    assert sizes.max(initial=0) <= fair + TILE
    for row in np.flatnonzero(np.diff(row_items) > 1):
        mine = sizes[row_items[row] : row_items[row + 1]]
        assert mine[:-1].min() > MIN_KEYS // 2
        assert len(set(mine[:-1].tolist())) == 1


def test_a_long_row_spreads_over_the_gpu():
    items, row_items = plan([4096], target_blocks=64, num_kv_heads=4)
    assert row_items.tolist() == [0, 16]
    assert (items[:16, 2] - items[:16, 1]).tolist() == [256] * 16


def test_number_of_items_is_bounded_by_rows_and_lengths():
    assert num_work_items(64, 4096, 8, 528, 256) == 64 + 66
    assert num_work_items(4, 512, 8, 528, 256) == 8  # no row can be cut further
    assert num_work_items(4, 200, 8, 528, 256) == 4
