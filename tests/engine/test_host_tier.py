"""The prefix cache's second tier: what is kept in host memory, in which order, and that answers do not depend on it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import FakeRunner, expected_tokens
from tiered_harness import TieredDevice, TieredHarness, random_traffic

from octavo.engine.block_pool import BlockPool
from octavo.engine.host_tier import HostTier
from octavo.engine.kv_cache_manager import KVCacheManager

PROMPT = list(range(100, 122))


def cached_pool(count: int) -> BlockPool:
    """A pool whose blocks 1 .. count are free and cached under their own numbers."""
    pool = BlockPool(count + 1)
    blocks = pool.allocate(count)
    for block in blocks:
        pool.publish(block, str(block.block_id).encode())
    pool.release(list(reversed(blocks)))
    return pool


def saved(copies):
    return [(copy.chunk, [block for block, _ in copy.blocks]) for copy in copies]


# ---- bookkeeping ----------------------------------------------------------------------------


def test_blocks_about_to_be_reused_are_saved_and_the_chunk_filled_with_the_next():
    tier, pool = HostTier(4, chunk_size=4), cached_pool(10)
    assert saved(tier.save(pool.free_blocks(), 1)) == [(0, [1, 2, 3, 4])]
    assert len(tier) == 4
    assert tier.save(pool.free_blocks(), 4) == [], "they are all saved already"
    assert saved(tier.save(pool.free_blocks(), 9)) == [(1, [5, 6, 7, 8]), (2, [9, 10])]
    tier.check_integrity()


def test_blocks_without_content_and_none_asked_for_copy_nothing():
    tier, pool = HostTier(4, chunk_size=4), BlockPool(9)
    assert tier.save(pool.free_blocks(), 8) == []
    assert tier.save(cached_pool(8).free_blocks(), 0) == []
    assert len(tier) == 0


def test_the_chunk_used_longest_ago_is_reused():
    tier, pool = HostTier(2, chunk_size=2), cached_pool(8)
    tier.save(pool.free_blocks(), 4)
    hit = tier.lookup(b"1")
    assert hit is not None
    tier.restore([(hit, 5)])
    pool.allocate(4)
    assert saved(tier.save(pool.free_blocks(), 2)) == [(1, [5, 6])]
    assert [tier.lookup(str(i).encode()) is not None for i in range(1, 7)] == [True, True, False, False, True, True]
    tier.check_integrity()


def test_leaving_the_device_counts_as_use():
    """A block that both tiers hold becomes the only copy when the device's block is reused."""
    tier, pool = HostTier(2, chunk_size=2), cached_pool(6)
    tier.save(pool.free_blocks(), 4)
    tier.save(pool.free_blocks(), 2)
    pool.allocate(4)
    assert saved(tier.save(pool.free_blocks(), 2)) == [(1, [5, 6])]


def test_chunks_that_are_about_to_be_read_are_not_reused():
    tier, pool = HostTier(2, chunk_size=2), cached_pool(8)
    tier.save(pool.free_blocks(), 4)
    pool.allocate(4)
    assert saved(tier.save(pool.free_blocks(), 4, keep={0})) == [(1, [5, 6]), (1, [7, 8])]
    assert tier.lookup(b"5") is None
    assert tier.save(cached_pool(9).free_blocks(), 9, keep={0, 1}) == []
    tier.check_integrity()


def test_restoring_keeps_the_beginning_of_a_prefix_longest():
    tier, pool = HostTier(3, chunk_size=2), cached_pool(12)
    tier.save(pool.free_blocks(), 6)
    pool.allocate(6)
    hits = [(tier.lookup(str(i).encode()), 20 + i) for i in range(1, 7)]
    copies = tier.restore(hits)
    assert [(c.to_host, c.chunk, c.blocks) for c in copies] == [
        (False, 0, ((21, 0), (22, 1))),
        (False, 1, ((23, 0), (24, 1))),
        (False, 2, ((25, 0), (26, 1))),
    ]
    assert [chunk for chunk, _ in saved(tier.save(pool.free_blocks(), 4))] == [2, 1]
    assert tier.lookup(b"1") == hits[0][0]


