"""Compiled programs: one per bucket and three small ones, compiled ahead of time in a thread pool."""

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from ..models.quantization.weights import QUANTIZED_TYPES
from ..pallas_kernels.tuning import user_files
from ..pallas_kernels.work_lists import WorkListSpec
from ..pallas_kernels.xla_options import step_compiler_options
from .buckets import Bucket, BucketTable
from .compile_cache import program_settings, without_jax_cache
from .config import EngineConfig
from .device_state import StateSpec, abstract_state
from .executable_cache import ExecutableCache
from .host_pool import abstract_chunk, lower_swap_in, lower_swap_out
from .host_tier import SWAP_CHUNK
from .input_batch import packed_layout, row_update_layout
from .step import BLOCK_COPIES, PROMPT_LOGPROB_ROWS, StepSpec, copy_blocks, score_prompt, step, write_row

logger = logging.getLogger(__name__)

MAX_COMPILE_THREADS = 8
"""More at a time would need more host memory than they save time."""


@dataclass(frozen=True)
class LoadedModel:
    """A model on the device: static graph, parameters as a plain pytree, the mesh they are sharded over."""

    graphdef: Any
    params: Any
    mesh: Mesh
    work: WorkListSpec | None = None
    """What the host plans for its attention kernels; None where they want nothing."""

    @property
    def quantized(self) -> bool:
        leaves = jax.tree.leaves(self.params, is_leaf=lambda node: isinstance(node, QUANTIZED_TYPES))
        return any(isinstance(leaf, QUANTIZED_TYPES) for leaf in leaves)


