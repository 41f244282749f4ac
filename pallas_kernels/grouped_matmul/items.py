"""Which thread blocks take which rows of which group."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class GroupItems(NamedTuple):
    """Runs of at most so many rows of one group, in order. W = A // rows + min(E, A), which always suffices."""

    group: jax.Array
    """i32 ``[W]``."""
    first_row: jax.Array
    """i32 ``[W]``."""
    num_rows: jax.Array
    """i32 ``[W]``: 0 for an item that there is no use for."""


def plan_items(group_sizes: jax.Array, num_rows: int, rows: int) -> GroupItems:
    """Items of at most ``rows`` rows for groups of i32 ``[E]`` sizes that follow one another, ``num_rows`` at most."""
    num_groups = group_sizes.shape[0]
    items = jnp.arange(num_rows // rows + min(num_groups, num_rows), dtype=jnp.int32)
    counts = (group_sizes + rows - 1) // rows
    item_ends, row_ends = jnp.cumsum(counts), jnp.cumsum(group_sizes)
    group = jnp.minimum(jnp.searchsorted(item_ends, items, side="right", method="compare_all"), num_groups - 1).astype(
        jnp.int32
    )
    offset = (items - (item_ends - counts)[group]) * rows
    count = jnp.clip(group_sizes[group] - offset, 0, rows)
    return GroupItems(group, (row_ends - group_sizes)[group] + jnp.where(count > 0, offset, 0), count)