def test_discard_and_clear():
    tier = HostTier(2, chunk_size=4)
    tier.save(cached_pool(4).free_blocks(), 4)
    tier.discard(b"2")
    tier.discard(b"never there")
    assert [tier.lookup(str(i).encode()) is None for i in range(1, 5)] == [False, True, False, False]
    tier.check_integrity()
    tier.clear()
    assert len(tier) == 0
    tier.check_integrity()


@pytest.mark.parametrize("damage", ["key", "place", "chunk"])
def test_check_integrity_sees_damage(damage):
    tier = HostTier(2, chunk_size=2)
    tier.save(cached_pool(4).free_blocks(), 4)
    if damage == "key":
        tier._keys[0].pop()
    elif damage == "place":
        tier._places[b"1"] = tier._places[b"2"]
    else:
        del tier._order[1]
    with pytest.raises(AssertionError):
        tier.check_integrity()


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="num_chunks"):
        HostTier(0)
    with pytest.raises(ValueError, match="prefix cache"):
        KVCacheManager(8, 4, enable_prefix_caching=False, host_tier=HostTier(1))


# ---- with a scheduler -----------------------------------------------------------------------


def churn(harness, name, num_blocks=14):
    """Reuses every block of the pool that nobody holds."""
    harness.add(name, [ord(name[0])] * (num_blocks * 4 - 2), max_tokens=2)
    harness.run()


def roomy(**options):
    return TieredHarness(**{"num_blocks": 16, "num_chunks": 20, "max_model_len": 64, **options})


def test_a_prefix_that_left_the_device_comes_back_from_the_host():
    harness = roomy()
    harness.add("a", PROMPT, max_tokens=2)
    harness.run()
    churn(harness, "x", 15)
    assert harness.scheduler.prompt_tokens_computed_total == 22 + 58
    harness.add("b", PROMPT, max_tokens=2)
    outputs = harness.run()
    assert outputs["a", 0] == outputs["b", 0] == expected_tokens(PROMPT, 2)
    assert harness.scheduler.prompt_tokens_computed_total == 22 + 58 + 2
    assert (harness.kv.hits_total, harness.kv.host_hits_total) == (20, 20)
    stats = harness.core.stats()
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (22 + 58 + 22, 0)
    assert (stats.external_prefix_cache_queries_total, stats.external_prefix_cache_hits_total) == (22 + 58 + 22, 20)


def test_a_run_over_device_host_and_misses():
    """The end of a prefix leaves the device first: then the hits are the device's, after them the host's."""
    harness = roomy()
    harness.add("a", PROMPT, max_tokens=2)
    harness.run()
    churn(harness, "x", 13)
    request_hits = harness.kv.hits_total
    harness.add("b", [*PROMPT[:20], *range(30)], max_tokens=2)
    harness.step()
    (request,) = harness.scheduler.requests
    stats = harness.core.stats()
    assert 0 < stats.prefix_cache_hits_total < 20
    assert stats.prefix_cache_hits_total + stats.external_prefix_cache_hits_total - request_hits == 20
    assert request.num_cached_tokens == 20, "both tiers count"
    assert harness.run()["b", 0] == expected_tokens([*PROMPT[:20], *range(30)], 2)


def test_a_hit_in_host_memory_is_on_the_device_afterwards():
    harness = roomy()
    harness.add("a", PROMPT, max_tokens=2)
    harness.run()
    churn(harness, "x", 15)
    for name in "bc":
        harness.add(name, PROMPT, max_tokens=2)
        harness.run()
    assert (harness.kv.hits_total, harness.kv.host_hits_total) == (40, 20)


def test_two_requests_of_one_step_share_what_one_of_them_brings_back():
    harness = roomy(num_blocks=24)
    harness.add("a", PROMPT, max_tokens=2)
    harness.run()
    churn(harness, "x", 15)
    churn(harness, "y", 15)
    before = harness.device.num_copies
    for name in "bc":
        harness.add(name, PROMPT, max_tokens=2)
    harness.step()
    assert (harness.kv.hits_total, harness.kv.host_hits_total) == (40, 20)
    assert harness.device.num_copies > before
    outputs = harness.run()
    assert outputs["b", 0] == outputs["c", 0] == expected_tokens(PROMPT, 2)


