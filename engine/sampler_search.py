"""Choosing tokens without sorting the vocabulary: exact thresholds, then one inverse CDF.

Every pass over the vocabulary is a *fold*: a row of n values is cut into at most 32 slices of
equal length L, and the slices are combined elementwise into one array of L *lanes* (lane l holds
the values l, l + L, l + 2L, …). Folds vectorise on a CPU and coalesce on a GPU, and since the order of
additions is written down, a row's result does not depend on how many rows there are.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

DEPTH = 32
"""Values per lane."""
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


def fold(
    combine: Callable[[jax.Array, jax.Array], jax.Array],
    term: Callable[[jax.Array, int], jax.Array],
    values: jax.Array,
    size: int,
    fill: float = -jnp.inf,
) -> jax.Array:
    """Folds ``values[..., :size]`` into lanes: ``combine`` over ``term(slice, offset)``.

    ``offset`` is the index of the slice's first value; lanes past ``size`` see ``fill``.
    Returns [..., L], or [..., J, L] if ``term`` adds an axis.
    """
    lanes = -(-size // DEPTH)
    result = None
    for start in range(0, size, lanes):
        part = values[..., start : min(start + lanes, size)]
        if part.shape[-1] < lanes:
            padding = [(0, 0)] * (part.ndim - 1) + [(0, lanes - part.shape[-1])]
            part = jnp.pad(part, padding, constant_values=fill)
        value = term(part, start)
        result = value if result is None else combine(result, value)
    # Without the barrier the fold is inlined into its reader and no longer vectorised.
    return lax.optimization_barrier(result)


def fold_sum(values: jax.Array) -> jax.Array:
    """f32[..., n] -> f32[...]: the sum in a fixed order."""
    while values.shape[-1] > 1:
        values = fold(jnp.add, lambda part, _: part, values, values.shape[-1], 0.0)
    return values[..., 0]


def lane_maxima(logits: jax.Array, size: int) -> jax.Array:
    """f32[R, V] -> f32[R, L]."""
    return fold(jnp.maximum, lambda part, _: part, logits, size)


def first_index_of(logits: jax.Array, value: jax.Array, size: int) -> jax.Array:
    """i32[R]: where each row of ``logits[:, :size]`` first equals ``value`` (0 if nowhere: a row of NaN)."""

    def term(part: jax.Array, offset: int) -> jax.Array:
        index = lax.broadcasted_iota(jnp.int32, part.shape, 1) + offset
        return jnp.where(part == value[:, None], index, size)

    # The fill can equal a row's maximum only where all is -inf; its index is then beyond an earlier one.
    found = jnp.min(fold(jnp.minimum, term, logits, size), axis=-1)
    return jnp.where(found < size, found, 0)


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


def _largest_key(holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array, trips: int) -> jax.Array:
    """u32[R]: the largest key in [low, high) at which ``holds`` is true.

    ``holds`` maps thresholds f32[R, 3] to bool[R, 3]; it is true up to some threshold and false
    above. It is taken to be true at ``low`` and false at ``high``; rows with low == high return low.
    """

    def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, width = bounds[0], bounds[1] - bounds[0]
        quarter = (width >> 2) + (width & 3 != 0).astype(jnp.uint32)
        offsets = jnp.minimum(quarter[:, None] * jnp.arange(5, dtype=jnp.uint32), width[:, None])  # [R, 5]
        inner = offsets[:, 1:4]
        true = holds(_from_key(low[:, None] + inner)) & (inner < width[:, None])
        passed = jnp.sum(true, axis=1, dtype=jnp.int32)[:, None]
        step = jnp.take_along_axis(offsets, passed, axis=1)[:, 0]
        end = jnp.take_along_axis(offsets, passed + 1, axis=1)[:, 0]
        return low + step, low + end

    return lax.fori_loop(0, trips, narrow, (low, high))[0]


def _count_at_least(values: jax.Array, thresholds: jax.Array) -> jax.Array:
    """i32[R, J]: how many of values f32[R, n] are >= thresholds f32[R, J]."""

    def term(part: jax.Array, _: int) -> jax.Array:
        return (part[:, None, :] >= thresholds[:, :, None]).astype(jnp.int32)

    # NaN as filling: at least nothing.
    return jnp.sum(fold(jnp.add, term, values, values.shape[1], jnp.nan), axis=-1)


def _mass_at_least(weights: jax.Array, thresholds: jax.Array) -> jax.Array:
    """f32[R, J]: the sum of those of weights f32[R, n] that are >= thresholds f32[R, J]."""

    def term(part: jax.Array, _: int) -> jax.Array:
        part = part[:, None, :]
        return jnp.where(part >= thresholds[:, :, None], part, 0.0)

    return fold_sum(fold(jnp.add, term, weights, weights.shape[1], 0.0))


def kth_largest(values: jax.Array, k: jax.Array, maximum: jax.Array) -> jax.Array:
    """f32[R]: the largest t such that at least k of values f32[R, n] are >= t; -inf where k i32[R] is 0."""
    low = jnp.full(k.shape, _to_key(jnp.float32(-jnp.inf)))
    high = jnp.where(k > 0, _to_key(maximum) + 1, low)
    key = _largest_key(lambda t: _count_at_least(values, t) >= k[:, None], low, high, _COUNT_TRIPS)
    return _from_key(key)


def _nucleus(weights: jax.Array, mass: jax.Array, active: jax.Array) -> jax.Array:
    """f32[R]: the largest t such that weights f32[R, n] (in [0, 1]) >= t sum to at least ``mass``; else 0."""
    low = jnp.full(mass.shape, _to_key(jnp.float32(0.0)))
    high = jnp.where(active, _to_key(jnp.float32(1.0)) + 1, low)
    key = _largest_key(lambda t: _mass_at_least(weights, t) >= mass[:, None], low, high, _MASS_TRIPS)
    return _from_key(key)


def weights_of(logits: jax.Array, draw: Draw) -> jax.Array:
    """f32[R, n] in [0, 1]: the probabilities, relative to the largest one."""
    return jnp.exp((logits - draw.maximum[:, None]) / draw.temperature[:, None])


def total_weight(logits: jax.Array, draw: Draw, size: int) -> jax.Array:
    """f32[R]: the sum of ``weights_of(logits[:, :size])``."""
    return fold_sum(fold(jnp.add, lambda part, _: weights_of(part, draw), logits, size))


def thresholds(logits: jax.Array, draw: Draw, total: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """What to keep of logits f32[R, n]: those >= the first result whose weights are >= the second; f32[R] each.

    top-k first, then top-p over the mass that top-k kept, then min-p; ties at a threshold stay.
    ``total``: the mass that rows without top-k refer to, if not that of these logits.
    """
    rows = draw.top_k.shape
    least_logit = lax.cond(
        jnp.any(draw.top_k > 0),
        lambda: kth_largest(logits, draw.top_k, draw.maximum),
        lambda: jnp.full(rows, -jnp.inf, jnp.float32),
    )

    def search() -> jax.Array:
        weights = jnp.where(logits >= least_logit[:, None], weights_of(logits, draw), 0.0)
        kept = _mass_at_least(weights, jnp.zeros((*rows, 1), jnp.float32))[:, 0]
        if total is not None:
            kept = jnp.where(draw.top_k > 0, kept, total)
        return _nucleus(weights, draw.top_p * kept, draw.top_p < 1.0)

    least_weight = lax.cond(jnp.any(draw.top_p < 1.0), search, lambda: jnp.zeros(rows, jnp.float32))
    return least_logit, jnp.maximum(least_weight, draw.min_p)


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
    before = jnp.take_along_axis(cumulative, jnp.maximum(chosen - 1, 0)[:, None], axis=1)[:, 0]
    return chosen, target - jnp.where(chosen > 0, before, 0.0)


def draw_index(logits: jax.Array, draw: Draw, least_logit: jax.Array, least_weight: jax.Array, size: int) -> jax.Array:
    """i32[R]: an index into ``logits[:, :size]``, drawn from the kept ones with one uniform number per row.

    Two sums of sums, then down again: a group of lanes, a lane, a value.
    """

    def kept(part: jax.Array) -> jax.Array:
        weights = weights_of(part, draw)
        return jnp.where((part >= least_logit[:, None]) & (weights >= least_weight[:, None]), weights, 0.0)

    lanes = fold(jnp.add, lambda part, _: kept(part), logits, size)
    groups = fold(jnp.add, lambda part, _: part, lanes, lanes.shape[1], 0.0)
    group, left = _pick(groups, draw.uniform * fold_sum(groups))
    lane_ids = group[:, None] + groups.shape[1] * jnp.arange(DEPTH)
    lane, left = _pick(jnp.take_along_axis(lanes, lane_ids, axis=1, mode="fill", fill_value=0.0), left)
    lane = jnp.take_along_axis(lane_ids, lane[:, None], axis=1)
    ids = lane + lanes.shape[1] * jnp.arange(DEPTH)
    ids = jnp.where(ids < size, ids, logits.shape[1])
    value, _ = _pick(kept(jnp.take_along_axis(logits, ids, axis=1, mode="fill", fill_value=-jnp.inf)), left)
    chosen = jnp.take_along_axis(ids, value[:, None], axis=1)[:, 0]
    return jnp.minimum(chosen, size - 1)


def gather_lanes(logits: jax.Array, lane_ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The values of some lanes and their ids: f32[R, C * DEPTH] and i32[R, C * DEPTH].

    ``lane_ids`` i32[R, C]; a lane that does not exist and ids past ``size`` give -inf and id V.
    Ids ascend if ``lane_ids`` do.
    """
    lanes = -(-size // DEPTH)
    ids = lane_ids[:, None, :] + lanes * jnp.arange(DEPTH)[None, :, None]  # [R, DEPTH, C]
    exists = (lane_ids[:, None, :] < lanes) & (ids < size)
    ids = jnp.where(exists, ids, logits.shape[1]).reshape(lane_ids.shape[0], -1)
    return jnp.take_along_axis(logits, ids, axis=1, mode="fill", fill_value=-jnp.inf), ids


def _indices_of(mask: jax.Array, limit: int) -> jax.Array:
    """i32[R, limit]: where mask bool[R, n] is true, ascending, then n."""
    ranks = jnp.cumsum(mask, axis=1, dtype=jnp.int32)
    wanted = jnp.arange(1, limit + 1, dtype=jnp.int32)
    return jax.vmap(lambda row: jnp.searchsorted(row, wanted))(ranks).astype(jnp.int32)


def draw_from_candidates(logits: jax.Array, draw: Draw, maxima: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Draws from the lanes with the largest maxima f32[R, L], where that is enough to be exact.

    With t the 64th largest maximum, every logit >= t lies in a lane whose maximum is >= t. If all
    that a row keeps is >= t, those few lanes decide it. Returns (ids i32[R], decided bool[R]).
    """
    rows, count = maxima.shape
    least = kth_largest(maxima, jnp.full(rows, min(CANDIDATE_LANES, count), jnp.int32), draw.maximum)
    chosen = (maxima >= least[:, None]) & (maxima > -jnp.inf)
    values, ids = gather_lanes(logits, _indices_of(chosen, CANDIDATE_LANES), size)
    complete = jnp.sum(chosen, axis=1, dtype=jnp.int32) <= CANDIDATE_LANES

    needs_total = (draw.top_k <= 0) & (draw.top_p < 1.0)
    total = lax.cond(
        jnp.any(needs_total), lambda: total_weight(logits, draw, size), lambda: jnp.zeros(rows, jnp.float32)
    )
    weight = weights_of(least[:, None], draw)  # [R, 1]
    covered = _mass_at_least(weights_of(values, draw), weight)[:, 0]
    enough_mass = (draw.top_p < 1.0) & (covered >= draw.top_p * total)
    enough_count = _count_at_least(values, least[:, None])[:, 0] >= draw.top_k
    without_k = enough_mass | (draw.min_p >= weight[:, 0])
    decided = complete & draw.truncates & jnp.where(draw.top_k > 0, enough_count, without_k)

    least_logit, least_weight = thresholds(values, draw, total)
    index = draw_index(values, draw, least_logit, least_weight, values.shape[1])
    # A row with nothing to draw from may have picked a place that stands for no id.
    return jnp.minimum(jnp.take_along_axis(ids, index[:, None], axis=1)[:, 0], size - 1), decided


def _thresholds_of_rows(logits: jax.Array, draw: Draw, size: int) -> tuple[jax.Array, jax.Array]:
    """``thresholds(logits[:, :size])``, computed for those rows only that truncate."""
    num_rows = logits.shape[0]
    group = min(SEARCH_ROWS, num_rows)
    count = jnp.sum(draw.truncates, dtype=jnp.int32)
    order = jnp.pad(_indices_of(draw.truncates[None], num_rows)[0], (0, group), constant_values=num_rows)

    def search(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        start, least_logit, least_weight = carry
        rows = lax.dynamic_slice(order, (start,), (group,))
        options = Draw(*(field.at[rows].get(mode="fill", fill_value=1) for field in draw))
        options = options._replace(top_k=draw.top_k.at[rows].get(mode="fill", fill_value=0))
        found = thresholds(logits.at[rows].get(mode="fill", fill_value=0.0)[:, :size], options)
        least_logit = least_logit.at[rows].set(found[0], mode="drop")
        return start + group, least_logit, least_weight.at[rows].set(found[1], mode="drop")

    none = (jnp.int32(0), jnp.full(num_rows, -jnp.inf, jnp.float32), jnp.zeros(num_rows, jnp.float32))
    return lax.while_loop(lambda carry: carry[0] < count, search, none)[1:]


def draw_tokens(logits: jax.Array, draw: Draw, wanted: jax.Array, maxima: jax.Array, size: int) -> jax.Array:
    """i32[R]: ids below ``size``, drawn for the rows ``wanted`` bool[R]; of the others nothing is said.

    From few candidates where they decide a row, else from the whole vocabulary. ``maxima`` f32[R, L]
    are the ``lane_maxima`` of logits f32[R, V].
    """
    nothing = (jnp.zeros(wanted.shape, jnp.int32), jnp.zeros(wanted.shape, jnp.bool_))
    quick_ids, decided = nothing
    if maxima.shape[1] > CANDIDATE_LANES:
        quick_ids, decided = lax.cond(
            jnp.any(draw.truncates), lambda: draw_from_candidates(logits, draw, maxima, size), lambda: nothing
        )
    pending = wanted & ~decided
    rest = draw._replace(
        top_k=jnp.where(pending, draw.top_k, 0),
        top_p=jnp.where(pending, draw.top_p, 1.0),
        min_p=jnp.where(pending, draw.min_p, 0.0),
    )

    def from_all() -> jax.Array:
        least_logit, least_weight = _thresholds_of_rows(logits, rest, size)
        return draw_index(logits, rest, least_logit, least_weight, size)

    return jnp.where(decided, quick_ids, lax.cond(jnp.any(pending), from_all, lambda: nothing[0]))
