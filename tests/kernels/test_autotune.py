"""The sweep over kernel sizes: its candidates, what it keeps, what it leaves out; a fake clock in the GPU's place."""

from dataclasses import replace

import pytest

from octavo.pallas_kernels import autotune
from octavo.pallas_kernels.autotune import OPERATIONS, CandidateError, TuningShape, default_config, sweep, workloads

LLAMA = TuningShape(num_heads=32, num_kv_heads=8, head_dim=128)


def seconds_of(config):
    """Best at 128 keys, 3 stages and, where there are items, 512 keys and 264 blocks; all of it worth something."""
    cost = abs(config.tile_kv - 128) + 10 * abs(config.stages - 3)
    if hasattr(config, "min_keys_per_item"):
        cost += abs(config.min_keys_per_item - 512) / 100 + abs(config.target_thread_blocks - 264) / 1000
    return ((1 + cost) * 1e-6, (2 + cost) * 1e-4)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_best_candidate_is_found_and_no_config_is_measured_twice(operation):
    measured = []

    def measure(config):
        measured.append(config)
        return seconds_of(config)

    trials = sweep(operation, LLAMA, measure)
    assert len(measured) == len(set(measured)) == len(trials)
    assert measured[0] == default_config(operation, LLAMA)
    best = trials[0].config
    assert (best.tile_kv, best.stages) == (128, 3)
    if operation == "paged_attention":
        assert (best.min_keys_per_item, best.target_thread_blocks) == (512, 264)
    scores = [trial.score for trial in trials]
    assert scores == sorted(scores)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_candidates_that_fail_are_recorded_and_left_out(operation):
    def measure(config):
        if config.tile_kv == 128:
            raise CandidateError("spills 24 bytes of registers")
        return seconds_of(config)

    trials = sweep(operation, LLAMA, measure)
    assert trials[0].config.tile_kv != 128
    failed = [trial for trial in trials if trial.error]
    assert failed
    assert all("spills 24 bytes" in trial.as_dict()["error"] and trial.seconds is None for trial in failed)
    assert trials[-1].error


def test_without_a_usable_candidate_the_reason_is_given():
    def measure(config):
        raise RuntimeError("ptxas died")

    with pytest.raises(CandidateError, match=r"no candidate of ragged_paged_attention .* ptxas died"):
        sweep("ragged_paged_attention", LLAMA, measure)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 64])
def test_buffers_of_all_candidates_fit(operation, head_dim, block_size):
    seen = []

    def measure(config):
        seen.append(config)
        return (1.0,)

    shape = replace(LLAMA, head_dim=head_dim, block_size=block_size)
    sweep(operation, shape, measure)
    assert len(seen) >= 2
    for config in seen:
        assert config.stages * 2 * config.tile_kv * head_dim * 2 <= autotune.SHARED_MEMORY_BYTES
        assert config.tile_kv % block_size == 0


def test_the_mean_is_geometric():
    trial = autotune.Trial(default_config("paged_attention", LLAMA), (1e-6, 1e-4))
    assert trial.score == pytest.approx(1e-5)


def test_workloads_stay_within_the_context():
    for operation in OPERATIONS:
        for rows in workloads(operation, 4096).values():
            assert all(1 <= query_len <= seq_len <= 4096 for query_len, seq_len in rows)
        longest = max(seq_len for rows in workloads(operation, 10**6).values() for _, seq_len in rows)
        assert longest >= 8192


def test_arrays_cover_their_rows():
    rows = ((1, 40), (3, 20))
    shape = TuningShape(num_heads=4, num_kv_heads=2, head_dim=64, dtype="float32")
    shrunk = autotune.POOL_BYTES
    autotune.POOL_BYTES = 1
    try:
        q, pools, arrays = autotune.make_arrays(shape, rows)
    finally:
        autotune.POOL_BYTES = shrunk
    assert q.shape == (4, 4, 64)
    assert len(pools) == 2
    tables = arrays["tables"]
    used = [int(block) for row, count in ((0, 3), (1, 2)) for block in tables[row, :count]]
    assert sorted(used) == [1, 2, 3, 4, 5]
    assert arrays["starts"].tolist() == [0, 1, 4]