def test_no_room_changes_nothing():
    harness = roomy()
    harness.add("a", PROMPT, max_tokens=2)
    harness.run()
    churn(harness, "x", 15)
    held = harness.kv.pool.allocate(harness.kv.pool.num_free - 3)
    harness.add("b", PROMPT, max_tokens=2)
    (request,) = harness.scheduler.requests
    cached = harness.kv.find_cached_blocks(request)
    assert len(cached) == 5
    places, hits = dict(harness.host._places), harness.kv.host_hits_total
    assert harness.kv.allocate_slots(request, 2, cached) is None
    assert harness.kv.allocate_slots(request, 2, cached[:2], headroom=1) is None
    assert (harness.host._places, harness.kv.host_hits_total, request.blocks) == (places, hits, [])
    assert harness.kv.take_chunk_copies() == []
    harness.kv.pool.release(held)
    assert harness.run()["b", 0] == expected_tokens(PROMPT, 2)


def test_salts_separate_callers_in_host_memory_too():
    harness = roomy()
    harness.add("a", PROMPT, max_tokens=2, salt="x")
    harness.run()
    churn(harness, "x", 15)
    for name, salt, hit in [("b", "y", 0), ("c", None, 0), ("d", "x", 20)]:
        before = harness.kv.hits_total
        harness.add(name, PROMPT, max_tokens=2, salt=salt)
        harness.run()
        assert harness.kv.hits_total - before == hit


def test_resetting_clears_both_tiers_unless_blocks_are_held():
    harness = roomy()
    harness.add("a", PROMPT, max_tokens=8)
    harness.step()
    assert not harness.core.reset_prefix_cache()
    harness.run()
    churn(harness, "x", 15)
    assert len(harness.host) > 0
    assert harness.core.reset_prefix_cache()
    assert len(harness.host) == 0
    harness.add("b", PROMPT, max_tokens=8)
    assert harness.run()["b", 0] == expected_tokens(PROMPT, 8)
    assert harness.kv.hits_total == 0


def test_what_is_unpublished_leaves_host_memory_too():
    harness = roomy()
    harness.add("a", PROMPT, max_tokens=2)
    harness.step()
    (request,) = harness.scheduler.requests
    harness.run()
    churn(harness, "x", 15)
    assert sum(key in harness.host._places for key in request.block_keys) == 5
    harness.kv.unpublish(request.block_keys[2:])
    assert [key in harness.host._places for key in request.block_keys] == [True, True, False, False, False]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_preempted_request_resumes_from_either_tier(ahead):
    computed = {}
    prompts = {name: [index * 20 + i for i in range(13)] for index, name in enumerate("abcd")}
    for num_chunks in (0, 30):
        harness = TieredHarness(num_chunks, num_blocks=16, max_num_seqs=4, budget=32, ahead=ahead)
        for name, prompt in prompts.items():
            harness.add(name, prompt, max_tokens=16)
        outputs = harness.run()
        assert harness.scheduler.num_preemptions_total > 0
        assert {name: outputs[name, 0] for name in prompts} == {n: expected_tokens(p, 16) for n, p in prompts.items()}
        computed[num_chunks] = sum(harness.device.num_computed.values())
    assert computed[30] < computed[0]
    harness = TieredHarness(30, num_blocks=64)
    for name, prompt in prompts.items():
        harness.add(name, prompt, max_tokens=16)
    harness.run()
    least = sum(harness.device.num_computed.values())
    assert computed[30] <= least + harness.scheduler.kv.block_size * 8, "only part-filled blocks are computed again"


