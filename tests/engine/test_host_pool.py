"""Real copies between the KV pool and host memory, and an engine that answers from both tiers."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.sharding import Mesh
from tiny_llm import make_llm
from tiny_model import tiny_model

from octavo import LLM, SamplingParams
from octavo.engine import host_pool
from octavo.engine.args import EngineArgs
from octavo.engine.compile_cache import COMPILES
from octavo.engine.config import GIB, EngineConfig
from octavo.engine.errors import ConfigError
from octavo.engine.host_pool import HostPool, abstract_chunk, lower_swap_in, lower_swap_out
from octavo.engine.host_tier import SWAP_CHUNK, ChunkCopy
from octavo.models.kv_cache import KVCacheSpec
from octavo.pallas_kernels.aot import aot_missing, compile_program, find_target, target_mesh
from octavo.pallas_kernels.compat import mosaic_missing

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % 290 + 3 for j in range(16 + 5 * i % 37)] for i in range(10)]
SMALL_POOL = {"num_gpu_blocks_override": 20, "max_model_len": 64}
HOST_GIB = 0.001
"""512 blocks of the tiny model."""


# ---- copies ---------------------------------------------------------------------------------


def copy_there_and_back(dtype: str, num_kv_heads: int, mesh: Mesh) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """A pool of random bits, some of whose blocks go to the host and come back elsewhere; the layers before, after."""
    spec = KVCacheSpec(3, 12, num_kv_heads, 4, 8, jnp.dtype(dtype))
    pool = HostPool(spec, mesh, num_chunks=2, chunk_size=4)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "tp"))
    rng = np.random.default_rng(0)
    before = [rng.standard_normal(spec.layer_shape).astype(spec.dtype) for _ in range(spec.num_layers)]
    kv = [jax.device_put(layer, sharding) for layer in before]
    chunk, ids = abstract_chunk(spec, mesh, 4), jax.ShapeDtypeStruct((4,), jnp.int32)
    out, back = lower_swap_out(kv, chunk, ids).compile(), lower_swap_in(kv, chunk, ids).compile()
    pool.save(out, kv, ChunkCopy(True, 0, ((3, 0), (4, 1), (5, 2), (6, 3))))
    pool.save(out, kv, ChunkCopy(True, 1, ((11, 0),)))
    kv = pool.restore(back, kv, ChunkCopy(False, 0, ((7, 1), (1, 3))))
    kv = pool.restore(back, kv, ChunkCopy(False, 1, ((2, 0),)))
    assert all(layer.sharding == sharding for layer in kv)
    return before, [np.asarray(layer) for layer in kv]


def expect_moved(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    for old, new in zip(before, after, strict=True):
        expected = old.copy()
        expected[7], expected[1], expected[2] = old[4], old[6], old[11]
        assert new.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_a_block_comes_back_bit_by_bit_and_no_other_changes(dtype, num_kv_heads):
    expect_moved(*copy_there_and_back(dtype, num_kv_heads, Mesh(np.array(jax.devices()[:1]), ("tp",))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_through_pinned_host_memory(monkeypatch, dtype):
    """A CPU has that kind of memory too: as on a GPU, arrays in it are written and read by compiled programs."""
    monkeypatch.setattr(host_pool, "memory_kind", lambda mesh: "pinned_host")
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    assert abstract_chunk(KVCacheSpec(1, 2, 1, 4, 8, jnp.dtype(dtype)), mesh).sharding.memory_kind == "pinned_host"
    expect_moved(*copy_there_and_back(dtype, 2, mesh))


TWO_DEVICES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
sys.path[:0] = [{tests!r}, {support!r}]
import numpy as np
from test_host_pool import abstract_chunk, copy_there_and_back, expect_moved
from jax.extend.mlir import ir
from jax.sharding import Mesh
mesh = Mesh(np.array(jax.devices()), ("tp",))
assert mesh.size == 2
expect_moved(*copy_there_and_back("bfloat16", 4, mesh))
"""


