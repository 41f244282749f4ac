"""What ``octavo plan`` found, and how it says it. No jax here."""

from dataclasses import dataclass

from .config import GIB
from .memory import MemoryPlan


@dataclass(frozen=True)
class KernelPlan:
    """One of our GPU kernels in a step."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class StepPlan:
    """One compiled step; bytes are of one device."""

    name: str
    """As ``decode[256x256]``: tokens and rows."""
    temp_bytes: int
    launches_per_layer: float
    """Loops counted as one."""
    other_launches: int
    """Outside of layers, or XLA does not say where they come from."""
    command_buffers: int
    loose_launches: int
    """Not in a command buffer."""
    kernels: tuple[KernelPlan, ...]


@dataclass(frozen=True)
class Floor:
    """The least time of a decode step."""

    num_rows: int
    context: int
    seconds: float
    fits: bool
    """The rows' blocks are in the pool."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_rows / self.seconds


@dataclass(frozen=True)
class Plan:
    """Everything that ``octavo plan`` prints."""

    model: str
    target: str
    rates: str
    num_devices: int
    dtype: str
    attention: str
    memory: MemoryPlan
    num_blocks: int
    """The null block included; 0 if there is no room."""
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    steps: tuple[StepPlan, ...]
    floors: tuple[Floor, ...]
    prefill_seconds: float
    """Floor of a prompt of max_num_batched_tokens tokens in one step."""
    num_layers: int
    num_compiled: int
    """Layers of the steps that were compiled."""
    quantization: str | None = None
    """How the linear layers' weights are stored; None: as ``dtype``."""
    kv_dtype: str | None = None
    """Of the KV pool's numbers; None: ``dtype``."""
    problem: str | None = None
    """Why it does not fit; None if it does."""
    num_host_blocks: int = 0
    """Blocks that the prefix cache's tier in host memory holds."""

    def sequences(self, length: int) -> int:
        """How many sequences of ``length`` tokens the pool holds at once."""
        return max(self.num_blocks - 1, 0) // -(-length // self.block_size)


def format_plan(plan: Plan) -> str:
    """The plan as text for a terminal."""
    devices = "" if plan.num_devices == 1 else f" x {plan.num_devices} (bytes below are of each)"
    others = [f", weights in {plan.quantization}"] if plan.quantization is not None else []
    if plan.kv_dtype not in (None, plan.dtype):
        others.append(f", KV cache in {plan.kv_dtype}")
    stored = "".join(others) + ("," if others else "")
    lines = [
        f"{plan.model} in {plan.dtype}{stored} on {plan.target}{devices}",
        f"attention: {plan.attention}",
        "",
        *_memory_lines(plan),
        "",
        *_compiled_lines(plan),
        *(line for step in plan.steps for line in _step_lines(step)),
        *_floor_lines(plan),
        "",
        "It does not fit: " + plan.problem if plan.problem else "It fits.",
    ]
    return "\n".join(lines)


def _memory_lines(plan: Plan) -> list[str]:
    memory = plan.memory
    parts = [
        ("device memory", memory.device),
        ("of it usable", memory.usable),
        ("weights", memory.weights),
        ("rows' state", memory.state),
        ("temporaries", memory.temporaries),
        ("kept free", memory.reserve),
        ("KV pool", max(memory.pool, 0)),
    ]
    lines = [f"{name:<16}{count / GIB:10.2f} GiB" for name, count in parts]
    blocks = max(plan.num_blocks - 1, 0)
    lines.append(f"{'':<16}{blocks:10,} blocks of {plan.block_size} tokens = {blocks * plan.block_size:,} tokens")
    if plan.num_host_blocks:
        host = plan.num_host_blocks
        lines.append(f"{'host tier':<16}{host * memory.block / GIB:10.2f} GiB")
        lines.append(f"{'':<16}{host:10,} blocks of {plan.block_size} tokens = {host * plan.block_size:,} tokens")
    lengths = sorted({length for length in (1024, 4096, 16384) if length < plan.max_model_len} | {plan.max_model_len})
    held = ", ".join(f"{plan.sequences(length):,} of {length:,} tokens" for length in lengths)
    return [*lines, f"sequences that fit at once: {held} (a step takes up to {plan.max_num_seqs})"]


def _compiled_lines(plan: Plan) -> list[str]:
    if plan.num_compiled == plan.num_layers:
        return [f"steps, compiled with all {plan.num_layers} layers:"]
    return [
        f"steps, compiled with {plan.num_compiled} of the model's {plan.num_layers} layers, which repeat "
        "(--all-layers compiles all; weights and KV pool above are of all):"
    ]


def _step_lines(step: StepPlan) -> list[str]:
    loose = "" if not step.loose_launches else f", {step.loose_launches} launches outside of them"
    lines = [
        f"{step.name}: temporaries {step.temp_bytes / 1e6:.0f} MB, {step.launches_per_layer:.1f} launches a layer "
        f"and {step.other_launches} others, command buffers: {step.command_buffers}{loose}"
    ]
    for kernel in step.kernels:
        lines.append(
            f"  kernel {kernel.name}: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled, "
            f"{kernel.shared_bytes / 1024:.0f} KiB of shared memory"
        )
    return lines


def _floor_lines(plan: Plan) -> list[str]:
    lines = ["", f"floor of a decode step ({plan.rates})", f"{'rows':>8}{'context':>10}{'ms':>10}{'tokens/s':>12}"]
    for floor in plan.floors:
        note = "" if floor.fits else "  more than the pool holds"
        lines.append(
            f"{floor.num_rows:8}{floor.context:10,}{floor.seconds * 1e3:10.2f}{floor.tokens_per_s:12,.0f}{note}"
        )
    lines.append(
        f"floor of a prompt of {plan.max_num_batched_tokens:,} tokens in one step: {plan.prefill_seconds * 1e3:.1f} ms"
    )
    return lines
