"""Choosing tokens without sorting the vocabulary: exact thresholds, then one inverse CDF.

A row of n values is read as 32 slices of n / 32 *lanes*: lane l holds the values l, l + L, l + 2L, …
Reducing over the slices vectorises on a CPU and coalesces on a GPU. Sums of floats are folds, whose
order of additions is written down, so that a row's result does not depend on how many rows
there are.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

DEPTH = 32
"""Values per lane; the width of every array of logits here is a multiple of it."""
CANDIDATE_LANES = 64
"""Lanes that the fast path keeps: enough for any top_k up to this number."""
SEARCH_ROWS = 16
"""Rows searched at a time over the whole vocabulary, so that one such row in a large batch is cheap."""
_COUNT_TRIPS = 16
"""Rounds that find one of 2**32 keys: each divides the interval by four."""
_MASS_TRIPS = 15
"""The same for the 2**30 keys of floats in [0, 1]."""


class Draw(NamedTuple):
    """What one token draw per row needs to know; all of shape [R]."""

    temperature: jax.Array
    """f32, positive."""
    maximum: jax.Array
    """f32: the row's largest logit (0 where the row has no finite one)."""
    top_k: jax.Array
    """i32: 0 is off."""
    top_p: jax.Array
    """f32: 1 is off."""
    min_p: jax.Array
    """f32: 0 is off."""
    uniform: jax.Array
    """f32 in [0, 1)."""

    @property
    def truncates(self) -> jax.Array:
        """bool[R]: rows that keep only part of the vocabulary."""
        return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)

    def only(self, rows: jax.Array) -> "Draw":
        """With top-k, top-p and min-p off outside of ``rows`` bool[R]."""
        return self._replace(
            top_k=jnp.where(rows, self.top_k, 0),
            top_p=jnp.where(rows, self.top_p, 1.0),
            min_p=jnp.where(rows, self.min_p, 0.0),
        )


def pad_to_depth(values: jax.Array, fill: float = -jnp.inf) -> jax.Array:
    """[..., n] with ``fill`` appended until n is a multiple of DEPTH."""
    missing = -values.shape[-1] % DEPTH
    return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)], constant_values=fill) if missing else values


def slices(values: jax.Array) -> jax.Array:
    """[..., n] -> [..., DEPTH, n / DEPTH]; a lane runs down the second last axis."""
    return values.reshape(*values.shape[:-1], DEPTH, -1)


# The barriers keep one pass from being inlined into the next, which then would not be vectorised.


def lane_maxima(logits: jax.Array) -> jax.Array:
    """f32[R, V] -> f32[R, L]."""
    return lax.optimization_barrier(jnp.max(slices(logits), axis=-2))


def first_index_of(logits: jax.Array, value: jax.Array) -> jax.Array:
    """i32[R]: where each row of logits f32[R, V] first equals value f32[R]; 0 if nowhere."""
    size = logits.shape[1]
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    lanes = jnp.min(slices(jnp.where(logits == value[:, None], index, size)), axis=-2)
    found = jnp.min(lax.optimization_barrier(lanes), axis=-1)
    return jnp.where(found < size, found, 0)


def _lane_counts(flags: jax.Array) -> jax.Array:
    """bool[..., n] -> i32[..., n / DEPTH]"""
    return lax.optimization_barrier(jnp.sum(slices(flags), axis=-2, dtype=jnp.int32))


def count(flags: jax.Array) -> jax.Array:
    """bool[..., n] -> i32[...]: how many are true."""
    return jnp.sum(_lane_counts(flags), axis=-1)


def lane_sums(values: jax.Array) -> jax.Array:
    """f32[..., n] -> f32[..., n / DEPTH], added in order."""
    parts = slices(values)
    total = parts[..., 0, :]
    for step in range(1, DEPTH):
        total = total + parts[..., step, :]
    return lax.optimization_barrier(total)