def test_each_of_two_devices_copies_its_heads():
    here = Path(__file__).parent
    code = TWO_DEVICES.format(tests=str(here), support=str(here.parent / "support"))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


# ---- compiled for a GPU ---------------------------------------------------------------------

missing = aot_missing() or mosaic_missing()
LLAMA_8B = KVCacheSpec(32, 4000, 8, 16, 128, jnp.dtype(jnp.bfloat16))


def compile_swap(lower, num_devices: int):
    """A copy program for described H200s. Those have no memories to name: that the chunk is an argument in pinned host
    memory, as it is on a real GPU, is written into the program."""
    mesh = target_mesh(find_target("h200"), num_devices)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "tp"))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    layer = jax.ShapeDtypeStruct(LLAMA_8B.layer_shape, LLAMA_8B.dtype, sharding=sharding)
    ids = jax.ShapeDtypeStruct((SWAP_CHUNK,), jnp.int32, sharding=replicated)

    def lower_in_host_memory():
        lowered = lower([layer] * LLAMA_8B.num_layers, abstract_chunk(LLAMA_8B, mesh), ids)
        module = lowered.compiler_ir("stablehlo")
        (main,) = (op for op in module.body.operations if op.attributes["sym_name"].value == "main")
        with module.context:
            each = [{item.name: item.attr for item in attributes} for attributes in main.attributes["arg_attrs"]]
            each[LLAMA_8B.num_layers]["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
            main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(attributes) for attributes in each])
        return lowered

    report = compile_program(lower_in_host_memory)
    arguments, results = report.hlo.partition("entry_computation_layout=")[2].partition("\n")[0].split("->")
    return report, arguments.count(HOST_LAYOUT), results.count(HOST_LAYOUT)


HOST_LAYOUT = ":S(5)"
"""Host memory, in XLA's numbering."""


@pytest.mark.skipif(missing is not None, reason=str(missing))
@pytest.mark.parametrize("num_devices", [1, 2])
def test_an_h200_saves_a_chunk_with_one_kernel_and_one_copy_to_pinned_memory(num_devices):
    report, in_host, out_host = compile_swap(lower_swap_out, num_devices)
    chunk_bytes = LLAMA_8B.bytes_per_block * SWAP_CHUNK // num_devices
    assert (in_host, out_host) == (1, 1)
    assert "input_output_alias={ {}: (32, {}, may-alias) }" in report.hlo, "the old chunk's memory is used again"
    assert report.output_bytes == 0, "on the device"
    assert report.temp_bytes < chunk_bytes * 1.01
    assert report.launches == {"kCustomKernel": 1, "kAsyncStart": 1, "kCopy": 1, "kAsyncDone": 1}
    assert report.sizes_of("all-gather") == report.sizes_of("all-reduce") == []


@pytest.mark.skipif(missing is not None, reason=str(missing))
@pytest.mark.parametrize("num_devices", [1, 2])
def test_an_h200_restores_a_chunk_with_one_copy_and_updates_the_pool_in_place(num_devices):
    report, in_host, out_host = compile_swap(lower_swap_in, num_devices)
    chunk_bytes = LLAMA_8B.bytes_per_block * SWAP_CHUNK // num_devices
    assert (in_host, out_host) == (1, 0)
    assert report.alias_bytes == LLAMA_8B.bytes_per_block * LLAMA_8B.num_blocks // num_devices
    assert report.temp_bytes < chunk_bytes * 1.01
    assert report.launches == {"kCustomKernel": 32, "kAsyncStart": 1, "kCopy": 1, "kAsyncDone": 1}
    assert report.sizes_of("all-gather") == report.sizes_of("all-reduce") == []


# ---- an engine ------------------------------------------------------------------------------


