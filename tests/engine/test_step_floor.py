"""Floors of a step against hand-worked figures, and the plan's text."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from octavo.engine.memory import MemoryPlan
from octavo.engine.plan import place_params, step_work
from octavo.engine.plan_report import Floor, KernelPlan, Plan, StepPlan, format_plan
from octavo.engine.step_floor import StepWork, floor_seconds
from octavo.models.architectures import get_architecture
from octavo.models.decoder import abstract_params, param_partition_specs
from octavo.models.errors import ModelConfigError
from octavo.models.presets import PRESETS, preset_config

GIB = 1024**3


def work_of(name: str) -> StepWork:
    config = preset_config(name)
    decoder = get_architecture(config.architecture).decoder_config(config)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",), axis_types=(AxisType.Auto,))
    _, params = abstract_params(decoder, jnp.bfloat16)
    kv_token_bytes = 2 * 2 * decoder.kv_size * decoder.num_layers
    return step_work(decoder, place_params(params, param_partition_specs(decoder), mesh), kv_token_bytes)


@pytest.mark.parametrize(
    ("name", "weight_gb", "kv_token_kib"),
    [("llama-3-8b", 15.01, 128), ("qwen2.5-7b", 14.14, 56), ("qwen3-0.6b", 1.19, 112), ("gemma-2-9b", 18.48, 336)],
)
def test_bytes_of_known_models(name, weight_gb, kv_token_kib):
    """Weights that a step reads (no embedding table but a tied one) and KV bytes a token, from the models' cards."""
    work = work_of(name)
    assert work.weight_bytes / 1e9 == pytest.approx(weight_gb, rel=0.003)
    assert work.kv_bytes * len(work.windows) == kv_token_kib * 1024


def test_packed_weights_are_read_packed_and_multiplied_whole():
    """4 bits a weight; a bfloat16 scale and an 8-bit zero point for each group of 128."""
    packed, plain = work_of("qwen2.5-72b-awq"), work_of("qwen2.5-72b")
    wider = 80 * 3 * 8192 * (29696 - 29568)
    vectors = 80 * (8192 + 2 * 1024 + 2 * 8192) + 8192  # biases and norms
    assert packed.layer_params == plain.layer_params + wider
    expected = packed.layer_params * (0.5 + 3 / 128) + 2 * (packed.head_params + vectors)
    assert packed.weight_bytes == pytest.approx(expected, rel=1e-6)


def test_floor_of_a_decode_step_of_llama_3_8b():
    work = work_of("llama-3-8b")
    seconds = floor_seconds(work.decode_bytes(64, 1024), work.decode_flops(64, 1024), 4.3e12, 790e12)
    assert seconds * 1e3 == pytest.approx((15.01 + 64 * 1024 * 131072 / 1e9) / 4.3, rel=0.003)
    assert work.decode_flops(1, 0) == 2 * (work.layer_params + work.head_params)
    assert 2 * work.layer_params == pytest.approx(2 * 6.98e9, rel=0.003)


@pytest.mark.parametrize(
    ("name", "all_gb", "active_gb", "one_expert_gb"),
    [("mixtral-8x7b", 93.1, 25.5, 11.27), ("qwen3-30b-a3b", 60.4, 6.1, 0.453)],
)
def test_a_step_reads_the_experts_that_tokens_chose(name, all_gb, active_gb, one_expert_gb):
    """From the models' cards, less the embedding table: 46.7 B weights, 12.9 B of them active; 30.5 B, and 3.3 B."""
    work = work_of(name)
    assert work.weights_read(1) / 1e9 == pytest.approx(active_gb, rel=0.02)
    assert work.weights_read(10_000) / 1e9 == pytest.approx(all_gb, rel=0.003)
    assert work.expert_bytes / 1e9 == pytest.approx(one_expert_gb, rel=0.003)
    assert 2 * (work.token_params + work.head_params) / 1e9 == pytest.approx(active_gb, rel=0.02)
    chosen = work.experts_per_token * (2 - work.experts_per_token / work.num_experts)  # by two tokens
    assert work.weights_read(2) == pytest.approx(work.weight_bytes + chosen * work.expert_bytes)


