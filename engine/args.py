"""The options of an engine, flat, under vLLM's names: what ``LLM(...)``, ``AsyncLLM`` and ``octavo serve`` take."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Options as a user gives them; ``engine.config.EngineConfig.from_args`` checks and derives the rest.

    Memory sizes are bytes unless the name says otherwise. None means: derived from the model or the device.
    """

    model: str | None = None
    """A local folder, a ``.gguf`` file or a hub id. None: the embedded SmolLM2-135M-Instruct, if installed."""
    served_model_name: tuple[str, ...] | None = None
    """Names the server answers to, the first is canonical. None: the model as given."""
    tokenizer: str | None = None
    """A folder, file or hub id. None: the model's own."""
    skip_tokenizer_init: bool = False
    chat_template: str | None = None
    """A file, or the template itself. None: the model's own."""
    trust_remote_code: bool = False
    revision: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    """auto, safetensors, gguf, orbax (what ``octavo convert`` writes) or dummy."""
    dtype: str = "auto"
    """auto, float32 (float), bfloat16 or float16 (half)."""
    quantization: str | None = None
    """None: as the checkpoint says. Else the checkpoint's own method (awq, gptq, fp8, fbgemm_fp8, compressed-tensors),
    gguf to keep a GGUF file's weights packed, or fp8, int8 or int4 to quantise plain weights while they are loaded."""
    hf_overrides: Mapping[str, Any] | None = None
    """Entries put over ``config.json``."""
    seed: int = 0
    max_model_len: int | str | None = None
    """None, "auto" or -1: the model's context, or what of it fits the KV cache."""
    max_num_seqs: int | None = None
    """None: 64 on CPU, 256 on GPU, but no more than max_num_batched_tokens."""
    max_num_batched_tokens: int | None = None
    """None: 512 on CPU, 2048 on GPU."""
    block_size: int = 16
    async_scheduling: bool = True
    """Plan and send off each step before the results of the one before it are read."""
    enable_prefix_caching: bool = True
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_dtype: str = "auto"
    """auto (the model's type), fp8 (fp8_e4m3), bfloat16, float16 or float32."""
    kv_cache_memory_bytes: int | None = None
    """None: 1 GiB on CPU, what is left on GPU."""
    scheduling_policy: str = "fcfs"
    """fcfs, or priority: requests with a lower ``priority`` run earlier."""
    max_num_queued_reqs: int | None = None
    """Choices that may wait, beyond those for which there are rows. None: any number."""
    max_num_queued_tokens: int | None = None
    """Prompt tokens of all requests that wait. None: any number."""
    swap_space: float = 0.0
    """GiB of host memory per device for blocks that leave the KV cache. 0: none."""
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    """Compile each step program on first use instead of before ready."""
    compile_cache_dir: str | None = None
    """Folder of the persistent compile cache. None: a folder under the user's cache folder."""
    generation_config: str = "auto"
    """auto: sampling defaults from the model's generation_config.json; vllm: OpenAI's defaults."""
    override_generation_config: Mapping[str, Any] | None = None
    max_logprobs: int = 20
    attention_backend: str = "auto"
    """auto, xla or mosaic."""
    tuned_config_folder: str | None = None
    """Where ``octavo tune`` wrote kernel sizes that go before the package's own."""
    engine_step_timeout: float = 300.0
    """Seconds without a finished step, while there is work, after which the core counts as dead (not for ``LLM``)."""
    disable_log_stats: bool = False
