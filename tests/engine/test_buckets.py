"""The table of compiled shapes: no gap, no overrun, the limits exactly."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.buckets import BucketTable


@given(rows=st.integers(1, 600), more=st.integers(0, 10_000))
def test_neighbours_differ_by_at_most_two_and_the_largest_is_the_limit(rows, more):
    table = BucketTable(rows, rows + more)
    for buckets in (table.decode, table.mixed):
        sizes = [bucket.num_tokens for bucket in buckets]
        assert all(small < large <= 2 * small for small, large in pairwise(sizes))
    assert (table.decode[-1].num_tokens, table.decode[-1].num_rows) == (rows, rows)
    assert (table.mixed[-1].num_tokens, table.mixed[-1].num_rows) == (rows + more, rows)
    assert table.decode[0].num_tokens == 1


@given(rows=st.integers(1, 300), more=st.integers(0, 3000), data=st.data())
def test_every_step_within_the_limits_has_a_bucket_that_is_no_larger_than_need_be(rows, more, data):
    table = BucketTable(rows, rows + more)
    num_rows = data.draw(st.integers(1, rows))
    num_tokens = data.draw(st.integers(num_rows, rows + more))
    for decode_only, tokens in ((True, num_rows), (False, num_tokens)):
        bucket = table.select(tokens, num_rows, decode_only=decode_only)
        assert bucket.num_tokens >= tokens
        assert bucket.num_rows >= num_rows
        buckets = table.decode if decode_only else table.mixed
        for smaller in buckets[: buckets.index(bucket)]:
            assert smaller.num_tokens < tokens or smaller.num_rows < num_rows


def test_what_overruns_the_limits_is_no_step():
    with pytest.raises(AssertionError, match="overran"):
        BucketTable(4, 32).select(33, 4, decode_only=False)
    with pytest.raises(ValueError, match="at least"):
        BucketTable(8, 4)


@given(rows=st.integers(1, 300), more=st.integers(0, 3000))
def test_mixed_buckets_that_serve_decode_leave_no_gap(rows, more):
    table = BucketTable(rows, rows + more, mixed_serves_decode=True)
    assert not {bucket.num_tokens for bucket in table.decode} & {bucket.num_tokens for bucket in table.mixed}
    for num_rows in range(1, rows + 1):
        bucket = table.select(num_rows, num_rows, decode_only=True)
        assert num_rows <= bucket.num_rows
        assert bucket.num_tokens <= max(2 * num_rows, 1) or bucket == table.mixed[0]
