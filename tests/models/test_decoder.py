"""The decoder as the engine uses it: its parameter tree, its traces, its memory, its shardings."""

import dataclasses
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from octavo.models.architectures.base import WeightMapping
from octavo.models.attention_metadata import AttentionMetadata
from octavo.models.decoder import DecoderLayer, abstract_params, merge, param_partition_specs
from octavo.models.decoder_config import DecoderConfig, LayerSpec, MoESpec, RopeSpec
from octavo.models.errors import ModelConfigError

ROPE = RopeSpec(theta=1e4, rotary_dim=16)
CONFIG = DecoderConfig(
    vocab_size=90,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    layers=(LayerSpec(ROPE),) * 6,
    norm_eps=1e-5,
    tie_embeddings=True,
)
POOL = (256, 2, 2, 4, 16)
TOKENS = 8


def metadata() -> AttentionMetadata:
    places = np.arange(TOKENS, dtype=np.int32)
    return AttentionMetadata(
        positions=jnp.asarray(places),
        slot_mapping=jnp.asarray(places + 4),
        block_tables=jnp.asarray([[1, 2, 0]], jnp.int32),
        query_start_loc=jnp.asarray([0, TOKENS], jnp.int32),
        seq_lens=jnp.asarray([TOKENS], jnp.int32),
        decode_only=False,
    )


def lower(config: DecoderConfig) -> jax.stages.Lowered:
    """One step, from shapes only."""
    graphdef, params = abstract_params(config, jnp.float32)

    def step(params: Any, kv: list[jax.Array], ids: jax.Array, batch: AttentionMetadata) -> Any:
        decoder = merge(graphdef, params)
        hidden, kv = decoder(ids, kv, batch)
        return decoder.compute_logits(hidden[:2]), kv

    pools = [jax.ShapeDtypeStruct(POOL, jnp.float32)] * config.num_layers
    ids = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    return jax.jit(step, donate_argnums=1).lower(params, pools, ids, metadata())


def test_params_are_plain_and_few() -> None:
    _, params = abstract_params(CONFIG, jnp.bfloat16)
    leaves, tree = jax.tree.flatten(params)
    assert len(leaves) == 2 + 6 * 6
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    assert type(params) is dict
    assert type(params["layers"]) is list
    assert params["layers"][5]["mlp"]["gate_up"]["weight"].shape == (96, 32)
    assert "head" not in params
    assert "head" in abstract_params(dataclasses.replace(CONFIG, tie_embeddings=False), jnp.float32)[1]
    assert tree == jax.tree.structure(param_partition_specs(CONFIG))


@pytest.mark.parametrize(
    ("layers", "kinds"),
    [
        ((LayerSpec(ROPE),) * 6, 1),
        ((LayerSpec(ROPE), LayerSpec(ROPE, window=3)) * 3, 2),
        ((LayerSpec(ROPE, window=2), LayerSpec(ROPE, window=3), LayerSpec(None)) * 2, 3),
    ],
)
def test_layers_of_one_kind_are_traced_once(
    layers: tuple[LayerSpec, ...], kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = []
    original = DecoderLayer.__call__

    def counted(self: DecoderLayer, *arguments: Any) -> Any:
        traced.append(self.attention.window)
        return original(self, *arguments)

    monkeypatch.setattr(DecoderLayer, "__call__", counted)
    lower(dataclasses.replace(CONFIG, layers=layers, intermediate_size=48 + 16 * kinds))  # seen by no other test
    assert len(traced) == kinds


def test_the_pool_is_aliased_and_not_copied() -> None:
    memory = lower(CONFIG).compile().memory_analysis()
    layer_bytes = int(np.prod(POOL)) * 4
    assert memory is not None
    assert memory.alias_size_in_bytes >= CONFIG.num_layers * layer_bytes
    assert memory.temp_size_in_bytes < layer_bytes


def test_logits_for_chosen_rows_only() -> None:
    text = lower(CONFIG).compile().as_text()
    assert "f32[2,90]" in text
    assert f"f32[{TOKENS},90]" not in text
    assert f"f32[90,{TOKENS}]" not in text


def test_partition_specs() -> None:
    config = dataclasses.replace(
        CONFIG, qkv_bias=True, o_bias=True, mlp_bias=True, attention_sinks=True, qk_norm="head", tie_embeddings=False
    )
    specs = param_partition_specs(config)
    rows, columns, whole = PartitionSpec("tp", None), PartitionSpec(None, "tp"), PartitionSpec()
    layer = specs["layers"][0]
    assert specs["embed"]["weight"] == specs["head"]["weight"] == rows
    assert layer["attention"]["qkv"] == {"weight": rows, "bias": PartitionSpec("tp")}
    assert layer["mlp"]["gate_up"] == {"weight": rows, "bias": PartitionSpec("tp")}
    assert layer["attention"]["o"] == layer["mlp"]["down"] == {"weight": columns, "bias": whole}
    assert layer["attention"]["sinks"] == PartitionSpec("tp")
    assert layer["attention"]["q_norm"]["weight"] == layer["mlp_norm"]["weight"] == specs["norm"]["weight"] == whole


def test_sinks_reach_the_kernel() -> None:
    config = dataclasses.replace(CONFIG, attention_sinks=True, layers=CONFIG.layers[:1])
    graphdef, tree = abstract_params(config, jnp.float32)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) * 0.3, jnp.float32), tree)

    def hidden(sinks: float) -> np.ndarray:
        attention = {**params["layers"][0]["attention"], "sinks": jnp.full(4, sinks)}
        changed = {**params, "layers": [{**params["layers"][0], "attention": attention}]}
        ids = jnp.arange(TOKENS, dtype=jnp.int32)
        return np.asarray(merge(graphdef, changed)(ids, [jnp.zeros(POOL)], metadata())[0])

    assert np.abs(hidden(-1e9) - hidden(3.0)).max() > 1e-2
    assert np.abs(hidden(-1e9) - hidden(-1e8)).max() < 1e-6


