"""The engine's own steps of real models, compiled for an H200 without one, with fewer layers than the models have."""

from functools import cache

import pytest

from octavo.engine.args import EngineArgs
from octavo.engine.plan import DraftEngine
from octavo.pallas_kernels.aot import CompileReport, aot_missing, find_target
from octavo.pallas_kernels.compat import mosaic_missing

LAYERS = 3
"""Steps grow by equal layers; three show what one costs, in a tenth of the time of all."""
NUM_BLOCKS = 8000
ROWS = 64

missing = aot_missing() or mosaic_missing()
pytestmark = [pytest.mark.skipif(missing is not None, reason=str(missing)), pytest.mark.timeout(600)]


@cache
def draft(model: str, num_devices: int = 1, backend: str = "mosaic") -> DraftEngine:
    args = EngineArgs(
        model=model,
        max_model_len=8192,
        max_num_seqs=ROWS,
        max_num_batched_tokens=2048,
        tensor_parallel_size=num_devices,
        attention_backend=backend,
        hf_overrides={"num_hidden_layers": LAYERS},
    )
    return DraftEngine(args, find_target("h200"))


@cache
def compiled(model: str, decode_only: bool, num_devices: int = 1, backend: str = "mosaic") -> CompileReport:
    """Each step once per session: they take some 20 seconds of CPU."""
    engine = draft(model, num_devices, backend)
    buckets = engine.buckets.decode if decode_only else engine.buckets.mixed
    return engine.compile(max(buckets), NUM_BLOCKS)


DECODE, SMALL_DECODE, MIXED, SHARED = (
    pytest.param(("llama-3-8b", True), id="llama-decode"),
    pytest.param(("qwen2.5-7b", True), id="qwen-decode"),
    pytest.param(("qwen2.5-7b", False), id="qwen-mixed"),
    pytest.param(("llama-3-8b", True, 2), id="llama-decode-2-gpus"),
)


@pytest.mark.parametrize("step", [DECODE, SMALL_DECODE, MIXED, SHARED])
def test_the_pool_is_updated_in_place(step):
    """All of it is aliased, and no instruction copies as much as one layer's pool or the smallest matrix."""
    report, engine = compiled(*step), draft(step[0], *step[2:])
    pool = engine.pool_bytes(NUM_BLOCKS)
    assert pool <= report.alias_bytes < pool * 1.1
    assert report.temp_bytes < pool / LAYERS
    matrix = engine.decoder.hidden_size * engine.decoder.kv_size * 2 // engine.num_devices
    for opcode in ("copy", "transpose", "copy-start"):
        assert max(report.sizes_of(opcode), default=0) < min(pool // LAYERS, matrix), opcode


@pytest.mark.parametrize("step", [DECODE, SMALL_DECODE, MIXED, SHARED])
def test_temporaries_of_64_rows(step):
    """Of 2048 tokens too, whose feed-forward is the largest of these models'; a copy of its weights would show."""
    assert compiled(*step).temp_bytes <= 200e6


@pytest.mark.parametrize("step", [DECODE, SMALL_DECODE, MIXED])
def test_a_step_is_one_command_buffer(step):
    report = compiled(*step)
    assert (report.command_buffers, report.launches_outside_command_buffers) == (1, [])


@pytest.mark.parametrize("step", [DECODE, SMALL_DECODE, MIXED])
def test_launches_of_a_layer(step):
    """RMS norms, rope, the KV write and activations are XLA's fusions: a layer needs no kernels of ours for them."""
    assert compiled(*step).launches_in("_run_layer") / LAYERS <= 16


@pytest.mark.parametrize("step", [DECODE, SMALL_DECODE, MIXED])
def test_launches_outside_of_layers(step):
    """Rope tables, block tables, embedding, logits and the sampler: 25 or 26. Nothing plans the kernels' work or cuts
    its lists out of the inputs, and nothing loops over tokens before the first layer. In attention there is what each
    layer needs: kernels, queries padded, rows of one query put where they belong."""
    report = compiled(*step)
    assert report.launches_in("_paged_attention_mosaic") == 3 * LAYERS
    assert report.launches_in("_ragged_paged_attention_mosaic") == (0 if step[1] else 5 * LAYERS)
    outside = [i for i in report.instructions if "_run_layer" not in i.op_name]
    assert len(outside) <= 27
    first = next(at for at, i in enumerate(report.instructions) if "_run_layer" in i.op_name)
    assert not [i for i in report.instructions[:first] if i.opcode == "while"]
    copied = [i for i in outside if i.opcode == "copy" or "wrapped_slice" in i.name]
    assert len(copied) <= 1


@pytest.mark.parametrize("step", [DECODE, SMALL_DECODE, MIXED, SHARED])
def test_attention_is_our_kernel(step):
    report = compiled(*step)
    calls = [i for i in report.instructions if i.opcode == "custom-call" and "_run_layer" in i.op_name]
    assert len(calls) >= LAYERS
    assert not [i for i in report.instructions if i.opcode == "while" and "_run_layer" in i.op_name]


@pytest.mark.parametrize("num_devices", [2, 8])
def test_several_gpus_reduce_twice_a_layer_and_gather_no_pool(num_devices):
    report, engine = compiled("llama-3-8b", True, num_devices), draft("llama-3-8b", num_devices)
    in_layers = [i for i in report.instructions if "_run_layer" in i.op_name]
    assert sum("all-reduce" in i.name for i in in_layers) == 2 * LAYERS
    layer_pool = engine.pool_bytes(NUM_BLOCKS) // LAYERS
    for opcode in ("all-gather", "all-to-all", "collective-permute"):
        assert max(report.sizes_of(opcode), default=0) < layer_pool / 100, opcode


def test_the_xla_attention_loop_is_captured_too():
    report = compiled("qwen3-0.6b", True, 1, "xla")
    loops = [i for i in report.instructions if i.opcode == "while" and "_run_layer" in i.op_name]
    assert len(loops) == LAYERS
    assert (report.command_buffers, report.launches_outside_command_buffers) == (1, [])