class FailingRunner(FakeRunner):
    """A step of several requests fails now and then, before or after it was sent; both memories are lost then."""

    num_resets = 0
    next_failure = 9

    def dispatch(self, plan):
        fails = self.num_steps >= self.next_failure and len(plan.rows) > 1
        before = self.num_resets % 2 == 0
        if fails:
            self.next_failure = self.num_steps + 40
        if fails and before:
            raise RuntimeError("out of memory")
        handle = super().dispatch(plan)
        if fails:
            raise RuntimeError("out of memory")
        return handle

    def reset(self):
        self.num_resets += 1
        self.forget()
        for array in (self.device.pool, self.device.chunks):
            array[:] = -1
        self.device.tables[:] = 0

    def probe(self):
        pass


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_steps_that_fail_leave_nothing_wrong_in_either_tier(ahead, seed):
    harness = TieredHarness(6, 2, num_blocks=14, ahead=ahead)
    harness.runner = harness.core.runner = FailingRunner(harness.device)
    random_traffic(seed, harness, turns=120)
    assert harness.runner.num_resets > 1
    assert harness.kv.host_hits_total > 0


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(11, 24),
    num_chunks=st.integers(1, 6),
    chunk_size=st.integers(1, 4),
    budget=st.integers(5, 24),
    ahead=st.booleans(),
)
def test_random_traffic_gives_the_same_tokens(seed, num_blocks, num_chunks, chunk_size, budget, ahead):
    harness = TieredHarness(num_chunks, chunk_size, num_blocks=num_blocks, max_num_seqs=5, budget=budget, ahead=ahead)
    random_traffic(seed, harness)


def test_random_traffic_uses_the_host_tier():
    harness = TieredHarness(6, 2, num_blocks=12)
    random_traffic(1, harness)
    assert harness.kv.host_hits_total > 0
    assert harness.scheduler.num_preemptions_total > 0


def forty_runs(make):
    for seed in range(40):
        random_traffic(seed, make())


# ---- mutations ------------------------------------------------------------------------------


class LateDevice(TieredDevice):
    """Copies after the step."""

    def run_in_order(self, plan):
        copies, plan.chunk_copies = plan.chunk_copies, []
        tokens = super().run_in_order(plan)
        self.copy(copies)
        return tokens


class UnorderedDevice(TieredDevice):
    """Copies to the device before those to the host."""

    def copy(self, copies):
        super().copy(sorted(copies, key=lambda copy: copy.to_host))


class ForgetfulDevice(TieredDevice):
    """Loses every fifth copy."""

    def copy(self, copies):
        for copy in copies:
            self.num_copies += 1
            if self.num_copies % 5:
                super().copy([copy])
                self.num_copies -= 1


class ShiftedDevice(TieredDevice):
    """Takes blocks from the wrong place of their chunk."""

    def copy(self, copies):
        super().copy(copies)
        for copy in copies:
            if not copy.to_host and len(copy.blocks) > 1:
                (block, _), (_, place), *_ = copy.blocks
                self.pool[block] = self.chunks[copy.chunk, place]


@pytest.mark.parametrize("device", [LateDevice, UnorderedDevice, ForgetfulDevice, ShiftedDevice])
def test_a_copy_that_is_late_lost_or_wrong_is_caught(device):
    class Mutated(TieredHarness):
        device_class = device

    with pytest.raises(AssertionError):
        forty_runs(lambda: Mutated(3, 2, num_blocks=12, max_num_seqs=5))


def _reuse_what_is_being_read(monkeypatch):
    fill = HostTier._fill
    monkeypatch.setattr(HostTier, "_fill", lambda self, blocks, keep: fill(self, blocks, ()))


def _save_nothing(monkeypatch):
    monkeypatch.setattr(HostTier, "save", lambda self, free, count, keep=(): [])


def _keep_keys_of_reused_chunks(monkeypatch):
    monkeypatch.setattr(HostTier, "_forget", lambda self, chunk: None)


def _clear_the_device_alone(monkeypatch):
    monkeypatch.setattr(HostTier, "clear", lambda self: None)


@pytest.mark.parametrize("mutate", [_reuse_what_is_being_read, _keep_keys_of_reused_chunks])
def test_a_broken_bookkeeping_is_caught(monkeypatch, mutate):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        forty_runs(lambda: TieredHarness(2, 2, num_blocks=12, max_num_seqs=5))


@pytest.mark.parametrize(
    ("mutate", "test"),
    [
        (_save_nothing, test_a_prefix_that_left_the_device_comes_back_from_the_host),
        (_clear_the_device_alone, test_resetting_clears_both_tiers_unless_blocks_are_held),
    ],
)
def test_a_tier_that_saves_nothing_or_too_long_is_caught(monkeypatch, mutate, test):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        test()
