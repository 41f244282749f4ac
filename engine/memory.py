"""Where a device's memory goes, and what to say when it does not suffice. No jax here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .config import GIB, EngineConfig, gib
from .errors import ConfigError

CPU_POOL_BYTES = GIB
"""Default size of the KV pool on a CPU, of all its devices together: they share one memory."""
GPU_RESERVE_BYTES = GIB
"""Kept free of JAX's share of a GPU: results on their way, smaller programs' temporaries, fragmentation.

CUDA graphs and libraries live outside of that share.
"""
CPU_RESERVE_BYTES = GIB // 2
"""Kept free of a machine's memory: compiling, temporaries of steps, this process itself."""


@dataclass(frozen=True)
class MemoryPlan:
    """Where a device's memory goes, in bytes. On a CPU the device is the machine."""

    device: int
    usable: int
    """What the engine is allowed of it."""
    weights: int
    state: int
    temporaries: int
    reserve: int
    """Left to CUDA graphs and libraries; on a CPU to compiling and temporaries."""
    block: int
    """One KV block of all layers, this device's heads."""

    @property
    def pool(self) -> int:
        """What is left for KV blocks; negative if the rest alone is too much."""
        return self.usable - self.weights - self.state - self.temporaries - self.reserve


def check_room(memory: MemoryPlan, config: EngineConfig, *, dtype: str, platform: str, num_blocks: int = 2) -> None:
    """Raises ConfigError if a pool of ``num_blocks`` blocks does not fit: by how much, why, and what would help."""
    problem = describe_shortage(memory, config, dtype=dtype, platform=platform, num_blocks=num_blocks)
    if problem is not None:
        raise ConfigError(f"{config.served_model_names[0]} does not fit: {problem}")


def describe_shortage(
    memory: MemoryPlan, config: EngineConfig, *, dtype: str, platform: str, num_blocks: int = 2
) -> str | None:
    """By how much memory is short for a pool of ``num_blocks`` blocks, why, and what would help; None if it fits."""
    pool = num_blocks * memory.block
    shortage = pool - memory.pool
    if shortage <= 0:
        return None
    parts = [
        (f"weights in {dtype}", memory.weights),
        (f"the state of {config.max_num_seqs} rows", memory.state),
        ("temporaries of a step", memory.temporaries),
        (f"a KV cache of {num_blocks} blocks", pool),
    ]
    takes = ", ".join(f"{name} {gib(count)}" for name, count in parts if count)
    whose = "this machine's free memory" if platform == "cpu" else "the device's memory"
    advice = "; ".join(_advice(memory, config, dtype, platform, pool))
    return (
        f"it takes {gib(shortage)} too much. Of {gib(memory.usable)} of {whose} that may be used, {takes}; "
        f"{gib(memory.reserve)} must stay free. What would help: {advice}"
    )


def _advice(memory: MemoryPlan, config: EngineConfig, dtype: str, platform: str, pool: int) -> list[str]:
    shortage = pool - memory.pool
    result = []
    if memory.pool >= 2 * memory.block:
        asked = "num_gpu_blocks_override" if config.cache.num_blocks is not None else "kv_cache_memory_bytes"
        fits = memory.pool // memory.block
        result.append(f"a smaller {asked} ({fits} blocks, {gib(fits * memory.block)}, fit)")
    if dtype == "float32":
        result.append(f"dtype bfloat16, which saves {gib(memory.weights // 2)} of the weights")
    if platform != "cpu" and memory.device - memory.usable >= shortage:
        least = config.cache.gpu_memory_utilization + shortage / memory.device
        result.append(f"gpu_memory_utilization {least:.3f} or more (now {config.cache.gpu_memory_utilization:g})")
    if memory.state + memory.temporaries >= shortage:
        result.append(
            f"a lower max_num_seqs (now {config.max_num_seqs}) or "
            f"max_num_batched_tokens (now {config.max_num_batched_tokens})"
        )
    if platform == "cpu":
        result.append("more free memory")
        if config.cache.swap_bytes:
            result.append("a smaller swap_space")
    else:
        result.append(f"a larger tensor_parallel_size (now {config.tensor_parallel_size})")
    if config.model.quantization is None and memory.weights >= shortage:
        result.append("quantised weights (--quantization fp8, int8 or int4, or a quantised checkpoint)")
    return [*result, "a smaller model"]


def available_host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process may still take: of the machine, and of its control group if that has a limit.

    None where the system does not tell (not Linux).
    """
    found = []
    machine = _numbers(proc / "meminfo").get("MemAvailable:")
    if machine is not None:
        found.append(machine * 1024)
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, now = _number(cgroup / limit), _number(cgroup / used)
        if most is not None and now is not None:
            # Pages of files that nobody reads are given up for whoever needs memory.
            idle = _numbers((cgroup / limit).parent / "memory.stat").get(cached, 0)
            found.append(max(0, most - now + idle))
    return min(found, default=None)


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _numbers(file: Path) -> Mapping[str, int]:
    """Lines of a name, a number and perhaps a unit."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) >= 2 and line[1].isdecimal()}