def ordered_sum(values: jax.Array) -> jax.Array:
    """f32[..., n] -> f32[...], added in an order that depends on n alone."""
    while (size := values.shape[-1]) > 1:
        depth = min(size, DEPTH if size > 8 * DEPTH else 8)
        missing = [(0, 0)] * (values.ndim - 1) + [(0, -size % depth)]
        parts = jnp.pad(values, missing).reshape(*values.shape[:-1], depth, -1)
        values = parts[..., 0, :]
        for step in range(1, depth):
            values = values + parts[..., step, :]
        values = lax.optimization_barrier(values)
    return values[..., 0]


def uniform_per_row(seed: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
    """f32[R] in [0, 1): a function of (seed u32[R, 2], choice i32[R], position i32[R]) and of nothing else."""

    def one(seed: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, choice), position)
        return jax.random.key_data(key)[0]

    bits = jax.vmap(one)(seed, choice, position)
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def _to_key(value: jax.Array) -> jax.Array:
    """f32 -> u32 in the same order."""
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _from_key(key: jax.Array) -> jax.Array:
    bits = jnp.where(key >> 31 == 1, key & jnp.uint32((1 << 31) - 1), ~key)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _largest(holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array, trips: int) -> jax.Array:
    """f32[R]: the largest float whose key is in [low, high) (u32[R]) and for which ``holds`` is true.

    ``holds`` maps thresholds f32[R, 3] to bool[R, 3]; it is true up to some threshold and false
    above. It is taken to be true at ``low`` and false at ``high``; rows with low == high return low.
    """

    def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, width = bounds[0], bounds[1] - bounds[0]
        quarter = (width >> 2) + (width & 3 != 0).astype(jnp.uint32)
        offsets = jnp.minimum(quarter[:, None] * jnp.arange(5, dtype=jnp.uint32), width[:, None])  # [R, 5]
        inner = offsets[:, 1:4]
        true = holds(_from_key(low[:, None] + inner)) & (inner < width[:, None])
        # The true ones come first: where they end is the new interval.
        start = jnp.max(jnp.where(true, inner, 0), axis=1)
        end = jnp.min(jnp.where(true, width[:, None], inner), axis=1)
        return low + start, low + jnp.minimum(end, width)

    return _from_key(lax.fori_loop(0, trips, narrow, (low, high))[0])


def _count_at_least(values: jax.Array, thresholds: jax.Array) -> jax.Array:
    """i32[R, J]: how many of values f32[R, n] are >= thresholds f32[R, J]."""
    return count(values[:, None, :] >= thresholds[:, :, None])


def _mass_at_least(weights: jax.Array, thresholds: jax.Array) -> jax.Array:
    """f32[R, J]: the sum of those of weights f32[R, n] that are >= thresholds f32[R, J]."""
    each = weights[:, None, :]
    return ordered_sum(lane_sums(jnp.where(each >= thresholds[:, :, None], each, 0.0)))


def kth_largest(values: jax.Array, k: jax.Array, maximum: jax.Array) -> jax.Array:
    """f32[R]: the largest t such that at least k of values f32[R, n] are >= t; -inf where k i32[R] is 0."""
    low = jnp.full(k.shape, _to_key(jnp.float32(-jnp.inf)))
    high = jnp.where(k > 0, _to_key(maximum) + 1, low)
    return _largest(lambda t: _count_at_least(values, t) >= k[:, None], low, high, _COUNT_TRIPS)


def _nucleus(weights: jax.Array, mass: jax.Array, active: jax.Array) -> jax.Array:
    """f32[R]: the largest t such that weights f32[R, n] (in [0, 1]) >= t sum to at least ``mass``; else 0."""
    low = jnp.full(mass.shape, _to_key(jnp.float32(0.0)))
    high = jnp.where(active, _to_key(jnp.float32(1.0)) + 1, low)
    return _largest(lambda t: _mass_at_least(weights, t) >= mass[:, None], low, high, _MASS_TRIPS)


def weights_of(logits: jax.Array, draw: Draw) -> jax.Array:
    """f32[R, n] in [0, 1]: the probabilities, relative to the largest one."""
    return jnp.exp((logits - draw.maximum[:, None]) / draw.temperature[:, None])


