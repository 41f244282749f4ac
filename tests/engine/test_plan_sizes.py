"""What ``octavo plan`` works out for two deployments, against figures worked by hand from the models' cards."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from tiny_model import tiny_model

from octavo.engine.args import EngineArgs
from octavo.engine.plan import FEW_LAYERS, MANY_LAYERS, DraftEngine, few_layers, make_plan
from octavo.models.architectures import get_architecture
from octavo.models.presets import preset_config
from octavo.pallas_kernels.aot import CompileReport, aot_missing, find_target
from octavo.pallas_kernels.compat import mosaic_missing

GIB, MB = 1024**3, 10**6
TEMPORARIES = 700 * MB
needs_compiler = pytest.mark.skipif(aot_missing() is not None, reason=str(aot_missing()))


def decoder_of(name: str, **overrides):
    config = preset_config(name, overrides)
    return get_architecture(config.architecture).decoder_config(config)


def planned(monkeypatch, model: str, target: str, **options):
    """The plan, with a compiler that takes no time and says that steps need ``TEMPORARIES``."""
    empty = SimpleNamespace(temp_bytes=TEMPORARIES, kernels=(), instructions=[], launches_in=lambda _: 0)
    empty.command_buffers, empty.launches_outside_command_buffers = 1, []
    compiled: list[int] = []

    def compile_nothing(draft: DraftEngine, bucket, num_blocks: int) -> CompileReport:
        compiled.append(draft.compiled.num_layers)
        return empty  # type: ignore[return-value]

    monkeypatch.setattr(DraftEngine, "compile", compile_nothing)
    return make_plan(EngineArgs(model=model, **options), target, lambda text: None), compiled


@needs_compiler
@pytest.mark.skipif(mosaic_missing() is not None, reason=str(mosaic_missing()))
def test_qwen_72b_awq_on_two_h200s(monkeypatch):
    """Each GPU has half of the linear layers at 4 bits and 3 bytes a group of 128, half of the two tables."""
    plan, compiled = planned(monkeypatch, "qwen2.5-72b-awq", "h200", tensor_parallel_size=2)
    linear = 80 * 8192 * (8192 + 2 * 1024 + 8192 + 3 * 29696)
    halves = linear * (0.5 + 3 / 128) + 2 * 2 * 152064 * 8192 + 80 * 2 * (8192 + 2 * 1024)
    norms = 2 * (2 * 80 + 1) * 8192
    assert plan.memory.weights == halves / 2 + norms
    assert plan.memory.block == 16 * 2 * 2 * 80 * 8 * 128 // 2
    assert plan.memory.usable == int(141 * GIB * 0.92)
    assert plan.memory.pool == plan.memory.usable - plan.memory.weights - plan.memory.state - TEMPORARIES - GIB
    assert plan.num_blocks == plan.memory.pool // plan.memory.block
    assert 105 < plan.memory.pool / GIB < 111
    assert plan.sequences(32768) == 21
    assert (plan.problem, plan.attention.split()[0], plan.num_devices) == (None, "mosaic", 2)
    assert compiled == [8, 8]
    assert (plan.num_compiled, plan.num_layers) == (8, 80)


@needs_compiler
def test_qwen_7b_on_a_card_with_24_gb(monkeypatch):
    """The kernels need Hopper, so this is XLA's attention. In float32 the weights alone are too much."""
    plan, compiled = planned(monkeypatch, "qwen2.5-7b", "rtx4090")
    linear = 28 * 3584 * (2 * 3584 + 2 * 512 + 3 * 18944)
    vectors = 28 * (3584 + 2 * 512 + 2 * 3584) + 3584
    assert plan.memory.weights == 2 * (linear + 2 * 152064 * 3584 + vectors)
    assert plan.memory.block == 16 * 2 * 2 * 28 * 4 * 128
    assert plan.memory.device / GIB == pytest.approx(24, rel=0.03)
    assert plan.num_blocks == plan.memory.pool // plan.memory.block
    assert 5 < plan.memory.pool / GIB < 6
    assert plan.sequences(32768) == 3
    assert plan.problem is None
    assert plan.attention.startswith("xla (the kernels need a GPU of compute capability 9.0")
    assert compiled == [28, 28]
    wide, _ = planned(monkeypatch, "qwen2.5-7b", "rtx4090", dtype="float32")
    assert "too much" in wide.problem
    assert wide.sequences(1024) == 0
    narrow, _ = planned(monkeypatch, "qwen2.5-7b", "rtx4090", quantization="fp8")
    assert narrow.memory.weights < plan.memory.weights - linear * 0.99
    assert narrow.sequences(32768) == 6


def test_few_layers_are_compiled_where_they_repeat():
    assert few_layers(decoder_of("qwen2.5-72b-awq")).num_layers == FEW_LAYERS
    assert few_layers(decoder_of("gemma-2-9b")).num_layers == FEW_LAYERS  # two kinds by turns
    assert few_layers(decoder_of("llama-3-8b")).num_layers == 32 == MANY_LAYERS
    decoder = decoder_of("qwen2.5-72b-awq")
    plain, windowed = decoder.layers[0], replace(decoder.layers[0], window=512)
    for period, expected in ((3, 9), (5, 10), (6, 12), (7, 14), (9, 80)):
        kinds = [plain if at % period == 0 else windowed for at in range(80)]
        assert few_layers(replace(decoder, layers=tuple(kinds))).num_layers == expected
    odd_one = (*decoder.layers[:79], windowed)
    assert few_layers(replace(decoder, layers=odd_one)).num_layers == 80


@needs_compiler
def test_what_is_told_is_of_all_layers():
    args = EngineArgs(model="qwen2.5-72b-awq", max_model_len=1024, attention_backend="xla")
    few, whole = (DraftEngine(args, find_target("h200"), all_layers=every) for every in (False, True))
    assert (few.compiled.num_layers, whole.compiled.num_layers) == (8, 80)
    assert few.memory(0) == whole.memory(0)
    counts = [len(jax.tree.leaves(draft.model.params)) for draft in (few, whole)]
    assert counts[1] > 9 * counts[0]


@needs_compiler
def test_a_tiny_model_has_no_more_slots_than_int32_numbers(monkeypatch, tmp_path):
    folder = tiny_model(tmp_path / "tiny", num_hidden_layers=1, num_key_value_heads=1)
    plan, _ = planned(monkeypatch, str(folder), "h200", kv_cache_dtype="fp8")
    assert plan.memory.pool // plan.memory.block * plan.block_size > 2**31
    assert plan.num_blocks * plan.block_size < 2**31 <= (plan.num_blocks + 1) * plan.block_size
