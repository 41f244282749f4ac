"""What fits is taken; what does not is refused before memory is asked for, with the numbers and what would help."""

import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh
from tiny_model import tiny_model

from octavo import LLM
from octavo.engine import launch, memory, plan, pool_size
from octavo.engine.args import EngineArgs
from octavo.engine.config import GIB, EngineConfig
from octavo.engine.errors import ConfigError
from octavo.engine.memory import MemoryPlan, available_host_memory, check_room, describe_shortage

BLOCK = 4 * 2 * 2 * 2 * 16 * 4
"""Bytes of a block of the tiny model: 4 tokens, keys and values, 2 layers, 2 heads of 16, float32."""


def config(**options) -> EngineConfig:
    made = EngineConfig.from_args(EngineArgs(model="model", **{"block_size": 4, **options}))
    return made.resolve(
        platform="cpu",
        context_len=256,
        model_path="",
        model_name="model",
        vocab_size=300,
        eos_token_ids=frozenset(),
    )


def make_llm(folder, **options) -> LLM:
    options = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 16, "enforce_eager": True, **options}
    return LLM(str(folder), skip_tokenizer_init=True, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def files(folder, **contents: str) -> None:
    for name, text in contents.items():
        (folder / name.replace("__", ".")).write_text(text)


# ---- the length of contexts -----------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "auto", -1])
def test_auto_takes_what_fits_and_says_so(value, caplog):
    with caplog.at_level(logging.INFO):
        assert config(max_model_len=value).with_pool(11, BLOCK).max_model_len == 40
        assert "max_model_len: 40" in caplog.text
        assert config(max_model_len=value).with_pool(1000, BLOCK).max_model_len == 256
        assert "max_model_len: 256" in caplog.text


@pytest.mark.parametrize("value", [0, -2, "long", 1.5, True])
def test_a_length_that_is_none_is_refused(value):
    with pytest.raises(ConfigError, match="max_model_len"):
        config(max_model_len=value)


@pytest.mark.parametrize(
    ("options", "enlarge"),
    [
        ({}, "gpu_memory_utilization"),
        ({"num_gpu_blocks_override": 11}, "num_gpu_blocks_override"),
        ({"kv_cache_memory_bytes": 11 * BLOCK}, "kv_cache_memory_bytes"),
    ],
)
def test_a_length_that_does_not_fit_is_refused_with_the_numbers(options, enlarge):
    with pytest.raises(ConfigError) as caught:
        config(max_model_len=200, **options).with_pool(11, GIB)
    text = str(caught.value)
    for part in ("max_model_len 200", "50 blocks, 50.00 GiB", "10 blocks, 10.00 GiB", "40 tokens", "auto", enlarge):
        assert part in text
    longest = int(re.search(r"longest that fits is (\d+)", text)[1])
    assert config(max_model_len=longest, **options).with_pool(11, GIB).max_model_len == longest
    with pytest.raises(ConfigError):
        config(max_model_len=longest + 1, **options).with_pool(11, GIB)


def test_an_engine_with_a_small_pool_has_a_short_context(folder):
    llm = make_llm(folder, max_model_len="auto", kv_cache_memory_bytes=11 * BLOCK)
    assert (llm.config.num_blocks, llm.config.max_model_len) == (11, 40)
    with pytest.raises(ConfigError, match="longest that fits is 40 tokens"):
        make_llm(folder, max_model_len=64, kv_cache_memory_bytes=11 * BLOCK)


# ---- what does not fit ----------------------------------------------------------------------


def plan_of(**changes) -> MemoryPlan:
    values = {"device": 20 * GIB, "usable": 18 * GIB, "weights": 16 * GIB, "state": GIB // 4, "temporaries": GIB // 4}
    return MemoryPlan(**{**values, "reserve": GIB, "block": GIB // 8, **changes})


def test_what_fits_is_not_complained_about():
    assert plan_of().pool == GIB // 2
    assert describe_shortage(plan_of(), config(), dtype="bfloat16", platform="gpu", num_blocks=4) is None
    assert describe_shortage(plan_of(), config(), dtype="bfloat16", platform="gpu", num_blocks=5) is not None


@pytest.mark.parametrize(
    ("changes", "dtype", "platform", "num_blocks", "parts", "absent"),
    [
        (
            {"weights": 20 * GIB},
            "bfloat16",
            "gpu",
            2,
            ["3.75 GiB too much", "tensor_parallel_size (now 1)", "--quantization", "a smaller"],
            ["dtype", "number"],
        ),
        ({"weights": 20 * GIB}, "float32", "gpu", 2, ["dtype bfloat16, which saves 10.00 GiB"], ["utilization"]),
        ({"weights": 17 * GIB}, "bfloat16", "gpu", 2, ["0.75 GiB", "gpu_memory_utilization 0.958 or more"], ["dtype"]),
        ({"temporaries": GIB}, "bfloat16", "gpu", 2, ["temporaries of a step 1.00 GiB", "max_num_batched_tokens"], []),
        ({}, "bfloat16", "gpu", 9, ["0.62 GiB too much", "(4 blocks, 0.50 GiB, fit)", "kv_cache_memory_bytes"], []),
        ({"usable": 8 * GIB}, "float32", "cpu", 2, ["free memory", "of this machine"], ["utilization", "tensor"]),
    ],
)
def test_the_message_says_by_how_much_and_what_would_help(changes, dtype, platform, num_blocks, parts, absent):
    made = config(kv_cache_memory_bytes=GIB)
    with pytest.raises(ConfigError) as caught:
        check_room(plan_of(**changes), made, dtype=dtype, platform=platform, num_blocks=num_blocks)
    text = str(caught.value).replace("this machine's", "of this machine's")
    assert text.startswith("model does not fit: ")
    assert [part for part in parts if part not in text] == []
    assert [part for part in absent if part in text] == []


def test_a_model_too_large_for_the_machine_is_refused_before_its_weights_are_read(folder, monkeypatch):
    monkeypatch.setattr(pool_size, "available_host_memory", lambda: memory.CPU_RESERVE_BYTES + 100_000)
    monkeypatch.setattr(launch, "load_params", lambda *args, **options: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=r"does not fit: it takes .* MiB too much.*weights in float32 .* MiB"):
        make_llm(folder)


def test_the_default_pool_shrinks_to_the_memory_there_is_and_one_asked_for_does_not(folder, monkeypatch):
    monkeypatch.setattr(pool_size, "available_host_memory", lambda: memory.CPU_RESERVE_BYTES + 64 * 2**20)
    llm = make_llm(folder)
    assert 2 < llm.config.num_blocks * BLOCK <= 64 * 2**20
    for option in ({"kv_cache_memory_bytes": 2**27}, {"num_gpu_blocks_override": 2**27 // BLOCK}):
        with pytest.raises(ConfigError, match=rf"a smaller {next(iter(option))} \(.* fit\)"):
            make_llm(folder, **option)
    with pytest.raises(ConfigError, match=r"swap_space: 1\.00 GiB are more than"):
        make_llm(folder, swap_space=1.0)


def test_without_a_word_from_the_system_the_defaults_hold(folder, monkeypatch):
    monkeypatch.setattr(pool_size, "available_host_memory", lambda: None)
    llm = make_llm(folder, kv_cache_memory_bytes=2**20)
    assert llm.config.num_blocks == 2**20 // BLOCK


def test_two_blocks_are_the_least(folder):
    with pytest.raises(ConfigError, match=r"holds 1 blocks .* at least 2"):
        make_llm(folder, kv_cache_memory_bytes=BLOCK)


def test_the_end_of_memory_is_told_as_what_it_is():
    for error in (MemoryError(), JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")):
        with (
            pytest.raises(ConfigError, match="memory ran out while the weights were loaded"),
            pool_size.explain_out_of_memory(config(), "the weights were loaded"),
        ):
            raise error
    with pytest.raises(JaxRuntimeError), pool_size.explain_out_of_memory(config(), "nothing"):
        raise JaxRuntimeError("INTERNAL: something else")


# ---- a GPU, made up -------------------------------------------------------------------------


class FakeGPU(SimpleNamespace):
    platform = "gpu"

    def memory_stats(self):
        return self.stats


def gpu_pool(monkeypatch, stats, *, temporaries=GIB, weights=2 * GIB, **options) -> tuple[int, list[str]]:
    """choose_num_blocks for a model that has been loaded; the blocks, and whether a step was compiled."""
    compiled = []
    monkeypatch.setattr(pool_size, "_temporaries", lambda *args: compiled.append("step") or temporaries)
    monkeypatch.setattr(pool_size, "state_bytes", lambda spec: 0)
    leaf = SimpleNamespace(addressable_shards=[SimpleNamespace(data=SimpleNamespace(nbytes=weights))])
    mesh = SimpleNamespace(devices=np.array([FakeGPU(stats=stats)]), size=1)
    model = SimpleNamespace(mesh=mesh, params={"w": leaf})
    small = SimpleNamespace(kv=SimpleNamespace(bytes_per_block=2**20), dtype=np.dtype("float32"))
    return pool_size.choose_num_blocks(config(**options), model, small, None), compiled


def test_a_gpu_gives_what_is_left(monkeypatch):
    stats = {"bytes_limit": 10 * GIB, "bytes_in_use": 2 * GIB}
    assert gpu_pool(monkeypatch, stats) == (6 * 1024, ["step"])
    assert gpu_pool(monkeypatch, stats, num_gpu_blocks_override=100) == (100, ["step"])
    with pytest.raises(ConfigError, match=r"6144 blocks, 6\.00 GiB, fit"):
        gpu_pool(monkeypatch, stats, kv_cache_memory_bytes=7 * GIB)
    with pytest.raises(ConfigError, match="does not fit"):
        gpu_pool(monkeypatch, stats, temporaries=8 * GIB)


def test_a_pool_has_no_more_slots_than_int32_numbers(monkeypatch, caplog):
    """Nor one that was asked for; the number after the last slot stands for none, and is one of them."""
    stats, limit = {"bytes_limit": 2**60, "bytes_in_use": 0}, np.iinfo(np.int32).max
    for asked in ({}, {"num_gpu_blocks_override": 2**35}, {"kv_cache_memory_bytes": 2**59}):
        caplog.clear()
        num_blocks, _ = gpu_pool(monkeypatch, stats, **asked)
        size = config(**asked).block_size
        assert num_blocks * size <= limit < (num_blocks + 1) * size
        said = [record.message for record in caplog.records if "slots" in record.message]
        assert len(said) == 1
        assert f"{num_blocks} of " in said[0]
    assert pool_size.cap_blocks(2**27 - 1, 16) == 2**27 - 1
    assert pool_size.cap_blocks(2**27, 16) == 2**27 - 1


def test_a_given_pool_with_ample_room_needs_no_compiled_step(monkeypatch):
    stats = {"bytes_limit": 100 * GIB, "bytes_in_use": 2 * GIB}
    assert gpu_pool(monkeypatch, stats, kv_cache_memory_bytes=GIB) == (1024, [])


def test_a_device_that_does_not_tell_its_memory_needs_a_size(monkeypatch):
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        gpu_pool(monkeypatch, None)
    assert gpu_pool(monkeypatch, {}, num_gpu_blocks_override=50) == (50, [])


def test_the_plan_and_the_start_say_the_same():
    """``octavo plan`` has the same limits and words: what it says fits, fits."""
    short = plan_of(weights=17 * GIB)
    _, problem = plan._fit(config(), short, 0, "bfloat16")
    with pytest.raises(ConfigError) as caught:
        check_room(short, config(), dtype="bfloat16", platform="gpu")
    assert str(caught.value) == f"model does not fit: {problem}"
    fitting, problem = plan._fit(config(), plan_of(), 4, "bfloat16")
    assert (problem, fitting.max_model_len) == (None, 12)
    _, problem = plan._fit(config(max_model_len=16), plan_of(), 4, "bfloat16")
    assert "longest that fits is 12 tokens" in problem


def test_bytes_of_weights_are_those_of_the_loaded_arrays(folder):
    llm = make_llm(folder, kv_cache_memory_bytes=2**20)
    params = llm._core.runner._params
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    assert pool_size.weights_bytes(shapes, specs, mesh) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


# ---- the machine ----------------------------------------------------------------------------


def test_available_memory_is_the_least_of_machine_and_control_group(tmp_path):
    proc, group = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    group.mkdir()
    assert available_host_memory(proc, group) is None
    files(proc, meminfo="MemTotal: 900 kB\nMemAvailable:   500 kB\nHugePages_Total: 0\n")
    assert available_host_memory(proc, group) == 500 * 1024
    files(group, memory__max="max\n", memory__current="1000\n")
    assert available_host_memory(proc, group) == 500 * 1024
    files(group, memory__max="9000\n", memory__current="5000\n", memory__stat="anon 100\ninactive_file 700\n")
    assert available_host_memory(proc, group) == 9000 - 5000 + 700
    files(group, memory__current="99000\n", memory__stat="inactive_file 0\n")
    assert available_host_memory(proc, group) == 0


def test_the_older_control_groups_are_read_too(tmp_path):
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("3000")
    (folder / "memory.usage_in_bytes").write_text("1000")
    (folder / "memory.stat").write_text("total_inactive_file 500")
    assert available_host_memory(tmp_path / "proc", tmp_path) == 2500


def test_a_loaded_model_is_not_counted_twice(folder, monkeypatch):
    """After loading, its weights are gone from what is available, and the plan knows that they are."""
    seen = []
    check = pool_size.check_room
    monkeypatch.setattr(pool_size, "check_room", lambda plan, *a, **k: (seen.append(plan), check(plan, *a, **k)))
    available = [2**31, 2**31 - 400_000]
    monkeypatch.setattr(pool_size, "available_host_memory", lambda: available.pop(0))
    make_llm(folder, kv_cache_memory_bytes=2**20)
    before, after = seen
    assert before.weights == after.weights > 300_000
    assert abs(replace(before, usable=after.usable).usable - before.usable) < 20_000