def total_weight(logits: jax.Array, draw: Draw) -> jax.Array:
    """f32[R]: the sum of ``weights_of``."""
    return ordered_sum(lane_sums(weights_of(logits, draw)))


def least_kept(logits: jax.Array, draw: Draw, total: jax.Array | None = None) -> jax.Array:
    """f32[R]: the smallest of logits f32[R, n] to keep; -inf where all are.

    top-k first, then top-p over the mass that top-k kept, then min-p; ties at a threshold stay.
    ``total`` f32[R]: the mass that rows without top-k refer to, if not that of these logits.
    """
    rows = draw.top_k.shape
    by_count = lax.cond(
        jnp.any(draw.top_k > 0),
        lambda: kth_largest(logits, draw.top_k, draw.maximum),
        lambda: jnp.full(rows, -jnp.inf, jnp.float32),
    )
    restricts = (draw.top_p < 1.0) | (draw.min_p > 0.0)

    def by_weight() -> jax.Array:
        weights = jnp.where(logits >= by_count[:, None], weights_of(logits, draw), 0.0)
        mass = ordered_sum(lane_sums(weights))
        if total is not None:
            mass = jnp.where(draw.top_k > 0, mass, total)
        least = jnp.maximum(_nucleus(weights, draw.top_p * mass, draw.top_p < 1.0), draw.min_p)
        # Back to a logit, since another kernel may round the weights differently.
        kept = (weights >= least[:, None]) & (weights > 0.0)
        lowest = jnp.min(slices(jnp.where(kept, logits, jnp.inf)), axis=-2)
        return jnp.where(restricts, jnp.min(lax.optimization_barrier(lowest), axis=-1), by_count)

    return lax.cond(jnp.any(restricts), by_weight, lambda: by_count)