def answers(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [choice.token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False) for choice in output.outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(folder):
    llm = make_llm(folder, **SMALL_POOL, enable_prefix_caching=False)
    return [llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def tiered(folder):
    return make_llm(folder, **SMALL_POOL, swap_space=HOST_GIB)


def test_the_host_tier_gives_the_same_tokens_for_less_work(folder, tiered, alone):
    computed = []
    for llm in (make_llm(folder, **SMALL_POOL), tiered):
        compiles = COMPILES.after_ready
        for _ in range(3):
            assert answers(llm) == alone
            llm._core.scheduler.check_integrity()
        assert COMPILES.after_ready == compiles
        stats = llm._core.stats()
        assert stats.num_preemptions_total > 0
        computed.append(stats.prompt_tokens_computed_total)
    assert stats.external_prefix_cache_hits_total > 0
    assert computed[1] < 0.6 * computed[0]


def test_cached_tokens_count_both_tiers(tiered, alone):
    tiered.reset_prefix_cache()
    assert answers(tiered) == alone
    before = tiered._core.stats()
    (output,) = tiered.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    after = tiered._core.stats()
    assert output.num_cached_tokens == (len(PROMPTS[0]) - 1) // 4 * 4
    assert after.external_prefix_cache_hits_total > before.external_prefix_cache_hits_total
    assert output.outputs[0].token_ids == alone[0]


def test_a_wrong_copy_in_host_memory_would_be_seen(tiered, alone):
    """The mutation: what lies in host memory decides the tokens."""
    tiered.reset_prefix_cache()
    answers(tiered)
    pool = tiered._core.runner._host_pool
    pool._chunks = [chunk * 0.5 for chunk in pool._chunks]
    assert answers(tiered) != alone
    assert tiered.reset_prefix_cache()
    assert answers(tiered) == alone


def test_after_an_interrupted_step_both_tiers_are_empty(tiered, alone, monkeypatch):
    answers(tiered)
    resolve, calls = tiered._core.runner.resolve, []

    def interrupt(handle):
        calls.append(handle)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return resolve(handle)

    monkeypatch.setattr(tiered._core.runner, "resolve", interrupt)
    with pytest.raises(KeyboardInterrupt):
        answers(tiered)
    monkeypatch.undo()
    assert len(tiered._core.scheduler.kv.host_tier) == 0
    assert answers(tiered) == alone


def test_windows_and_as_many_kv_heads_as_query_heads(tmp_path):
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9}
    model = tiny_model(tmp_path, **mistral, num_key_value_heads=4)
    small = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 56, "num_gpu_blocks_override": 15}
    llm = make_llm(model, **small, swap_space=HOST_GIB, enforce_eager=True)
    expected = []
    for prompt in PROMPTS[:4]:
        expected += [output.outputs[0].token_ids for output in llm.generate([prompt], GREEDY, use_tqdm=False)]
        llm.reset_prefix_cache()
    assert llm._core.stats().external_prefix_cache_hits_total == 0
    for _ in range(2):
        outputs = llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm._core.stats().external_prefix_cache_hits_total > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_space": -1.0}, "swap_space"),
        ({"swap_space": float("nan")}, "swap_space"),
        ({"swap_space": float("inf")}, "swap_space"),
        ({"swap_space": 1.0, "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"swap_space": 1000 / GIB}, "one chunk of 16 blocks"),
        ({"swap_space": 500_000.0}, "swap_space"),
    ],
)
def test_a_size_that_cannot_be_served_is_refused(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(folder, enforce_eager=True, **options)


def test_host_memory_that_is_not_there_is_refused():
    """Per device, so two take twice as much; a chunk that does not fit whole is not made."""
    config = replace(EngineConfig.from_args(EngineArgs(swap_space=1.0)), tensor_parallel_size=2)
    block = GIB // 40
    assert config.with_host_tier(block, 2 * GIB).cache.num_host_chunks == 2
    assert config.with_host_tier(block, None).cache.num_host_chunks == 2
    with pytest.raises(ConfigError, match=r"swap_space: 2 GiB are more than the 1\.9 GiB"):
        config.with_host_tier(block, int(1.9 * GIB))
    with pytest.raises(ConfigError, match="one chunk of 16 blocks"):
        config.with_host_tier(GIB // 15, None)