def test_what_cannot_be_split_refuses() -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("tp",))
    with pytest.raises(ModelConfigError, match=r"num_kv_heads \(2\) cannot be split over 4 devices"):
        abstract_params(CONFIG, jnp.float32, mesh=mesh)


def test_pieces_of_a_fused_weight() -> None:
    apart = WeightMapping("w", ("q", "k"), ((8, 3), (4, 3)), parts=(8, 4))
    assert list(apart.pieces(1)) == [(0, 0, 8, 0), (1, 0, 4, 8)]
    assert list(apart.pieces(2)) == [(0, 0, 4, 0), (1, 0, 2, 4), (0, 4, 8, 6), (1, 2, 4, 10)]
    fused = WeightMapping("w", ("qk",), ((12, 3),), parts=(8, 4))
    assert list(fused.pieces(2)) == [(0, 0, 4, 0), (0, 8, 10, 4), (0, 4, 8, 6), (0, 10, 12, 10)]
    whole = WeightMapping("w", ("o",), ((5, 3),))
    assert list(whole.pieces(2)) == [(0, 0, 5, 0)]
    with pytest.raises(ModelConfigError, match="cannot be split into 3 shards"):
        list(apart.pieces(3))


@pytest.mark.parametrize("sizes", [(18, 16), (16, 18)], ids=["expert", "shared"])
def test_experts_that_cannot_be_split_refuse(sizes: tuple[int, int]) -> None:
    spec = MoESpec(num_experts=4, experts_per_token=2, intermediate_size=sizes[0], shared_intermediate_size=sizes[1])
    config = dataclasses.replace(CONFIG, vocab_size=92, num_kv_heads=4, layers=(LayerSpec(ROPE, moe=spec),))
    with pytest.raises(ModelConfigError, match="18 cannot be split over 4 devices"):
        abstract_params(config, jnp.float32, mesh=jax.sharding.AbstractMesh((4,), ("tp",)))


def test_a_wrong_number_of_pools_refuses() -> None:
    graphdef, _ = abstract_params(CONFIG, jnp.float32)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_params(CONFIG, jnp.float32)[1])
    with pytest.raises(ValueError, match="1 KV arrays for 6 layers"):
        merge(graphdef, params)(jnp.zeros(TOKENS, jnp.int32), [jnp.zeros(POOL)], metadata())


def test_tensor_parallel_equals_one_device() -> None:
    """On two CPU devices, in a process of its own because the number of devices is fixed at start."""
    code = textwrap.dedent(
        """
        import dataclasses, re, sys
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        jax.config.update("jax_num_cpu_devices", 2)
        sys.path.insert(0, sys.argv[1])
        from test_decoder import CONFIG, POOL, TOKENS, metadata
        from octavo.models.architectures.llama import ARCHITECTURE
        from octavo.models.decoder import abstract_params, merge, param_partition_specs

        config = dataclasses.replace(CONFIG, qkv_bias=True, attention_sinks=True, tie_embeddings=False)
        names = {**ARCHITECTURE.names, "sinks": ("sinks",)}
        mappings = dataclasses.replace(ARCHITECTURE, names=names).weight_mappings(config)
        rng = np.random.default_rng(0)
        sources = {
            name: (rng.standard_normal(shape) * 0.3).astype(np.float32)
            for mapping in mappings for name, shape in zip(mapping.sources, mapping.shapes)
        }

        def load(tree, num_shards):
            made = {}
            for mapping in mappings:
                made[mapping.target] = target = np.zeros(mapping.shape, np.float32)
                for index, start, stop, place in mapping.pieces(num_shards):
                    target[place : place + stop - start] = sources[mapping.sources[index]][start:stop]
            dotted = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
            return jax.tree.map_with_path(lambda path, _: made[dotted(path)], tree)

        def compiled(mesh, arguments):
            graphdef, _ = abstract_params(config, jnp.float32, mesh=mesh)
            def step(params, kv, ids, batch):
                decoder = merge(graphdef, params)
                hidden, kv = decoder(ids, kv, batch)
                return decoder.compute_logits(hidden), kv
            return jax.jit(step).lower(*arguments).compile()

        kv, ids = [np.zeros(POOL, np.float32)] * config.num_layers, np.arange(TOKENS, dtype=np.int32)
        _, tree = abstract_params(config, jnp.float32)
        one = (load(tree, 1), kv, ids, metadata())
        expected = np.asarray(compiled(None, one)(*one)[0])

        mesh = Mesh(np.array(jax.devices()), ("tp",))
        put = lambda value, spec: jax.device_put(value, NamedSharding(mesh, spec))
        def run(num_shards):
            params = jax.tree.map(put, load(tree, num_shards), param_partition_specs(config))
            two = (params, [put(layer, P(None, None, "tp")) for layer in kv], put(ids, P()), put(metadata(), P()))
            step = compiled(mesh, two)
            logits, written = step(*two)
            assert written[0].sharding.spec == P(None, None, "tp"), written[0].sharding
            error = np.linalg.norm(np.asarray(logits) - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
            return error.max(), step.as_text()

        error, text = run(2)
        assert error < 1e-4, error
        assert run(1)[0] > 1e-2  # rows in the order of one device
        found = re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?[(]", text)
        assert found == ["all-reduce"] * (1 + 2 * config.num_layers), found
        """
    )
    folder = __file__.rpartition("/")[0]
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