def _pick(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inverse CDF over weights f32[R, n]: (index i32[R], what is left of target f32[R]).

    Never an index of weight 0, whatever the rounding, unless a whole row is 0 or NaN (then 0).
    """
    size = weights.shape[1]
    index = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    cumulative = jnp.cumsum(weights, axis=1)
    possible = weights > 0.0
    hit = jnp.min(jnp.where(possible & (cumulative > target[:, None]), index, size), axis=1)
    last = jnp.max(jnp.where(possible, index, 0), axis=1)
    chosen = jnp.where(hit < size, hit, last)
    before = jnp.max(jnp.where(index < chosen[:, None], cumulative, 0.0), axis=1)
    return chosen, target - before


def draw_index(logits: jax.Array, draw: Draw, least: jax.Array) -> jax.Array:
    """i32[R]: an index into logits f32[R, V], drawn from those >= least f32[R] with one uniform number per row.

    Two sums of sums, then down again: a group of lanes, a lane, a value.
    """

    def kept(part: jax.Array) -> jax.Array:
        return jnp.where(part >= least[:, None], weights_of(part, draw), 0.0)

    lanes = pad_to_depth(lane_sums(kept(logits)), 0.0)
    groups = lane_sums(lanes)
    group, left = _pick(groups, draw.uniform * ordered_sum(groups))
    lane_ids = group[:, None] + groups.shape[1] * jnp.arange(DEPTH)
    place, left = _pick(jnp.take_along_axis(lanes, lane_ids, axis=1), left)
    lane = group + groups.shape[1] * place
    ids = lane[:, None] + logits.shape[1] // DEPTH * jnp.arange(DEPTH)
    place, _ = _pick(kept(jnp.take_along_axis(logits, ids, axis=1, mode="clip")), left)
    return lane + logits.shape[1] // DEPTH * place


def gather_lanes(logits: jax.Array, lane_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The values of lanes i32[R, C] and their ids: f32[R, C * DEPTH] and i32[R, C * DEPTH].

    Lanes past the last give -inf. Ids ascend if ``lane_ids`` do.
    """
    lanes = logits.shape[1] // DEPTH
    ids = lane_ids[:, None, :] + lanes * jnp.arange(DEPTH)[None, :, None]  # [R, DEPTH, C]
    ids = jnp.where(lane_ids[:, None, :] < lanes, ids, logits.shape[1]).reshape(lane_ids.shape[0], -1)
    return jnp.take_along_axis(logits, ids, axis=1, mode="fill", fill_value=-jnp.inf), ids


def _indices_of(mask: jax.Array, limit: int) -> jax.Array:
    """i32[R, limit]: where mask bool[R, n] is true, ascending, then n."""
    ranks = jnp.cumsum(mask, axis=1, dtype=jnp.int32)
    wanted = jnp.arange(1, limit + 1, dtype=jnp.int32)
    return jax.vmap(lambda row: jnp.searchsorted(row, wanted))(ranks).astype(jnp.int32)


def least_of_candidates(logits: jax.Array, draw: Draw, maxima: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``least_kept`` from the lanes with the largest maxima f32[R, L], where that is enough to be exact.

    With t the 64th largest maximum, every logit >= t lies in a lane whose maximum is >= t. If all
    that a row keeps is >= t, those few lanes decide it. Returns (least f32[R], decided bool[R]).
    """
    rows = maxima.shape[0]
    bound = kth_largest(pad_to_depth(maxima), jnp.full(rows, CANDIDATE_LANES, jnp.int32), draw.maximum)
    chosen = (maxima >= bound[:, None]) & (maxima > -jnp.inf)
    values, _ = gather_lanes(logits, _indices_of(chosen, CANDIDATE_LANES))
    complete = jnp.sum(chosen, axis=1, dtype=jnp.int32) <= CANDIDATE_LANES

    needs_total = (draw.top_k <= 0) & (draw.top_p < 1.0)
    total = lax.cond(jnp.any(needs_total), lambda: total_weight(logits, draw), lambda: jnp.zeros(rows, jnp.float32))
    weight = weights_of(bound[:, None], draw)  # [R, 1]
    covered = _mass_at_least(weights_of(values, draw), weight)[:, 0]
    enough_mass = (draw.top_p < 1.0) & (covered >= draw.top_p * total)
    enough_count = _count_at_least(values, bound[:, None])[:, 0] >= draw.top_k
    decided = jnp.where(draw.top_k > 0, enough_count, enough_mass | (draw.min_p >= weight[:, 0]))
    return least_kept(values, draw, total), complete & draw.truncates & decided


def _least_by_groups(logits: jax.Array, draw: Draw) -> jax.Array:
    """``least_kept``, computed only for rows that truncate, a few at a time."""
    num_rows = logits.shape[0]
    group = min(SEARCH_ROWS, num_rows)
    total = jnp.sum(draw.truncates, dtype=jnp.int32)
    order = jnp.pad(_indices_of(draw.truncates[None], num_rows)[0], (0, group), constant_values=num_rows)

    def search(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, least = carry
        rows = lax.dynamic_slice(order, (start,), (group,))
        part = Draw(*(field.at[rows].get(mode="clip") for field in draw)).only(rows < num_rows)
        found = least_kept(logits.at[rows].get(mode="clip"), part)
        return start + group, least.at[rows].set(found, mode="drop")

    none = jnp.full(num_rows, -jnp.inf, jnp.float32)
    return lax.while_loop(lambda carry: carry[0] < total, search, (jnp.int32(0), none))[1]


def draw_tokens(logits: jax.Array, draw: Draw, maxima: jax.Array) -> jax.Array:
    """i32[R]: one index into each row of logits f32[R, V]; ``maxima`` f32[R, L] are their ``lane_maxima``.

    What to keep is decided by few candidates where they are enough, else by the whole vocabulary.
    """
    keep_all = jnp.full(draw.top_k.shape, -jnp.inf, jnp.float32)

    def truncated() -> jax.Array:
        if maxima.shape[1] <= CANDIDATE_LANES:
            return _least_by_groups(logits, draw)
        least, decided = least_of_candidates(logits, draw, maxima)
        return jnp.where(decided, least, _least_by_groups(logits, draw.only(~decided)))

    least = lax.cond(jnp.any(draw.truncates), truncated, lambda: keep_all)
    return draw_index(logits, draw, least)
