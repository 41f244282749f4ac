"""Compiling for a described GPU: what the report says of small programs, and that faults would show in it."""

import jax
import jax.numpy as jnp
import pytest

from octavo.pallas_kernels import aot
from octavo.pallas_kernels.aot import AotUnavailableError, aot_missing, compile_for, find_target, target_mesh
from octavo.pallas_kernels.hlo_text import entry_instructions, straight_line_thunks
from octavo.pallas_kernels.xla_options import step_compiler_options

missing = aot_missing()
needs_plugin = pytest.mark.skipif(missing is not None, reason=str(missing))

HLO = """HloModule jit_f

%body (p: f32[8]) -> f32[8] {
  ROOT %copy.9 = f32[8]{0} copy(%p)
}

ENTRY %main (a: bf16[4,8], b: s32[3]) -> (bf16[4,8], s32[3]) {
  %a = bf16[4,8]{1,0} parameter(0)
  %copy.1 = bf16[4,8]{1,0} copy(%a), metadata={op_name="jit(f)/jit(layer)/copy"}
  %fusion = (bf16[4,8]{1,0}, pred[16]{0}) fusion(%copy.1), kind=kLoop, metadata={op_name="jit(f)/add"}
  %all-reduce-start = f32[2,2]{1,0} all-reduce-start(%fusion)
  %all-reduce-done = f32[2,2]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %tuple.2 = (bf16[4,8]{1,0}, s32[3]{0}) tuple(%fusion, %b)
}
"""
THUNKS = """001: kCustomKernel [source | next=002 (1)] a
002: kWhile        [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] b
  body:
    004: kConditional [source | sink]
      false_branch:
        005: kCopy [source | sink] kCopy
        006: kWhile [source | sink]
condition:
            007: kMemset [source | sink] c
          body:
            008: kMemset [source | sink] c
      true_branch:
        No thunks.
    009: kCustomCall [source | sink] d
010: kCopy [source | sink] e
"""


def test_entry_instructions_are_read():
    found = [(i.name, i.opcode, i.num_bytes, i.op_name) for i in entry_instructions(HLO)]
    assert found == [
        ("copy.1", "copy", 64, "jit(f)/jit(layer)/copy"),
        ("fusion", "fusion", 80, "jit(f)/add"),
        ("all-reduce-start", "all-reduce-start", 16, ""),
    ]
    with pytest.raises(ValueError, match="no entry"):
        entry_instructions("HloModule empty")


def test_branches_are_not_counted_and_bodies_once():
    kinds = ["kCustomKernel", "kWhile", "kCustomKernel", "kConditional", "kCustomCall", "kCopy"]
    assert straight_line_thunks(THUNKS) == kinds


def test_unknown_target_is_named():
    with pytest.raises(ValueError, match="'a100' is unknown; known: h200, h100, rtx4090"):
        find_target("a100")


def test_a_missing_plugin_is_named(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(aot.topologies, "get_topology_desc", refuse)
    with pytest.raises(AotUnavailableError, match=r"NVIDIA H200.*\.\[cuda12\]"):
        target_mesh(find_target("h200"))
    assert "CUDA plug-in" in (aot_missing() or "")


def test_options_of_a_cpu_are_not_those_of_a_gpu():
    assert step_compiler_options("cpu") == {"xla_backend_optimization_level": "1"}
    assert set(step_compiler_options("cpu", quantized=True)) == {
        "xla_backend_optimization_level",
        "xla_cpu_scheduler_type",
    }


@needs_plugin
@pytest.mark.parametrize(("name", "capability"), [("h200", "9.0"), ("h100", "9.0"), ("rtx4090", "8.9")])
def test_the_description_fits_the_table(name, capability):
    target = find_target(name)
    (device,) = target_mesh(target).devices.flat
    assert (device.platform, device.compute_capability) == ("gpu", capability)
    assert f"device_memory_size: {target.memory_bytes}\n" in target.description
    assert target.title.split()[1] in device.device_kind


POOL = jax.ShapeDtypeStruct((4096, 128), jnp.float32)
ROWS = jax.ShapeDtypeStruct((16, 128), jnp.float32)
WEIGHT = jax.ShapeDtypeStruct((128, 128), jnp.float32)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)
POOL_BYTES = 4096 * 128 * 4


def loop(pool, rows, weight, count):
    """Products in a loop of unknown length, then a write into the pool."""
    rows = jax.lax.fori_loop(0, count, lambda _, x: jnp.sin(x @ weight), rows)
    return pool.at[jnp.arange(16) * 7].set(rows), rows @ weight


@pytest.fixture(scope="module")
def looped():
    return compile_for(
        "h200", loop, POOL, ROWS, WEIGHT, COUNT, donate_argnums=0, compiler_options=step_compiler_options("gpu")
    )


@needs_plugin
def test_a_loop_is_part_of_the_one_command_buffer(looped):
    assert looped.command_buffers == 1
    assert looped.launches_outside_command_buffers == []
    plain = compile_for("h200", loop, POOL, ROWS, WEIGHT, COUNT, donate_argnums=0)
    assert "kWhile" in plain.launches_outside_command_buffers


@needs_plugin
def test_donation_is_seen(looped):
    assert looped.alias_bytes == POOL_BYTES
    assert looped.temp_bytes < POOL_BYTES
    assert max(looped.sizes_of("copy"), default=0) < POOL_BYTES
    kept = compile_for("h200", loop, POOL, ROWS, WEIGHT, COUNT)
    assert kept.alias_bytes == 0
    assert POOL_BYTES in kept.sizes_of("copy")


@needs_plugin
def test_launches_of_a_scope_are_counted():
    @jax.jit
    def layer(x, weight):
        return jnp.sort(x @ weight, axis=1)

    def two_layers(x, weight):
        return layer(layer(x, weight), weight) + 1

    report = compile_for("h200", two_layers, ROWS, WEIGHT)
    assert report.launches_in("layer") >= 4
    assert report.launches_in("layer") < len(report.instructions) + 1
    assert report.launches_in("nonesuch") == 0
    assert report.kernels == ()


@needs_plugin
def test_an_unknown_option_raises_and_the_process_lives():
    with pytest.raises(Exception, match="not a valid enum value"):
        compile_for("h200", jnp.sin, ROWS, compiler_options={"xla_gpu_enable_command_buffer": "LOOPS"})