def test_a_long_prompt_is_bound_by_products():
    work = replace(work_of("llama-3-8b"), windows=(None,) * 32)
    attention = 4 * 4096 * 32 * 2048 * 2049 / 2
    products = 2048 * 2 * work.layer_params + 2 * work.head_params
    assert work.prefill_flops(2048) == pytest.approx(products + attention)
    assert floor_seconds(1, 790e12, 4.3e12, 790e12) == 1
    assert floor_seconds(4.3e12, 1, 4.3e12, 790e12) == 1


def test_windows_bound_what_is_read():
    work = StepWork(weight_bytes=0, layer_params=0, head_params=0, kv_bytes=1, query_size=1, windows=(None, 10))
    assert work.decode_bytes(3, 100) == 3 * 110
    assert work.decode_bytes(3, 5) == 3 * 10
    # Positions 0 to 3 see 1, 2, 3, 4 keys, and 1, 2, 2, 2 in a window of 2.
    assert replace(work, windows=(None,)).prefill_flops(4) == 4 * 10
    assert replace(work, windows=(2,)).prefill_flops(4) == 4 * 7


def test_presets_are_readable_and_others_are_named():
    for name in PRESETS:
        config = preset_config(name, {"num_hidden_layers": 2})
        assert get_architecture(config.architecture).decoder_config(config).num_layers == 2
    with pytest.raises(ModelConfigError, match=r"'llama' is neither a file, a folder nor a preset; known: llama-3-8b"):
        preset_config("llama")


def a_plan(**changes) -> Plan:
    memory = MemoryPlan(
        device=80 * GIB, usable=72 * GIB, weights=15 * GIB, state=GIB, temporaries=GIB, reserve=GIB, block=2 * GIB
    )
    plan = Plan(
        model="m", target="GPU X", rates="4 TB/s", num_devices=1, dtype="bfloat16", attention="xla (asked for)",
        memory=memory, num_blocks=27, block_size=16, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=512,
        steps=(StepPlan("decode[8x8]", 5_000_000, 12.5, 25, 1, 0, (KernelPlan("attend", 168, 0, 65536),)),
               StepPlan("mixed[512x8]", 7_000_000, 20.0, 26, 3, 2, ())),
        floors=(Floor(8, 64, 0.004, True), Floor(8, 4096, 0.008, False)), prefill_seconds=0.0125,
        num_layers=4, num_compiled=4,
    )  # fmt: skip
    return replace(plan, **changes)


def test_the_heading_names_what_is_stored_otherwise():
    assert format_plan(a_plan(quantization="awq", kv_dtype="float8_e4m3fn")).startswith(
        "m in bfloat16, weights in awq, KV cache in float8_e4m3fn, on GPU X\n"
    )
    assert format_plan(a_plan(kv_dtype="bfloat16")).startswith("m in bfloat16 on GPU X\n")


def test_the_plan_says_what_fits():
    plan = a_plan()
    assert plan.memory.pool == 54 * GIB
    assert [plan.sequences(length) for length in (1, 16, 17, 64)] == [26, 26, 13, 6]
    text = format_plan(plan)
    for part in (
        "m in bfloat16 on GPU X\n",
        "attention: xla (asked for)",
        "KV pool              54.00 GiB",
        "26 blocks of 16 tokens = 416 tokens",
        "fit at once: 6 of 64 tokens (a step takes up to 8)",
        "steps, compiled with all 4 layers:\ndecode[8x8]: temporaries 5 MB",
        "decode[8x8]: temporaries 5 MB, 12.5 launches a layer and 25 others, command buffers: 1\n",
        "kernel attend: 168 registers, 0 bytes spilled, 64 KiB of shared memory",
        "mixed[512x8]: temporaries 7 MB, 20.0 launches a layer and 26 others, command buffers: 3, 2 launches outside",
        "       8        64      4.00       2,000\n",
        "       8     4,096      8.00       1,000  more than the pool holds",
        "a prompt of 512 tokens in one step: 12.5 ms",
    ):
        assert part in text, part
    assert text.endswith("It fits.")
    assert "steps, compiled with 2 of the model's 4 layers, which repeat" in format_plan(replace(plan, num_compiled=2))


def test_the_plan_says_what_does_not_fit():
    text = format_plan(a_plan(num_blocks=0, num_devices=4, problem="too large"))
    assert "GPU X x 4 (bytes below are of each)" in text
    assert "0 blocks of 16 tokens = 0 tokens" in text
    assert text.endswith("It does not fit: too large")
