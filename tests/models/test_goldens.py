"""The decoder against transformers: prefill, chunked prefill and decode through the paged pool, in float32.

Each case's logits were made by ``goldens/make_goldens.py``; weights are drawn again here from the same seed.
Every case has mutations, one changed number or tensor each, that must be told apart.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models.architectures import get_architecture
from octavo.models.attention_metadata import AttentionMetadata
from octavo.models.config import ModelConfig
from octavo.models.decoder import abstract_params, merge
from octavo.models.decoder_config import DecoderConfig, LayerSpec
from octavo.models.kv_cache import KVCacheSpec

GOLDENS = Path(__file__).resolve().parent / "goldens"
_spec = importlib.util.spec_from_file_location("octavo_make_goldens", GOLDENS / "make_goldens.py")
assert _spec is not None
assert _spec.loader is not None
goldens = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(goldens)

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS, ROWS, TOKENS = 4, 24, 12, 3, 64
TOLERANCE, TOLD_APART = 1e-4, 1e-2
ROW_A, ROW_B = 0, 2  # row 1 is padding in every step
LENGTH_B = 23
Params = dict[str, Any]


def decoder_config(case: str) -> DecoderConfig:
    config = ModelConfig.from_dict(goldens.CASES[case])
    return get_architecture(config.architecture).decoder_config(config)


def draw_params(case: str, config: DecoderConfig) -> Params:
    """The case's weights, put where the architecture's mappings say."""
    _, tree = abstract_params(config, jnp.float32)
    architecture = get_architecture(goldens.CASES[case]["architectures"][0])
    drawn = {}
    for mapping in architecture.weight_mappings(config):
        pairs = zip(mapping.sources, mapping.stored_shapes, strict=True)
        stored = [goldens.draw(case, name, shape) for name, shape in pairs]
        rows = np.concatenate([tensor.T if mapping.transposed else tensor for tensor in stored])
        drawn[mapping.target] = rows.reshape(mapping.shape)

    def fill(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        value = drawn.pop(jax.tree_util.keystr(path, simple=True, separator="."))
        assert value.shape == leaf.shape
        return value

    params = jax.tree.map_with_path(fill, tree)
    assert not drawn
    return params


@dataclass
class Runner:
    """Two sequences in permuted blocks of one pool; every step has the same two shapes.

    The decoder's inner jit compiles each kind of layer once for all cases that share it; ``whole`` compiles the
    step as one program, as the engine does.
    """

    config: DecoderConfig
    params: Params
    whole: bool = False

    def __post_init__(self) -> None:
        shape = KVCacheSpec(
            self.config.num_layers, NUM_BLOCKS, self.config.num_kv_heads, BLOCK_SIZE, self.config.head_dim, jnp.float32
        ).layer_shape
        self.kv = [jnp.full(shape, jnp.nan)] * self.config.num_layers
        blocks = np.random.default_rng(7).permutation(np.arange(1, NUM_BLOCKS))
        self.tables = np.zeros((ROWS, MAX_BLOCKS), np.int32)
        self.tables[ROW_A, :10], self.tables[ROW_B, :10] = blocks[:10], blocks[10:20]
        self.lengths = np.zeros(ROWS, np.int32)
        graphdef, _ = abstract_params(self.config, jnp.float32)

        def step(params: Params, kv: list[jax.Array], ids: jax.Array, metadata: AttentionMetadata) -> Any:
            decoder = merge(graphdef, params)
            hidden, kv = decoder(ids, kv, metadata)
            return decoder.compute_logits(hidden), kv

        self._step = jax.jit(step) if self.whole else step

    def run(self, pieces: dict[int, np.ndarray], *, decode_only: bool = False) -> dict[int, np.ndarray]:
        """Feeds each row its next ids; returns each row's logits [len(ids), V]."""
        total = ROWS if decode_only else TOKENS
        ids, positions = np.zeros(total, np.int32), np.zeros(total, np.int32)
        slots = np.full(total, NUM_BLOCKS * BLOCK_SIZE, np.int32)
        starts, places, offset = np.zeros(ROWS + 1, np.int32), {}, 0
        for row in range(ROWS):
            new = pieces.get(row, np.zeros(0, np.int32))
            where = np.arange(len(new)) + (row if decode_only else offset)
            place = np.arange(len(new), dtype=np.int32) + self.lengths[row]
            ids[where], positions[where] = new, place
            slots[where] = self.tables[row, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            self.lengths[row] += len(new)
            offset += len(new)
            starts[row + 1], places[row] = offset, where
        arrays = (jnp.array(array) for array in (positions, slots, self.tables, starts, self.lengths))
        metadata = AttentionMetadata(*arrays, decode_only)
        logits, self.kv = self._step(self.params, self.kv, jnp.asarray(ids), metadata)
        return {row: np.asarray(logits)[places[row]] for row in pieces}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The worst row's L2 error over its L2 norm. A row that is not finite counts as infinite."""
    errors = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(np.max(np.where(np.isfinite(errors), errors, np.inf)))


@cache
def expected_logits(case: str) -> np.ndarray:
    with np.load(GOLDENS / f"{case}.npz") as stored:
        return stored["logits"]


@pytest.mark.parametrize("case", goldens.CASES)
def test_prefill_and_decode(case: str) -> None:
    config = decoder_config(case)
    params, prompt, expected = draw_params(case, config), goldens.draw_prompt(case), expected_logits(case)
    runner = Runner(config, params, whole=case in ("llama", "gemma2"))

    whole = runner.run({ROW_A: prompt, ROW_B: prompt[:LENGTH_B]})
    assert relative_error(whole[ROW_A], expected) < TOLERANCE
    assert relative_error(whole[ROW_B], expected[:LENGTH_B]) < TOLERANCE

    # Row B takes the first row's blocks for its first tokens, as a hit of the prefix cache does.
    own, shared = runner.tables[ROW_B].copy(), 4
    runner.tables[ROW_B, :shared], runner.lengths[ROW_B] = runner.tables[ROW_A, :shared], shared * BLOCK_SIZE
    found = runner.run({ROW_B: prompt[shared * BLOCK_SIZE : LENGTH_B]})
    assert relative_error(found[ROW_B], expected[shared * BLOCK_SIZE : LENGTH_B]) < TOLERANCE
    runner.tables[ROW_B] = own

    runner.lengths[:] = 0
    runner.kv = [jnp.full_like(kv, jnp.nan) for kv in runner.kv]
    for end_a, end_b in ((11, 6), (12, 15), (27, 15)):
        piece = {ROW_A: prompt[runner.lengths[ROW_A] : end_a], ROW_B: prompt[runner.lengths[ROW_B] : end_b]}
        found = runner.run(piece)
        assert relative_error(found[ROW_A], expected[end_a - len(piece[ROW_A]) : end_a]) < TOLERANCE
    for step in range(13):
        at_a, at_b = 27 + step, 15 + step
        found = runner.run({ROW_A: prompt[at_a : at_a + 1], ROW_B: prompt[at_b : at_b + 1]}, decode_only=True)
        assert relative_error(found[ROW_A], expected[at_a : at_a + 1]) < TOLERANCE
        assert relative_error(found[ROW_B], expected[at_b : at_b + 1]) < TOLERANCE


# Mutations: each returns a config and parameters that are wrong in one place.


def _ropes(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    def changed(layer: LayerSpec) -> LayerSpec:
        if layer.rope is None:
            return layer
        return dataclasses.replace(layer, rope=dataclasses.replace(layer.rope, **changes))

    return dataclasses.replace(config, layers=tuple(changed(layer) for layer in config.layers))


def _theta(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    assert config.layers[0].rope is not None
    return _ropes(config, theta=config.layers[0].rope.theta * 1.5), params


def _rope(config: DecoderConfig, params: Params, **changes: Any) -> tuple[DecoderConfig, Params]:
    return _ropes(config, **changes), params


def _first_rope(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """The first layer's rope in all of them."""
    layers = tuple(dataclasses.replace(layer, rope=config.layers[0].rope) for layer in config.layers)
    return dataclasses.replace(config, layers=layers), params


def _windows(config: DecoderConfig, params: Params, by: int | None) -> tuple[DecoderConfig, Params]:
    """Every window off, or longer by ``by``."""
    layers = tuple(
        layer if layer.window is None else dataclasses.replace(layer, window=None if by is None else layer.window + by)
        for layer in config.layers
    )
    return dataclasses.replace(config, layers=layers), params


def _switch(config: DecoderConfig, params: Params, **changes: Any) -> tuple[DecoderConfig, Params]:
    return dataclasses.replace(config, **changes), params


def _edit(
    config: DecoderConfig, params: Params, path: str, edit: Callable[[np.ndarray], np.ndarray]
) -> tuple[DecoderConfig, Params]:
    """Changes one tensor of layer 1."""
    *parents, last = path.split(".")
    layers = list(params["layers"])
    layers[1] = node = dict(layers[1])
    for name in parents:
        node[name] = dict(node[name])
        node = node[name]
    node[last] = edit(node[last])
    return config, {**params, "layers": layers}


def _swap_halves(weight: np.ndarray) -> np.ndarray:
    return np.concatenate(np.split(weight, 2)[::-1])


_swap_gate_up = partial(_edit, path="mlp.gate_up.weight", edit=_swap_halves)
_no_bias = partial(_edit, path="attention.qkv.bias", edit=np.zeros_like)


def _experts(config: DecoderConfig, params: Params, **changes: Any) -> tuple[DecoderConfig, Params]:
    """Another number in every mixture."""
    layers = tuple(
        layer if layer.moe is None else dataclasses.replace(layer, moe=dataclasses.replace(layer.moe, **changes))
        for layer in config.layers
    )
    return dataclasses.replace(config, layers=layers), params


def _no_positions(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """The table of positions, moved by one."""
    return config, {**params, "positions": {"weight": np.roll(params["positions"]["weight"], 1, axis=0)}}


def _layer(index: int, mutation: Callable[..., Any], config: DecoderConfig, params: Params) -> Any:
    """A mutation of layer 1, of another layer."""
    layers = list(params["layers"])
    layers[1], layers[index] = layers[index], layers[1]
    _, changed = mutation(config, {**params, "layers": layers})
    layers = list(changed["layers"])
    layers[1], layers[index] = layers[index], layers[1]
    return config, {**changed, "layers": layers}


_swap_experts = partial(_edit, path="mlp.experts.down.weight", edit=lambda w: np.roll(w, 1, axis=0))
MUTATIONS: dict[str, dict[str, Callable[[DecoderConfig, Params], tuple[DecoderConfig, Params]]]] = {
    "llama": {
        "theta": _theta,
        "gate_up": _swap_gate_up,
        "one_row_of_qkv": partial(
            _edit, path="attention.qkv.weight", edit=lambda w: np.concatenate([w[:-16], np.roll(w[-16:], 1, 0)])
        ),
        "norm": partial(_edit, path="attention_norm.weight", edit=np.ones_like),
    },
    "llama_biases": {
        "qkv_bias": _no_bias,
        "o_bias": partial(_edit, path="attention.o.bias", edit=np.zeros_like),
        "gate_up_bias": partial(_edit, path="mlp.gate_up.bias", edit=np.zeros_like),
        "down_bias": partial(_edit, path="mlp.down.bias", edit=np.zeros_like),
    },
    "llama_rope_llama3": {
        "kind": partial(_rope, kind="default"),
        "low_freq_factor": partial(_rope, low_freq_factor=2.0),
    },
    "llama_rope_linear": {"kind": partial(_rope, kind="default")},
    "llama_rope_yarn": {
        "kind": partial(_rope, kind="default"),
        "attention_factor": partial(_rope, attention_factor=1.0),
        "beta_fast": partial(_rope, beta_fast=1.0),
    },
    "llama_rope_yarn_mscale": {
        "truncate": partial(_rope, truncate=True),
        "mscale": partial(_rope, attention_factor=1.0),
    },
    "llama_rope_dynamic": {"kind": partial(_rope, kind="default")},
    "mistral_window": {"off": partial(_windows, by=None), "one_longer": partial(_windows, by=1)},
    "mistral_full": {"gate_up": _swap_gate_up},
    "qwen2": {"qkv_bias": _no_bias},
    "qwen2_window": {"one_longer": partial(_windows, by=1)},
    "qwen3": {
        "q_norm": partial(_edit, path="attention.q_norm.weight", edit=np.ones_like),
        "k_norm": partial(_edit, path="attention.k_norm.weight", edit=np.ones_like),
    },
    "qwen3_window": {"off": partial(_windows, by=None), "qkv_bias": _no_bias},
    "gemma2": {
        "attention_softcap": partial(_switch, attention_softcap=None),
        "final_softcap": partial(_switch, final_softcap=None),
        "norm_plus_one": partial(_switch, norm_plus_one=False),
        "embedding_multiplier": partial(_switch, embedding_multiplier=1.0),
        "activation": partial(_switch, activation="relu"),
        "post_norm": partial(_edit, path="mlp_post_norm.weight", edit=np.zeros_like),
    },
    "gemma3": {"one_rope": _first_rope},
    "gemma3_nested_rope": {"one_rope": _first_rope, "final_softcap": partial(_switch, final_softcap=None)},
    "olmo2": {
        "q_norm": partial(_edit, path="attention.q_norm.weight", edit=np.ones_like),
        "post_norm": partial(_edit, path="attention_post_norm.weight", edit=np.ones_like),
    },
    "granite": {
        "embedding": partial(_switch, embedding_multiplier=1.0),
        "residual": partial(_switch, residual_multiplier=1.0),
        "logits": partial(_switch, logits_multiplier=1.0),
        "scale": partial(_switch, attention_scale=None),
    },
    "phi3": {"rotary_dim": partial(_rope, rotary_dim=16), "off": partial(_windows, by=None)},
    "smollm3": {"rope_everywhere": _first_rope},
    "olmo3": {"one_rope": _first_rope, "one_longer": partial(_windows, by=1)},
    "starcoder2": {
        "norm_bias": partial(_edit, path="mlp_norm.bias", edit=np.zeros_like),
        "up_bias": partial(_edit, path="mlp.up.bias", edit=np.zeros_like),
        "one_longer": partial(_windows, by=1),
    },
    "cohere": {
        "interleaved": partial(_rope, interleaved=False),
        "logits": partial(_switch, logits_multiplier=1.0),
        "norm": partial(_edit, path="attention_norm.weight", edit=np.ones_like),
    },
    "cohere2": {
        "rope_everywhere": _first_rope,
        "one_longer": partial(_windows, by=1),
    },
    "gpt2": {
        "positions": _no_positions,
        "norm_bias": partial(_edit, path="attention_norm.bias", edit=np.zeros_like),
        "transposed": partial(_edit, path="attention.o.weight", edit=np.transpose),
    },
    "mixtral": {
        "experts": _swap_experts,
        "gate_up": partial(
            _edit,
            path="mlp.experts.gate_up.weight",
            edit=lambda w: np.concatenate(np.split(w, 2, axis=1)[::-1], axis=1),
        ),
    },
    "qwen2_moe": {
        "normalised": partial(_experts, normalize_weights=True),
        "shared_gate": partial(_layer, 2, partial(_edit, path="mlp.shared_gate.weight", edit=np.zeros_like)),
        "router": partial(_layer, 0, partial(_edit, path="mlp.router.weight", edit=lambda w: np.roll(w, 1, axis=0))),
    },
    "qwen3_moe": {"experts": _swap_experts},
}


def test_every_case_has_mutations() -> None:
    assert MUTATIONS.keys() == goldens.CASES.keys()


@pytest.mark.parametrize(("case", "name"), [(case, name) for case in MUTATIONS for name in MUTATIONS[case]])
def test_mutation_is_told_apart(case: str, name: str) -> None:
    config = decoder_config(case)
    prompt = goldens.draw_prompt(case)
    wrong = Runner(*MUTATIONS[case][name](config, draw_params(case, config)))
    found = wrong.run({ROW_A: prompt, ROW_B: prompt[:LENGTH_B]})
    assert relative_error(found[ROW_A], expected_logits(case)) > TOLD_APART


def test_a_wrong_block_table_is_told_apart() -> None:
    case = "llama"
    config = decoder_config(case)
    runner = Runner(config, draw_params(case, config))
    prompt = goldens.draw_prompt(case)
    runner.run({ROW_A: prompt[:39], ROW_B: prompt[:LENGTH_B]})
    runner.tables[ROW_A, 0] = runner.tables[ROW_B, 1]
    found = runner.run({ROW_A: prompt[39:], ROW_B: prompt[:1]}, decode_only=True)
    assert relative_error(found[ROW_A], expected_logits(case)[39:]) > TOLD_APART
