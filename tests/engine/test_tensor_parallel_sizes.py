"""What several devices can share, and what is refused by name: no device is used here."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from octavo.engine import launch, pool_size
from octavo.engine.args import EngineArgs
from octavo.engine.config import EngineConfig
from octavo.engine.core_parts import choose_attention
from octavo.engine.errors import ConfigError
from octavo.engine.memory import CPU_POOL_BYTES
from octavo.models.architectures.base import WeightMapping
from octavo.models.decoder_config import DecoderConfig, LayerSpec, MoESpec
from octavo.models.errors import ModelConfigError
from octavo.models.quantization.spec import WeightSpec
from octavo.models.quantization.weights import empty_weight
from octavo.models.sharding import as_in_checkpoint, split_over
from octavo.pallas_kernels.dispatch import Device

ROOT = Path(__file__).resolve().parents[2]
DENSE = DecoderConfig(
    vocab_size=301,
    hidden_size=64,
    intermediate_size=96,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    layers=(LayerSpec(None),),
    norm_eps=1e-5,
)


@pytest.mark.parametrize(("devices", "kv_heads", "vocab"), [(1, 2, 301), (2, 2, 302), (4, 4, 304), (8, 8, 304)])
def test_what_does_not_divide_is_copied_or_padded(devices, kv_heads, vocab):
    shared = split_over(DENSE, devices)
    assert (shared.num_kv_heads, shared.vocab_size, shared.num_heads) == (kv_heads, vocab, 8)
    assert as_in_checkpoint(shared) == DENSE


@pytest.mark.parametrize(
    ("changes", "devices", "match"),
    [
        ({"num_heads": 9, "num_kv_heads": 3}, 2, "num_attention_heads of 9"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "num_key_value_heads of 3 nor is a multiple"),
        ({"num_heads": 12, "num_kv_heads": 4}, 6, "num_key_value_heads of 4"),
        ({"intermediate_size": 98}, 4, "tensor_parallel_size 4 does not divide the model's intermediate_size of 98"),
        (
            {"layers": (LayerSpec(None, moe=MoESpec(4, 2, 34)),), "intermediate_size": 97},
            4,
            "moe_intermediate_size of 34",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(changes, devices, match):
    with pytest.raises(ModelConfigError, match=match):
        split_over(replace(DENSE, **changes), devices)


@pytest.mark.parametrize(
    ("changes", "devices", "possible"),
    [
        ({"num_heads": 9, "num_kv_heads": 3, "intermediate_size": 1536}, 2, "possible: 3"),
        ({"num_heads": 12, "num_kv_heads": 3, "intermediate_size": 96}, 2, "possible: 3, 6, 12"),
        ({"intermediate_size": 98}, 4, "possible: 2"),
        ({"intermediate_size": 97}, 2, "no size but 1 is possible"),
    ],
)
def test_a_refusal_names_the_sizes_that_are_taken(changes, devices, possible):
    config = replace(DENSE, **changes)
    with pytest.raises(ModelConfigError, match=f"{possible}$"):
        split_over(config, devices)
    for count in possible.removeprefix("possible: ").split(", ") if possible.startswith("possible") else ():
        split_over(config, int(count))


def test_a_feed_forward_that_no_layer_has_may_be_of_any_size():
    experts = replace(DENSE, layers=(LayerSpec(None, moe=MoESpec(4, 2, 36)),), intermediate_size=97)
    assert split_over(experts, 4).intermediate_size == 97


def rows_of(mapping: WeightMapping, num_shards: int) -> list[tuple[int, int]]:
    """(source, row) of each row of the target, -1 where nothing is put."""
    rows = [(-1, -1)] * mapping.shape[0]
    for source, start, stop, place in mapping.pieces(num_shards):
        for row in range(start, stop):
            assert rows[place + row - start] == (-1, -1)
            rows[place + row - start] = (source, row)
    return rows


def test_each_shard_has_the_kv_head_that_its_queries_attend_to():
    """Heads of one row: 8 for q, 2 for k and v. Query head i of the model reads KV head i // 4."""
    plain = WeightMapping("layers.0.attention.qkv.weight", ("q", "k", "v"), ((8, 3), (2, 3), (2, 3)), parts=(8, 2, 2))
    for devices in (2, 4, 8):
        mapping = plain.split_as(split_over(DENSE, devices))
        heads = max(2, devices)
        assert mapping.shape == (8 + 2 * heads, 3)
        for shard in np.array_split(np.array(rows_of(mapping, devices)), devices):
            queries, keys, values = (shard[shard[:, 0] == source, 1].tolist() for source in range(3))
            assert len(queries) == 8 // devices
            assert keys == values == sorted({query // 4 for query in queries})


def test_a_norm_over_all_heads_is_copied_with_them():
    plain = WeightMapping("layers.0.attention.k_norm.weight", ("k",), ((4,),))
    full = split_over(replace(DENSE, qk_norm="full"), 8)
    assert [row for _, row in rows_of(plain.split_as(full), 8)] == [0, 1] * 4 + [2, 3] * 4
    per_head = split_over(replace(DENSE, qk_norm="head"), 8)
    assert plain.split_as(per_head) == plain


def test_the_vocabulary_is_padded_at_its_end():
    mapping = WeightMapping("embed.weight", ("e",), ((301, 3),)).split_as(split_over(DENSE, 4))
    assert rows_of(mapping, 4) == [(0, row) for row in range(301)] + [(-1, -1)] * 3


@pytest.fixture
def tp_matrix(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tp_matrix")


def test_the_page_has_every_row_of_the_matrix(tp_matrix):
    """What is missing is made by ``make tp-matrix ARGS="--only NAME"``."""
    names = [*tp_matrix.cases(), "kv-fp8", *tp_matrix.quantized_cases()]
    rows = tp_matrix.rows_of(ROOT / "docs" / "tensor-parallel.md")
    assert set(rows) == {(name, devices) for name in names for devices in (2, 4, 8)}


def test_a_run_that_goes_on_keeps_good_rows_only(tp_matrix, tmp_path):
    good, refused = "| a | 2 | 1.0e-07 | the same | ok |", "| a-b | 8 |  | | refused: 4 heads |"
    file = tmp_path / "table"
    file.write_text(f"{good}\n| a | 4 | 1.0e-02 | DIFFER | FAILS |\nrunning\n{refused}\n| configuration | devices |\n")
    assert tp_matrix.rows_of(file) == {("a", 2): good, ("a-b", 8): refused}
    assert tp_matrix.rows_of(None) == {}


@pytest.mark.parametrize("size", [0, -2])
def test_a_size_below_one_is_refused(size):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size must be at least 1, got {size}"):
        EngineConfig.from_args(EngineArgs(tensor_parallel_size=size))


def test_more_devices_than_there_are_is_refused_with_both_numbers(monkeypatch):
    devices = [SimpleNamespace(platform="gpu", device_kind="H200")] * 2
    monkeypatch.setattr(launch.jax, "devices", lambda: devices)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 4 .* has 2 \(gpu: H200\)"):
        launch.make_mesh(4)


@pytest.mark.parametrize(("bits", "in_size", "step"), [(4, 96, 8), (3, 96, 8), (8, 80, 4)])
def test_quantised_columns_that_do_not_fill_words_are_refused(bits, in_size, step):
    """Of words of 32 bits, a device has whole ones."""
    spec = WeightSpec("gptq", "int", bits=bits, group_size=32)
    with pytest.raises(
        ModelConfigError, match=f"{in_size} input columns over 8 devices: .* a multiple of {step} columns"
    ):
        empty_weight((spec,), (64,), in_size, np.float32, input_shards=8)
    assert empty_weight((spec,), (64,), in_size, np.float32, input_shards=2).shape == (64, in_size)


def test_interpreted_kernels_have_one_device():
    """Each device of an interpreted kernel checks that no other still holds a barrier, which one of several does."""
    config = EngineConfig.from_args(EngineArgs(tensor_parallel_size=2, attention_backend="mosaic"))
    with pytest.raises(ConfigError, match=r"'mosaic' cannot be used: .* one device only, and tensor_parallel_size"):
        choose_attention(config, Device("cpu"), DENSE, np.dtype("float32"))


def fake_mesh(*stats: dict[str, int] | None) -> SimpleNamespace:
    """None: a CPU device."""
    devices = [
        SimpleNamespace(platform="cpu" if each is None else "gpu", memory_stats=lambda each=each: each)
        for each in stats
    ]
    return SimpleNamespace(devices=np.array(devices), size=len(devices))


def memory_of(monkeypatch, mesh, **options):
    config = EngineConfig.from_args(EngineArgs(tensor_parallel_size=mesh.size, **options))
    small = SimpleNamespace(kv=SimpleNamespace(bytes_per_block=4096))
    monkeypatch.setattr(pool_size, "state_bytes", lambda spec: 10)
    monkeypatch.setattr(pool_size, "available_host_memory", lambda: CPU_POOL_BYTES * 8)
    return pool_size._memory(config, small, mesh, 1000)


def test_the_fullest_gpu_decides(monkeypatch):
    stats = ({"bytes_limit": 900, "bytes_in_use": 100}, {"bytes_limit": 900, "bytes_in_use": 400})
    memory = memory_of(monkeypatch, fake_mesh(*stats))
    assert (memory.usable, memory.weights, memory.state, memory.block) == (500, 1000, 10, 2048)


def test_cpu_devices_share_one_memory(monkeypatch):
    memory = memory_of(monkeypatch, fake_mesh(None, None), swap_space=1.0)
    assert memory.usable == CPU_POOL_BYTES * 8 - 2 * 2**30
    assert (memory.weights, memory.state, memory.block) == (2000, 20, 4096)
