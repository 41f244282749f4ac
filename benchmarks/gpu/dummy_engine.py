"""The engine's core over a model of known shape with random weights: no checkpoint, no tokenizer, no server."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from octavo.engine.args import EngineArgs
from octavo.engine.buckets import BucketTable
from octavo.engine.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.core_parts import choose_attention, host_planned_work, make_scheduler, state_spec
from octavo.engine.model_runner import ModelRunner
from octavo.engine.programs import LoadedModel
from octavo.engine.step_floor import StepWork
from octavo.engine.step_work import step_work
from octavo.models.architectures import get_architecture
from octavo.models.decoder import abstract_params
from octavo.models.decoder_config import DecoderConfig
from octavo.models.loading.dummy import dummy_params
from octavo.models.presets import preset_config
from octavo.pallas_kernels.dispatch import Choice, Device

COMPILE_THREADS = 8
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Over a preset's shape, for ``--smoke``."""


@dataclass(frozen=True)
class Sizes:
    """The limits of an engine, and the shapes that are compiled."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    decode_sizes: Sequence[int]
    mixed_sizes: Sequence[int]


@dataclass
class DummyEngine:
    """An engine's parts."""

    config: EngineConfig
    decoder: DecoderConfig
    choice: Choice
    model: LoadedModel
    runner: ModelRunner

    @property
    def core(self) -> EngineCore:
        return EngineCore(make_scheduler(self.config), self.runner)

    @property
    def dtype(self) -> Any:
        return self.model.params["embed"]["weight"].dtype

    def work(self) -> StepWork:
        """Of a step, for its floor."""
        kv_token_bytes = 2 * self.decoder.kv_size * self.dtype.itemsize * self.decoder.num_layers
        return step_work(self.decoder, self.model.params, kv_token_bytes)

    def compile(self) -> None:
        """All steps' programs, and the one that admits a request."""
        programs = self.runner.programs
        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            jobs = [pool.submit(programs.step, bucket) for bucket in self.runner.buckets.all]
            jobs.append(pool.submit(programs.write_row))
            for job in jobs:
                job.result()

    def randomise_kv(self) -> None:
        """Fills the pool with random numbers: time is not to be measured on zeros. Nothing public writes it whole."""
        state = self.runner._state
        fill = jax.jit(
            lambda pool, seed: jax.random.normal(
                jax.random.key(seed, impl="unsafe_rbg"), pool.shape, jnp.bfloat16
            ).astype(pool.dtype),
            donate_argnums=0,
        )
        self.runner._state = replace(state, kv=[fill(pool, layer) for layer, pool in enumerate(state.kv)])


def build(name: str, sizes: Sizes, attention_backend: str, *, smoke: bool) -> DummyEngine:
    """The model of a preset (``octavo.models.presets``); with ``smoke`` a tiny one of its architecture in float32."""
    model_config = preset_config(name, TINY if smoke else None)
    decoder = get_architecture(model_config.architecture).decoder_config(model_config)
    dtype = jnp.dtype("float32" if smoke else "bfloat16")
    args = EngineArgs(
        model=name,
        load_format="dummy",
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        num_gpu_blocks_override=sizes.num_blocks,
        attention_backend=attention_backend,
    )
    config = EngineConfig.from_args(args).resolve(
        platform=jax.default_backend(),
        context_len=model_config.max_context_tokens,
        model_path=name,
        model_name=name,
        vocab_size=decoder.vocab_size,
        eos_token_ids=frozenset(),
    )
    config = config.with_pool(sizes.num_blocks)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",), axis_types=(AxisType.Auto,))
    choice = choose_attention(config, Device.of(jax.devices()[0]), decoder, dtype)
    graphdef, _ = abstract_params(decoder, dtype, choice.implementation, mesh, choice.interpret)
    params = dummy_params(decoder, dtype=dtype, mesh=mesh)
    model = LoadedModel(graphdef, params, mesh, host_planned_work(config, decoder, dtype, choice))
    buckets = BucketTable(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        decode_sizes=tuple(sizes.decode_sizes),
        mixed_sizes=tuple(sizes.mixed_sizes),
    )
    spec = state_spec(config, decoder, dtype, config.num_blocks)
    return DummyEngine(config, decoder, choice, model, ModelRunner(config, model, spec, buckets))
