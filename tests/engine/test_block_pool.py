"""The block pool alone: accounting, order of re-use, findable content."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.block_pool import BlockPool


def test_null_block_is_never_issued():
    pool = BlockPool(5)
    assert sorted(block.block_id for block in pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.usage == 1.0


def test_freed_tails_are_issued_before_heads():
    pool = BlockPool(5)
    head, middle, tail = pool.allocate(3)
    pool.release([head, middle, tail])
    (never_used,) = pool.allocate(1)
    assert never_used.block_id == 4
    assert pool.allocate(3) == [tail, middle, head]


def test_content_stays_findable_until_reissued():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, b"key")
    pool.release([block])
    assert pool.lookup(b"key") is block
    pool.allocate(2)
    assert pool.lookup(b"key") is None
    pool.check_integrity()


def test_a_held_hit_is_not_reissued():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, b"key")
    pool.release([block])
    pool.hold([block])
    assert pool.num_free == 1
    assert block not in pool.allocate(1)


def test_twins_are_not_merged():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.publish(first, b"key")
    pool.publish(second, b"key")
    assert pool.lookup(b"key") is first
    assert second.key is None
    pool.check_integrity([[first, second]])


def test_caching_off_finds_nothing():
    pool = BlockPool(3, enable_caching=False)
    (block,) = pool.allocate(1)
    pool.publish(block, b"key")
    assert pool.lookup(b"key") is None


def test_reset_refuses_while_blocks_are_held():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, b"key")
    assert not pool.reset_cache()
    pool.release([block])
    assert pool.reset_cache()
    assert pool.lookup(b"key") is None


def test_too_small_a_pool_is_refused():
    with pytest.raises(ValueError, match="num_blocks=1"):
        BlockPool(1)


@pytest.mark.parametrize("breakage", ["lost", "double", "stale_key"])
def test_integrity_check_sees_damage(breakage):
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    if breakage == "lost":
        blocks[0].ref_count = 0
    elif breakage == "double":
        blocks[0].ref_count = 2
    else:
        blocks[0].key = b"not in the table"
    with pytest.raises(AssertionError):
        pool.check_integrity([blocks])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "drop", "publish"]), st.integers(0, 10**6)), max_size=60))
def test_accounting_is_exact_after_every_operation(operations):
    pool, holders = BlockPool(9), []
    for name, number in operations:
        if name == "take" and pool.num_free:
            holders.append(pool.allocate(1 + number % pool.num_free))
        elif name == "share" and holders:
            shared = holders[number % len(holders)]
            pool.hold(shared)
            holders.append(list(shared))
        elif name == "drop" and holders:
            pool.release(holders.pop(number % len(holders)))
        elif name == "publish" and holders:
            pool.publish(holders[number % len(holders)][0], str(number % 7).encode())
        pool.check_integrity(holders)
