"""The sweep over kernel sizes: its candidates, what it keeps, what it leaves out; a fake clock in the GPU's place."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from octavo.pallas_kernels import autotune, autotune_products, tuning
from octavo.pallas_kernels.autotune import (
    OPERATIONS,
    AttentionTask,
    CandidateError,
    TuningShape,
    buffer_bytes,
    sweep,
    workloads,
)
from octavo.pallas_kernels.autotune_products import GroupedTask, QuantizedTask
from octavo.pallas_kernels.compat import mosaic_missing
from octavo.pallas_kernels.dispatch import AttentionShape, gpu_interpreter
from octavo.pallas_kernels.ragged_paged_attention import work_spec
from octavo.pallas_kernels.work_lists import WorkListSpec

LLAMA = TuningShape(num_heads=32, num_kv_heads=8, head_dim=128)
CONTEXT = 8192


def task(operation, shape=LLAMA):
    return AttentionTask(operation, shape, CONTEXT)


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

    trials = sweep(task(operation), measure)
    assert len(measured) == len(set(measured)) == len(trials)
    assert measured[0] == task(operation).default()
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

    trials = sweep(task(operation), measure)
    assert trials[0].config.tile_kv != 128
    failed = [trial for trial in trials if trial.error]
    assert failed
    assert all("spills 24 bytes" in trial.as_dict()["error"] and trial.seconds is None for trial in failed)
    assert trials[-1].error


def test_without_a_usable_candidate_the_reason_is_given():
    def measure(config):
        raise RuntimeError("ptxas died")

    with pytest.raises(CandidateError, match=r"no candidate of ragged_paged_attention .* ptxas died"):
        sweep(task("ragged_paged_attention"), measure)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_buffers_of_all_candidates_fit(operation, head_dim, block_size, kv_dtype):
    seen = []

    def measure(config):
        seen.append(config)
        return (1.0,)

    shape = replace(LLAMA, head_dim=head_dim, block_size=block_size, kv_dtype=kv_dtype)
    sweep(task(operation, shape), measure)
    assert len(seen) >= 2
    for config in seen:
        assert buffer_bytes(shape, config) <= autotune.SHARED_MEMORY_BYTES
        assert config.tile_kv % block_size == 0
    widened = kv_dtype and operation == "ragged_paged_attention"
    assert len({config.raw_stages for config in seen if hasattr(config, "raw_stages")}) > 1 or not widened


def test_a_float8_pool_has_its_own_entry_and_takes_half_the_space():
    float8 = replace(LLAMA, kv_dtype="float8_e4m3fn")
    assert LLAMA.when()["kv_dtype"] == "bfloat16"
    assert float8.when()["kv_dtype"] == "float8_e4m3fn"
    decode, mixed = (task(operation).default() for operation in OPERATIONS)
    assert buffer_bytes(LLAMA, decode) == 2 * decode.stages * 64 * 128 * 2
    assert buffer_bytes(float8, decode) == 2 * decode.stages * 64 * 128 + 64 * 128 * 2
    assert buffer_bytes(float8, mixed) == 2 * mixed.stages * 128 * 128 * 2 + mixed.raw_stages * 128 * 128
    autotune_bytes = autotune.POOL_BYTES
    autotune.POOL_BYTES = 1
    try:
        _, pools, _ = autotune.make_arrays(replace(float8, num_heads=4, num_kv_heads=2, head_dim=64), ((1, 20),))
    finally:
        autotune.POOL_BYTES = autotune_bytes
    assert {pool.dtype for pool in pools} == {jnp.dtype(jnp.float8_e4m3fn)}


def test_another_number_of_multiprocessors_cuts_the_work_otherwise(monkeypatch):
    """What is tuned, what the host plans by and what is traced are for the same GPU; and what was measured on one does
    not fix the number of thread blocks."""
    before = task("paged_attention").default()
    small = SimpleNamespace(device_kind="NVIDIA H20", core_count=78, platform="gpu")
    monkeypatch.setattr(tuning.jax, "devices", lambda: [small])
    decode, mixed = (task(operation).default() for operation in OPERATIONS)
    assert (before.target_thread_blocks, decode.target_thread_blocks, mixed.num_ctas) == (4 * 132, 4 * 78, 78)
    assert "num_ctas" not in task("ragged_paged_attention").fields(mixed)
    swept = []
    sweep(task("paged_attention"), lambda config: (swept.append(config.target_thread_blocks), (1.0,))[1])
    assert set(swept) == {78, 2 * 78, 4 * 78, 8 * 78}
    shape = AttentionShape(32, 8, 128, 16, "bfloat16")
    (planned,) = WorkListSpec.of(shape, 512, [None]).specs
    q = jax.ShapeDtypeStruct((4, 32, 128), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((9, 2, 8, 16, 128), jnp.bfloat16)
    assert planned == work_spec(q, kv, 512)
    assert (planned.tuning, planned.decode.tuning) == (mixed, decode)


def test_the_mean_is_geometric():
    trial = autotune.Trial(task("paged_attention").default(), (1e-6, 1e-4))
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


TINY = TuningShape(num_heads=2, num_kv_heads=1, head_dim=64)
MEASURED = {
    "decode": AttentionTask("paged_attention", TINY, 20),
    "mixed, float8": AttentionTask("ragged_paged_attention", replace(TINY, kv_dtype="float8_e4m3fn"), 20),
    "packed weights": QuantizedTask(64, 64, 4, 32, True, num_tokens=2),
    "experts": GroupedTask(2, 64, 64, rows_a_group=1),
}


@pytest.mark.skipif(mosaic_missing() is not None, reason=str(mosaic_missing()))
@pytest.mark.parametrize("measured", MEASURED.values(), ids=MEASURED)
def test_what_is_timed_runs(measured, monkeypatch):
    """Interpreted, and timed in earnest: the chains of layers, their arrays and the clock."""
    interpret = gpu_interpreter()
    monkeypatch.setattr(autotune, "REPEATS", 1)
    monkeypatch.setattr(autotune, "WARM_UP_CALLS", 0)
    monkeypatch.setattr(autotune, "TARGET_S", 0.0)
    monkeypatch.setattr(autotune, "POOL_BYTES", 1)
    monkeypatch.setattr(autotune_products, "WEIGHT_BYTES", 1)
    rows = ((1, 20), (1, 3)) if measured.operation == "ragged_paged_attention" else ((1, 20),)
    monkeypatch.setattr(autotune, "workloads", lambda *_: {"tiny": rows})
    monkeypatch.setattr(autotune, "chain", partial(autotune.chain, interpret=interpret))
    monkeypatch.setattr(autotune, "compile_candidate", lambda function, *_: jax.jit(function))
    monkeypatch.setattr(
        autotune_products, "compile_candidate", lambda function, *_: jax.jit(partial(function, interpret=interpret))
    )
    (seconds,) = measured.measure(measured.default())
    assert 0 < seconds < 60
