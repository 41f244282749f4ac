"""Compiling for a GPU that is not there: what the compiler makes of a program, read without running it.

XLA compiles for a described GPU on any machine that has the CUDA plug-in installed; no GPU and no driver are
needed. Autotuning is not done, so matrix products may be cut up otherwise on the real device; memory, donation,
the attention kernels and what is captured into command buffers (CUDA graphs) are as they will be.
"""

import logging
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .hlo_text import Instruction, entry_instructions, straight_line_thunks

logger = logging.getLogger(__name__)

MESH_AXIS = "tp"


class AotUnavailableError(RuntimeError):
    """Nothing can be compiled for a GPU on this machine; the message says what is missing."""


@dataclass(frozen=True)
class GpuTarget:
    """A GPU to compile for, and its rates for floors of time."""

    name: str
    title: str
    memory_bytes: int
    """Device memory as CUDA reports it."""
    bytes_per_s: float
    """Of device memory."""
    flops_per_s: float
    """Dense bfloat16 products with float32 sums."""
    rates_from: str
    """Where the two rates come from."""

    @property
    def description(self) -> str:
        """XLA's textual description of the GPU."""
        return (resources.files(__package__) / "targets" / f"{self.name}.txtpb").read_text(encoding="utf-8")


TARGETS: Mapping[str, GpuTarget] = {
    target.name: target
    for target in (
        GpuTarget(
            name="h200",
            title="NVIDIA H200 141GB",
            memory_bytes=151_397_597_184,
            bytes_per_s=4.3e12,
            flops_per_s=790e12,
            rates_from="measured on one H200: device copy, and an 8192 x 8192 x 8192 bfloat16 product",
        ),
        GpuTarget(
            name="h100",
            title="NVIDIA H100 80GB",
            memory_bytes=84_942_979_072,
            bytes_per_s=3.35e12,
            flops_per_s=790e12,
            rates_from="memory: NVIDIA's data sheet, not measured; products: as measured on an H200, the same chip",
        ),
        GpuTarget(
            name="rtx4090",
            title="NVIDIA RTX 4090 24GB",
            memory_bytes=25_241_190_400,
            bytes_per_s=1.008e12,
            flops_per_s=165e12,
            rates_from="NVIDIA's Ada white paper, not measured",
        ),
    )
}


@dataclass(frozen=True)
class KernelResources:
    """What ptxas says of one Mosaic kernel."""

    name: str
    registers: int
    """Per thread."""
    spill_bytes: int
    """Stores and loads together; 0 for a kernel that keeps everything in registers."""
    shared_bytes: int
    """Shared memory of a block, as the kernel asks for it at launch."""
    ptx: str

    def uses(self, instruction: str) -> bool:
        """Whether the PTX holds an instruction that begins so (``wgmma.mma_async``, ``cp.async.bulk.tensor``)."""
        return instruction in self.ptx


@dataclass(frozen=True)
class CompileReport:
    """What became of one program. Bytes are of one device."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Of the outputs that take the place of donated arguments."""
    temp_bytes: int
    hlo: str
    """The optimised program."""
    thunks: str
    """XLA's list of launches."""
    thunks_in_command_buffers: str
    """The same after launches were gathered into command buffers; empty where none were."""
    kernels: tuple[KernelResources, ...]
    """Mosaic kernels that were compiled for this program. JAX compiles a kernel once per process: a later program
    with the same kernel does not list it again."""

    @cached_property
    def instructions(self) -> list[Instruction]:
        """Of the entry computation, without those that cost nothing (parameters, tuples, bitcasts)."""
        return entry_instructions(self.hlo)

    @property
    def launches(self) -> Counter[str]:
        """Launches by kind of thunk: a loop's body counted once, branches not at all."""
        return Counter(straight_line_thunks(self.thunks))

    def launches_in(self, scope: str) -> int:
        """Launches of the entry computation that come from code below ``scope``, a jitted function's name."""
        return sum(f"jit({scope})" in instruction.op_name for instruction in self.instructions)

    @property
    def command_buffers(self) -> int:
        """Command buffers of one run, those inside others not counted."""
        return straight_line_thunks(self.thunks_in_command_buffers).count("kCommandBuffer")

    @property
    def launches_outside_command_buffers(self) -> list[str]:
        """Kinds of thunk that run on their own. Empty: one command buffer holds the whole program."""
        text = self.thunks_in_command_buffers or self.thunks
        top = [line for line in text.splitlines() if re.match(r"\d+: k", line)]
        return [kind for kind in (line.split()[1] for line in top) if kind != "kCommandBuffer"]

    def sizes_of(self, opcode: str) -> list[int]:
        """Bytes of each result of entry instructions of one kind (``copy``, ``all-reduce``, ``all-gather``)."""
        return [i.num_bytes for i in self.instructions if i.opcode.removesuffix("-start") == opcode]


def find_target(name: str) -> GpuTarget:
    """The target of that name; ValueError naming those that exist."""
    if name not in TARGETS:
        raise ValueError(f"target {name!r} is unknown; known: {', '.join(TARGETS)}")
    return TARGETS[name]


