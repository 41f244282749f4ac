"""Which thread blocks take which rows of which group."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class GroupItems(NamedTuple):
    """Runs of at most so many rows of one group, in order. W as ``num_items`` says."""

    group: jax.Array
    """i32 ``[W]``."""
    first_row: jax.Array
    """i32 ``[W]``."""
    num_rows: jax.Array
    """i32 ``[W]``: 0 for an item that there is no use for."""


def num_items(num_rows: int, num_groups: int, rows: int) -> int:
    """W for ``num_rows`` rows in ``num_groups`` groups: always enough, and known before the groups' sizes are."""
    return num_rows if num_rows < num_groups else num_rows // rows + num_groups


def plan_items(group_ends: jax.Array, num_rows: int, rows: int) -> GroupItems:
    """Items of at most ``rows`` rows for groups that follow one another and end before the rows of i32 ``[E]``, of
    which there are ``num_rows`` at most.

    A group's items begin at the place that follows from its first row alone, not from how many items there were before:
    that would take another launch. Each field is a sum over groups of which one is not zero: all of them are one.
    """
    num_groups = group_ends.shape[0]
    starts, ends = jnp.pad(group_ends, (1, 0))[:-1], group_ends
    groups = jnp.arange(num_groups, dtype=jnp.int32)
    item = jnp.arange(num_items(num_rows, num_groups, rows), dtype=jnp.int32)[:, None]
    if num_rows < num_groups:
        # Fewer rows than groups: an item for each row, used where a run begins.
        is_own = (starts <= item) & (item < ends)
        first, is_used = item, (item - starts) % rows == 0
    else:
        is_own = (starts // rows + groups <= item) & (item <= ends // rows + groups)
        first = starts + (item - (starts // rows + groups)) * rows
        is_used = first < ends
    fields = (groups, first, jnp.where(is_used, jnp.minimum(ends - first, rows), 0))
    return GroupItems(*(jnp.sum(jnp.where(is_own, field, 0), axis=1, dtype=jnp.int32) for field in fields))