class Programs:
    """Compiles and keeps the engine's programs. With ``enforce_eager`` each is compiled on first use."""

    def __init__(self, config: EngineConfig, model: LoadedModel, spec: StateSpec, buckets: BucketTable) -> None:
        self._config = config
        self._model = model
        self._spec = spec
        self._buckets = buckets
        self._state = abstract_state(spec, model.mesh)
        self._state_shardings = jax.tree.map(lambda leaf: leaf.sharding, self._state)
        self._params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), model.params
        )
        self._replicated = NamedSharding(model.mesh, P())
        self.compiler_options: dict[str, str | bool] = step_compiler_options(
            model.mesh.devices.flat[0].platform, quantized=model.quantized
        )
        """XLA's options for the steps."""
        on_cpu = model.mesh.devices.flat[0].platform == "cpu"
        self._small_options = self.compiler_options if on_cpu else None
        self._compiled: dict[str, jax.stages.Compiled] = {}
        self._lock = threading.Lock()
        self._kept = self._executable_cache()
        self._warming_up = False

    @property
    def mask_words(self) -> int:
        """Width of an allow-mask row, in int32 words."""
        return -(-self._spec.vocab_size // 32)

    def step(self, bucket: Bucket) -> jax.stages.Compiled:
        return self._get(str(bucket), partial(self._compile_step, bucket))

    def write_row(self) -> jax.stages.Compiled:
        return self._get("write_row", self._compile_write_row)

    def copy_blocks(self) -> jax.stages.Compiled:
        return self._get("copy_blocks", self._compile_copy_blocks)

    def swap_out(self) -> jax.stages.Compiled:
        return self._get("swap_out", lambda: self.lower_swap(to_host=True).compile())

    def swap_in(self) -> jax.stages.Compiled:
        return self._get("swap_in", lambda: self.lower_swap(to_host=False).compile())

    def lower_swap(self, *, to_host: bool) -> jax.stages.Lowered:
        """A copy of one chunk of blocks between the pool and host memory, traced and not compiled."""
        lower = lower_swap_out if to_host else lower_swap_in
        return lower(self._state.kv, abstract_chunk(self._spec.kv, self._model.mesh), self._int32(SWAP_CHUNK))

    def score_prompt(self) -> jax.stages.Compiled:
        return self._get("score_prompt", self._compile_score_prompt)

    def warm_up(self, *, bar: bool = False) -> None:
        """Compiles everything, or reads it where it was kept, the largest first, as many at a time as there are cores.

        JAX releases the GIL while XLA works. ``bar`` shows how far it is.
        """
        # One more than cores: tracing holds the GIL, and XLA has stretches that leave a core idle.
        num_threads = min((os.cpu_count() or 1) + 1, MAX_COMPILE_THREADS)
        jobs: list[tuple[str, Callable[[], Any]]] = [
            (str(bucket), partial(self.step, bucket)) for bucket in sorted(self._buckets.all, reverse=True)
        ]
        jobs += [("write_row", self.write_row), ("copy_blocks", self.copy_blocks), ("score_prompt", self.score_prompt)]
        if self._config.cache.num_host_chunks:
            jobs += [("swap_out", self.swap_out), ("swap_in", self.swap_in)]
        self._warming_up = True
        logger.info("compiling %d programs, or loading them where an earlier start has kept them", len(jobs))
        try:
            with (
                without_jax_cache(),
                _no_garbage_collection(),
                ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool,
            ):
                _finish({pool.submit(job): name for name, job in jobs}, pool, bar)
        finally:
            self._warming_up = False
            self._kept.keep()

    def temporary_bytes(self, bucket: Bucket) -> int:
        """Device memory that a bucket's program needs besides its arguments and results."""
        analysis = self.step(bucket).memory_analysis()
        return 0 if analysis is None else int(analysis.temp_size_in_bytes)

    def _get(self, name: str, build: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
        compiled = self._compiled.get(name)
        if compiled is None:
            if not self._warming_up:
                logger.info("compiling %s, met for the first time", name)
            compiled = self._kept.get(name, build) if self._warming_up else build()
            with self._lock:
                compiled = self._compiled.setdefault(name, compiled)
        return compiled

    def _executable_cache(self) -> ExecutableCache:
        """Beside JAX's own cache, keyed by all that the programs are made of; for devices of this machine only."""
        folder = jax.config.values["jax_compilation_cache_dir"]
        devices = list(self._model.mesh.devices.flat)
        is_here = devices[0] in jax.local_devices()
        config = self._config
        sizes = (config.block_size, config.max_model_len, config.max_blocks_per_request, config.vocab_size)
        made_of = (self._model.graphdef, self._params, self._spec, self._model.work)
        parts = (*made_of, sizes, self.compiler_options, user_files(), program_settings(devices[0]))
        inputs = [repr(part) for part in (*parts, [device.id for device in devices])] if folder and is_here else []
        return ExecutableCache(Path(folder) if folder and is_here else None, inputs, devices)

    def _int32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._replicated)

    def _compile_step(self, bucket: Bucket) -> jax.stages.Compiled:
        return self.lower_step(bucket).compile(compiler_options=self.compiler_options or None)

    def lower_step(self, bucket: Bucket) -> jax.stages.Lowered:
        """A bucket's program, traced and not compiled."""
        spec = StepSpec(
            bucket=bucket,
            layout=packed_layout(bucket, self._config.block_size, self._model.work),
            block_size=self._config.block_size,
            num_slots=self._spec.kv.num_slots,
            vocab_size=self._config.vocab_size,
            work=self._model.work,
        )
        program = jax.jit(
            partial(step, self._model.graphdef, spec),
            donate_argnums=1,
            out_shardings=(self._state_shardings, self._replicated),
        )
        packed, mask = self._int32(spec.layout.size), self._int32(bucket.num_rows, self.mask_words)
        return program.lower(self._params, self._state, packed, mask)

    def _compile_write_row(self) -> jax.stages.Compiled:
        layout = row_update_layout(self._config.max_model_len, self._config.max_blocks_per_request)
        program = jax.jit(partial(write_row, layout), donate_argnums=0, out_shardings=self._state_shardings)
        return program.lower(self._state, self._int32(layout.size)).compile(self._small_options)

    def _compile_copy_blocks(self) -> jax.stages.Compiled:
        program = jax.jit(copy_blocks, donate_argnums=0, out_shardings=self._state_shardings)
        return program.lower(self._state, self._int32(BLOCK_COPIES, 2)).compile(self._small_options)

    def _compile_score_prompt(self) -> jax.stages.Compiled:
        program = jax.jit(
            partial(score_prompt, self._model.graphdef, self._config.vocab_size), out_shardings=self._replicated
        )
        return program.lower(self._params, self._state.hidden, self._int32(2, PROMPT_LOGPROB_ROWS)).compile(
            self._small_options
        )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Tracing makes millions of objects that live on, which the collector would walk through again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _finish(futures: dict[Future[Any], str], pool: ThreadPoolExecutor, bar: bool) -> None:
    """Waits for all, telling of each; an error or an interrupt cancels what has not begun."""
    started = time.monotonic()
    with tqdm(total=len(futures), desc="Compiling", unit="program", disable=not bar, file=sys.stderr) as meter:
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                seconds = time.monotonic() - started
                meter.update()
                logger.info("compiled %s, %d of %d, after %.1f s", futures[future], done, len(futures), seconds)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
