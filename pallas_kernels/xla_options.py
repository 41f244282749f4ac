"""XLA's options for the programs of a step."""

from .compat import MOSAIC_SINCE, jax_version

_CAPTURED = ("CONDITIONAL", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION", "FUSION")
"""What XLA captures into command buffers anyway, in the versions of JAX that the options below are for."""


def step_compiler_options(platform: str, *, quantized: bool = False) -> dict[str, str | bool]:
    """Options for ``jax.stages.Lowered.compile`` on ``platform`` ("cpu", "gpu"), of a model with ``quantized`` weights.

    On a CPU LLVM optimises less: a step compiles in five sixths of the time and runs as fast to within 2 %, as its time
    goes to matrix products from a library. Quantised weights are widened there, in their turn if XLA orders a step for
    little memory; up to JAX 0.10 it widens them all first, which takes the memory of the plain model and ten times as
    long.

    On a GPU loops are captured too: the threshold search of the sampler and the plain JAX attention loop over keys
    would otherwise cut a step into dozens of command buffers. It is what the flag
    ``--xla_gpu_enable_command_buffer=+WHILE`` does, but as an option of the program: a name that XLA does not know
    raises an error instead of ending the process, and it works in a process whose backend has started already.
    The option replaces the list, so the kinds are spelled out; older versions of JAX keep their own list.

    NCCL's all-reduces (``COLLECTIVES``) are left out. With them a step on several GPUs compiles to one command buffer
    too, but nobody has run that yet.
    """
    if platform == "cpu":
        options: dict[str, str | bool] = {"xla_backend_optimization_level": "1"}
        if quantized:
            options["xla_cpu_scheduler_type"] = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
        return options
    if platform != "gpu" or jax_version() < MOSAIC_SINCE:
        return {}
    kinds = {*_CAPTURED, "WHILE"}
    if jax_version() >= (0, 12):
        kinds.add("COLLECTIVES_KERNEL")
    return {"xla_gpu_enable_command_buffer": ",".join(sorted(kinds))}
