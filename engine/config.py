"""The engine's configuration: frozen parts, checked once; derived values come by ``resolve``, nothing changes after."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..models.config import SAMPLING_KEYS
from .args import EngineArgs
from .errors import ConfigError, RequestError
from .host_tier import SWAP_CHUNK
from .request_queue import POLICIES
from .sampling_params import MAX_LOGPROBS, SamplingParams

logger = logging.getLogger(__name__)

PROGRAM_WRITER = "octavo-program-writer"
"""The thread that writes compiled programs after a start: an end that is not forced waits for it."""
WRITER_WAIT_S = 8.0
"""But no longer than this."""
GIB = 1024**3
DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}
KV_CACHE_DTYPES = {
    "auto": "auto",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
}
LOAD_FORMATS = ("auto", "safetensors", "gguf", "orbax", "dummy")


def gib(num_bytes: int) -> str:
    """Rounded so that nothing reads as 0.00."""
    value = num_bytes / GIB
    return f"{value:.2f} GiB" if value >= 0.1 else f"{value * 1024:.2f} MiB"


@dataclass(frozen=True)
class ModelOptions:
    """Which weights, from where, in what precision."""

    model: str | None
    tokenizer: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    trust_remote_code: bool = False
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheConfig:
    """The KV pool. ``num_blocks`` counts the null block too; None until the device is known."""

    block_size: int
    enable_prefix_caching: bool
    num_blocks: int | None = None
    memory_bytes: int | None = None
    dtype: str = "auto"
    """Of keys and values; auto: the model's."""
    gpu_memory_utilization: float = 0.92
    swap_bytes: int = 0
    """Host memory for the second tier, for each device."""
    num_host_chunks: int = 0
    """What the second tier has room for; see ``with_host_tier``."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and of a sequence. None until resolved."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    model_len_given: bool = False
    """The context length was asked for, not taken from the model."""
    policy: str = "fcfs"
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    async_scheduling: bool = True


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine was told or worked out. ``from_args`` then ``resolve``."""

    model: ModelOptions
    cache: CacheConfig
    scheduler: SchedulerConfig
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    compile_cache_dir: str | None = None
    attention_backend: str = "auto"
    tuned_config_folder: str | None = None
    max_logprobs: int = MAX_LOGPROBS
    seed: int = 0
    engine_step_timeout_s: float = 300.0
    served_model_names: tuple[str, ...] = ()
    model_path: str = ""
    """Where the weights were found."""
    vocab_size: int = 0
    """Ids below this can be asked for and sampled."""
    eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def from_args(cls, args: EngineArgs) -> "EngineConfig":
        """Checks the options. Raises ConfigError naming the one that cannot be served."""
        _check_choices(args)
        _check_ranges(args)
        _check_generation_config(args)
        _check_unbuilt(args)
        return cls(
            model=ModelOptions(
                model=args.model,
                tokenizer=args.tokenizer,
                revision=args.revision,
                download_dir=args.download_dir,
                load_format=args.load_format,
                dtype=DTYPES[args.dtype],
                quantization=args.quantization,
                trust_remote_code=args.trust_remote_code,
                hf_overrides=dict(args.hf_overrides or {}),
            ),
            cache=CacheConfig(
                block_size=args.block_size,
                enable_prefix_caching=args.enable_prefix_caching,
                num_blocks=args.num_gpu_blocks_override,
                memory_bytes=args.kv_cache_memory_bytes,
                dtype=KV_CACHE_DTYPES[args.kv_cache_dtype],
                gpu_memory_utilization=args.gpu_memory_utilization,
                swap_bytes=int(args.swap_space * GIB),
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=args.max_num_seqs,
                max_num_batched_tokens=args.max_num_batched_tokens,
                max_model_len=_asked_model_len(args.max_model_len),
                model_len_given=_asked_model_len(args.max_model_len) is not None,
                policy=args.scheduling_policy,
                max_num_queued_reqs=args.max_num_queued_reqs,
                max_num_queued_tokens=args.max_num_queued_tokens,
                async_scheduling=args.async_scheduling,
            ),
            tensor_parallel_size=args.tensor_parallel_size,
            enforce_eager=args.enforce_eager,
            compile_cache_dir=args.compile_cache_dir,
            attention_backend=args.attention_backend,
            tuned_config_folder=args.tuned_config_folder,
            max_logprobs=args.max_logprobs,
            seed=args.seed,
            engine_step_timeout_s=float(args.engine_step_timeout),
            served_model_names=args.served_model_name or ((args.model,) if args.model else ()),
        )

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    @property
    def num_blocks(self) -> int:
        assert self.cache.num_blocks is not None, "the configuration is not resolved yet"
        return self.cache.num_blocks

    @property
    def max_model_len(self) -> int:
        assert self.scheduler.max_model_len is not None, "the configuration is not resolved yet"
        return self.scheduler.max_model_len

    @property
    def max_num_seqs(self) -> int:
        assert self.scheduler.max_num_seqs is not None, "the configuration is not resolved yet"
        return self.scheduler.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        assert self.scheduler.max_num_batched_tokens is not None, "the configuration is not resolved yet"
        return self.scheduler.max_num_batched_tokens

    @property
    def max_blocks_per_request(self) -> int:
        """Width of a block table."""
        return -(-self.max_model_len // self.block_size)

    def resolve(
        self,
        *,
        platform: str,
        context_len: int,
        model_path: str,
        model_name: str,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> "EngineConfig":
        """With the limits that follow from the model and the platform ("cpu", "gpu"). The pool's size comes later.

        ``model_name`` is what the server answers to when no name was asked for.
        """
        on_cpu = platform == "cpu"
        max_model_len = self.scheduler.max_model_len or context_len
        if max_model_len > context_len:
            raise ConfigError(f"max_model_len {max_model_len} is more than the model's context of {context_len} tokens")
        given = self.scheduler.max_num_batched_tokens
        max_num_seqs = self.scheduler.max_num_seqs or min(64 if on_cpu else 256, given or 256)
        budget = given or max(512 if on_cpu else 2048, max_num_seqs)
        if budget < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {budget} must be at least max_num_seqs {max_num_seqs}: every row gets a token"
            )
        return replace(
            self,
            scheduler=replace(
                self.scheduler,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=max_model_len,
            ),
            model_path=model_path,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            served_model_names=self.served_model_names or (model_name,),
        )

    def with_pool(self, num_blocks: int, block_bytes: int | None = None) -> "EngineConfig":
        """With a pool of ``num_blocks`` blocks of ``block_bytes`` (for what is said), the null block included.

        A context length that was not asked for shrinks to what fits; one that was asked for and
        does not fit is refused.
        """
        if num_blocks < 2:
            raise ConfigError(f"the KV cache has room for {num_blocks} blocks, at least 2 are needed")
        usable_tokens = (num_blocks - 1) * self.block_size
        max_model_len = self.max_model_len
        if max_model_len > usable_tokens:
            if self.scheduler.model_len_given:
                raise ConfigError(self._too_long(num_blocks, block_bytes))
            logger.warning(
                "max_model_len: %d, the tokens that fit the KV cache; the model allows %d", usable_tokens, max_model_len
            )
            max_model_len = usable_tokens
        elif not self.scheduler.model_len_given:
            logger.info("max_model_len: %d, as the model has it; it fits the KV cache", max_model_len)
        return replace(
            self,
            cache=replace(self.cache, num_blocks=num_blocks),
            scheduler=replace(self.scheduler, max_model_len=max_model_len),
        )

    def _too_long(self, num_blocks: int, block_bytes: int | None) -> str:
        """By how much a context that was asked for does not fit the pool, and what would help."""
        usable = num_blocks - 1
        needed = f"{self.max_blocks_per_request} blocks"
        there = f"{usable} blocks"
        if block_bytes is not None:
            needed += f", {gib(self.max_blocks_per_request * block_bytes)}"
            there += f", {gib(usable * block_bytes)}"
        enlarge = "kv_cache_memory_bytes or gpu_memory_utilization"
        if self.cache.num_blocks is not None:
            enlarge = "num_gpu_blocks_override"
        elif self.cache.memory_bytes is not None:
            enlarge = "kv_cache_memory_bytes"
        return (
            f"max_model_len {self.max_model_len} does not fit: a sequence of that length takes {needed}, and the KV "
            f"cache has {there}. The longest that fits is {usable * self.block_size} tokens: set max_model_len to that "
            f"or to auto, or enlarge the cache ({enlarge})"
        )

    def with_host_tier(self, bytes_per_block: int, free_bytes: int | None) -> "EngineConfig":
        """With as many chunks of host memory as ``swap_space`` pays for.

        ``bytes_per_block`` of one device; ``free_bytes`` of host memory, if that is known. Raises ConfigError if the
        space is too little for one chunk, or more than there is.
        """
        if not self.cache.swap_bytes:
            return self
        total = self.cache.swap_bytes * self.tensor_parallel_size
        if free_bytes is not None and total > free_bytes:
            raise ConfigError(
                f"swap_space: {total / GIB:g} GiB are more than the {free_bytes / GIB:.1f} GiB of memory that are free"
            )
        chunk = bytes_per_block * SWAP_CHUNK
        num_chunks = self.cache.swap_bytes // chunk
        if num_chunks == 0:
            raise ConfigError(
                f"swap_space: {self.cache.swap_bytes / GIB:g} GiB hold nothing; the least is one chunk of "
                f"{SWAP_CHUNK} blocks, {chunk / GIB:.6f} GiB"
            )
        return replace(self, cache=replace(self.cache, num_host_chunks=num_chunks))


def _check_choices(args: EngineArgs) -> None:
    if args.dtype not in DTYPES:
        raise ConfigError(f"dtype {args.dtype!r} is unknown; known: {', '.join(DTYPES)}")
    if args.kv_cache_dtype not in KV_CACHE_DTYPES:
        known = ", ".join(KV_CACHE_DTYPES)
        raise ConfigError(f"kv_cache_dtype {args.kv_cache_dtype!r} is not supported; known: {known}")
    if args.load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format {args.load_format!r} is not supported; known: {', '.join(LOAD_FORMATS)}")
    if args.attention_backend not in ("auto", "xla", "mosaic"):
        raise ConfigError(f"attention_backend {args.attention_backend!r} is unknown; known: auto, xla, mosaic")
    if args.tuned_config_folder is not None and not Path(args.tuned_config_folder).is_dir():
        raise ConfigError(f"tuned_config_folder {args.tuned_config_folder!r} is not a folder")
    if args.scheduling_policy not in POLICIES:
        raise ConfigError(f"scheduling_policy {args.scheduling_policy!r} is unknown; known: {', '.join(POLICIES)}")


def _check_ranges(args: EngineArgs) -> None:
    counts = ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "max_num_queued_tokens")
    for name in (*counts, "tensor_parallel_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if args.max_num_queued_reqs is not None and args.max_num_queued_reqs < 0:
        raise ConfigError(f"max_num_queued_reqs must not be negative, got {args.max_num_queued_reqs}")
    if args.num_gpu_blocks_override is not None and args.num_gpu_blocks_override < 2:
        raise ConfigError(f"num_gpu_blocks_override must be at least 2, got {args.num_gpu_blocks_override}")
    if not 1 <= args.block_size <= 256 or args.block_size & (args.block_size - 1):
        raise ConfigError(f"block_size must be a power of two from 1 to 256, got {args.block_size}")
    if not 0.0 < args.gpu_memory_utilization <= 1.0:
        raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {args.gpu_memory_utilization}")
    if not 0 <= args.max_logprobs <= MAX_LOGPROBS:
        raise ConfigError(f"max_logprobs must be from 0 to {MAX_LOGPROBS}, got {args.max_logprobs}")
    if not -(2**63) <= args.seed < 2**63:
        raise ConfigError(f"seed must be a signed 64-bit integer, got {args.seed}")
    if not 0.0 < args.engine_step_timeout < math.inf:
        raise ConfigError(f"engine_step_timeout must be a number of seconds, got {args.engine_step_timeout}")
    if not all(args.served_model_name or ("-",)):
        raise ConfigError("served_model_name: a name is empty")
    if not 0 <= args.swap_space < 2**20:
        raise ConfigError(f"swap_space must be a number of GiB that is not negative, got {args.swap_space}")
    if args.swap_space > 0 and not args.enable_prefix_caching:
        raise ConfigError("swap_space is the prefix cache's second tier: it needs enable_prefix_caching")


def _asked_model_len(value: int | str | None) -> int | None:
    """A context length that was asked for; None: as much of the model's as fits."""
    if value in (None, "auto", -1):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f'max_model_len must be a number of tokens from 1 on, or "auto", got {value!r}')
    return value


def _check_generation_config(args: EngineArgs) -> None:
    if args.generation_config not in ("auto", "vllm"):
        raise ConfigError(f"generation_config {args.generation_config!r} is not supported; known: auto, vllm")
    override = args.override_generation_config or {}
    if unknown := sorted(set(override) - set(SAMPLING_KEYS)):
        raise ConfigError(
            f"override_generation_config: {unknown[0]!r} is not supported; known: {', '.join(SAMPLING_KEYS)}"
        )
    try:
        SamplingParams(**{SAMPLING_KEYS[key]: value for key, value in override.items()})
    except RequestError as error:
        raise ConfigError(f"override_generation_config: {error}") from error


def _check_unbuilt(args: EngineArgs) -> None:
    """Options whose feature does not exist yet refuse, unless at their neutral value."""
    if args.trust_remote_code:
        raise ConfigError("trust_remote_code: Octavo never runs code from a checkpoint; leave it off")
