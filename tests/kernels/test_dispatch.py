"""Which implementation of attention is chosen, and what the Mosaic kernels refuse by name."""

import logging
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from octavo.pallas_kernels import dispatch
from octavo.pallas_kernels.dispatch import AttentionShape, Device, check_mosaic_shapes, select_implementation

LLAMA_8B = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
HOPPER, ADA, CPU = Device("gpu", (9, 0)), Device("gpu", (8, 9)), Device("cpu")


@pytest.fixture(autouse=True)
def new_jax(monkeypatch):
    monkeypatch.setattr(dispatch, "mosaic_missing", lambda: None)


def test_auto_takes_mosaic_on_hopper_and_later(caplog):
    with caplog.at_level(logging.INFO):
        assert select_implementation(HOPPER, LLAMA_8B).implementation == "mosaic"
        assert select_implementation(Device("gpu", (10, 0)), LLAMA_8B).implementation == "mosaic"
    assert len(caplog.records) == 2
    assert all("attention on gpu: mosaic (" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("device", "shape", "reason"),
    [
        (ADA, LLAMA_8B, "compute capability 9.0 or later, this is 8.9"),
        (Device("gpu"), LLAMA_8B, "compute capability 9.0 or later, this is an unknown one"),
        (Device("rocm"), LLAMA_8B, "not for rocm"),
        (HOPPER, replace(LLAMA_8B, head_dim=80), "head_dim 80"),
        (HOPPER, replace(LLAMA_8B, dtype="float32"), "dtype float32"),
    ],
)
def test_auto_falls_back_with_a_reason_and_mosaic_refuses(device, shape, reason, caplog):
    with caplog.at_level(logging.INFO):
        choice = select_implementation(device, shape)
    assert choice.implementation == "xla"
    assert reason in choice.reason
    assert reason in caplog.text
    with pytest.raises(ValueError, match="attention_backend 'mosaic' cannot be used: .*" + reason):
        select_implementation(device, shape, "mosaic")


def test_old_jax_is_named(monkeypatch):
    monkeypatch.setattr(dispatch, "mosaic_missing", lambda: "they need JAX 0.11.2")
    assert select_implementation(HOPPER, LLAMA_8B).reason == "they need JAX 0.11.2"
    with pytest.raises(ValueError, match=r"cannot be used: they need JAX 0\.11\.2"):
        select_implementation(HOPPER, LLAMA_8B, "mosaic")
    with pytest.raises(NotImplementedError, match=r"JAX 0\.11\.2"):
        dispatch.load_mosaic("paged_attention")


def test_a_named_implementation_is_never_replaced():
    assert select_implementation(HOPPER, LLAMA_8B, "xla").implementation == "xla"
    with pytest.raises(ValueError, match="auto, xla, mosaic; got 'cuda'"):
        select_implementation(HOPPER, LLAMA_8B, "cuda")


def test_a_cpu_runs_xla_and_interprets_mosaic_when_asked(monkeypatch, caplog):
    assert select_implementation(CPU, LLAMA_8B).implementation == "xla"
    monkeypatch.setattr(dispatch, "gpu_interpreter", lambda: "interpreter")
    choice = select_implementation(CPU, LLAMA_8B, "mosaic")
    assert (choice.implementation, choice.interpret) == ("mosaic", "interpreter")
    assert "interpreted on a CPU" in caplog.text
    assert select_implementation(HOPPER, LLAMA_8B, "mosaic").interpret is None


@pytest.mark.parametrize(("threads", "refused"), [(1, True), (3, True), (4, False), (None, False)])
def test_an_interpreter_that_would_wait_for_ever_is_refused(threads, refused, monkeypatch):
    monkeypatch.setattr(dispatch, "gpu_interpreter", lambda: "interpreter")
    device = Device("cpu", cpu_threads=threads)
    assert select_implementation(device, LLAMA_8B).implementation == "xla"
    if refused:
        with pytest.raises(ValueError, match=rf"'mosaic' cannot be used: .*need 4 threads .*has {threads}.*NPROC=4"):
            select_implementation(device, LLAMA_8B, "mosaic")
    else:
        assert select_implementation(device, LLAMA_8B, "mosaic").interpret == "interpreter"


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize("number", [2, 5])
def test_threads_of_xla_are_counted(number):
    script = "import jax; from octavo.pallas_kernels.dispatch import Device; print(Device.of(jax.devices()[0]))"
    env = {**os.environ, "NPROC": str(number)}
    done = subprocess.run([sys.executable, "-c", script], env=env, timeout=120, capture_output=True, text=True)
    assert f"cpu_threads={number})" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 136}, "136 query heads over 8 KV heads"),
        ({"num_heads": 33}, "33 query heads over 8 KV heads"),
        ({"head_dim": 72}, "head_dim 72: .* 64, 96, 128, 256"),
        ({"block_size": 8}, "block_size 8: .* 16, 32, 64"),
        ({"dtype": "float32"}, "dtype float32: .* bfloat16, float16"),
    ],
)
def test_shapes_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        check_mosaic_shapes(replace(LLAMA_8B, **changes))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("num_heads", [8, 32, 56, 128])
def test_common_shapes_are_taken(num_heads, head_dim):
    check_mosaic_shapes(replace(LLAMA_8B, num_heads=num_heads, head_dim=head_dim))


@pytest.mark.parametrize(("text", "expected"), [("9.0", (9, 0)), ("12.1", (12, 1)), ("gfx942", None), (None, None)])
def test_capability_of_a_jax_device(text, expected):
    assert Device.of(SimpleNamespace(platform="gpu", compute_capability=text)) == Device("gpu", expected)


def test_starting_an_engine_imports_no_gpu_kernels():
    """Versions of JAX without them must be able to."""
    script = "import sys, octavo.engine.launch; sys.exit('jax.experimental.pallas.mosaic_gpu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0