def target_mesh(target: GpuTarget, num_devices: int = 1) -> Mesh:
    """A mesh of ``num_devices`` described GPUs along "tp", to compile for; it cannot hold arrays.

    Raises AotUnavailableError where the CUDA plug-in is missing.
    """
    try:
        topology = topologies.get_topology_desc(
            "", platform="cuda", target_config=target.description, topology=f"1x1x{num_devices}"
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise AotUnavailableError(
            f"cannot compile for {target.title} on this machine: {error}. It takes the CUDA plug-in of JAX, but "
            "neither GPU nor driver: with Python 3.12 or later, in Octavo's source folder, pip install '.[cuda12]' (or "
            "cuda13)"
        ) from error
    return Mesh(np.array(topology.devices).reshape(num_devices), (MESH_AXIS,), axis_types=(AxisType.Auto,))


def aot_missing() -> str | None:
    """Why nothing can be compiled for a GPU here; None if it can."""
    try:
        target_mesh(TARGETS["h200"])
    except AotUnavailableError as error:
        return str(error)
    return None


def compile_for(
    target: str,
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
) -> CompileReport:
    """Compiles ``fn(*args)`` for one GPU.

    ``args`` are pytrees of arrays or ShapeDtypeStructs, of which only shapes and dtypes count. Raises
    AotUnavailableError, and whatever tracing or compiling raises.
    """
    replicated = NamedSharding(target_mesh(find_target(target)), P())
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), args)
    program = jax.jit(fn, donate_argnums=donate_argnums, out_shardings=replicated)
    return compile_program(lambda: program.lower(*abstract), compiler_options)


def compile_program(
    lower: Callable[[], jax.stages.Lowered], compiler_options: Mapping[str, Any] | None = None
) -> CompileReport:
    """Compiles what ``lower()`` returns; its arguments must be placed on a ``target_mesh``."""
    with tempfile.TemporaryDirectory(prefix="octavo-aot-") as folder:
        dumps, kernels = Path(folder, "xla"), Path(folder, "kernels")
        dumps.mkdir()
        kernels.mkdir()
        options = {**(compiler_options or {}), "xla_dump_to": str(dumps), "xla_dump_hlo_as_text": True}
        with _kernel_dumps(kernels), _no_compile_cache(), _compiler_messages(Path(folder, "messages")):
            compiled = lower().compile(compiler_options=options)
        memory = compiled.memory_analysis()
        if memory is None:
            raise RuntimeError("the compiler gave no account of the program's memory")
        return CompileReport(
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            hlo=_largest(dumps, "*after_optimizations.txt"),
            thunks=_largest(dumps, "*thunk_sequence.txt"),
            thunks_in_command_buffers=_largest(dumps, "*thunk_sequence_after_thunk_passes.txt", optional=True),
            kernels=tuple(_kernel_resources(path) for path in sorted(kernels.glob("*.ptx"))),
        )


_DUMP_LOCK = threading.Lock()


@contextmanager
def _kernel_dumps(folder: Path) -> Iterator[None]:
    """Mosaic writes what it lowers and compiles into ``folder``; it takes its name from the environment alone."""
    with _DUMP_LOCK:
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
        try:
            yield
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]


@contextmanager
def _no_compile_cache() -> Iterator[None]:
    """Programs for a described GPU could be written to the persistent cache, but not be read from it again."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextmanager
def _compiler_messages(file: Path) -> Iterator[None]:
    """Keeps what C++ writes to standard error off the terminal: a missing disassembler, figures of rematerialisation.

    It goes to the log at level debug, and to standard error after all if compiling fails.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    with file.open("wb") as redirected:
        os.dup2(redirected.fileno(), 2)
    failed = True
    try:
        yield
        failed = False
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
        text = file.read_text(encoding="utf-8", errors="replace")
        if failed:
            sys.stderr.write(text)
        elif text:
            logger.debug("%s", text)


def _largest(folder: Path, pattern: str, *, optional: bool = False) -> str:
    """The program proper: XLA may dump small helper modules beside it."""
    files = sorted(folder.glob(pattern), key=lambda path: path.stat().st_size)
    if not files and not optional:
        raise RuntimeError(f"XLA dumped no {pattern}: did the program come from a compile cache?")
    return files[-1].read_text(encoding="utf-8", errors="replace") if files else ""


def _kernel_resources(ptx: Path) -> KernelResources:
    ptxas = ptx.with_suffix(".ptxas").read_text(encoding="utf-8")
    asked = ptx.with_suffix(".resources.txt")
    shared = re.search(r"smem_scratch_bytes=(\d+)", asked.read_text(encoding="utf-8") if asked.is_file() else "")
    static = re.search(r"(\d+) bytes smem", ptxas)
    registers = re.search(r"Used (\d+) registers", ptxas)
    if registers is None:
        raise RuntimeError(f"ptxas said nothing of kernel {ptx.stem}: {ptxas!r}")
    return KernelResources(
        name=ptx.stem,
        registers=int(registers[1]),
        spill_bytes=sum(int(count) for count in re.findall(r"(\d+) bytes spill", ptxas)),
        shared_bytes=sum(int(found[1]) for found in (shared, static) if found),
        ptx=ptx.read_text(encoding="utf-8"),
    )
