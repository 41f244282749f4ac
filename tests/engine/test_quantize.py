"""``octavo quantize``: what is written is loaded as the weights that its codes stand for, by each method."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest_paths import CACHE_FOLDER
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file
from tiny_model import PAIRS, add_tokenizer, tiny_model

from octavo import LLM, SamplingParams
from octavo.engine import quantize_layers
from octavo.engine.calibration import LayerRunner, Samples
from octavo.engine.config import ModelOptions
from octavo.engine.errors import ConfigError
from octavo.engine.quantize import Quantized, QuantizeOptions, quantize
from octavo.engine.tokenizer import Tokenizer
from octavo.models.architectures import get_architecture
from octavo.models.config import ModelConfig
from octavo.models.loading.default_model import find_default_model
from octavo.models.loading.loader import load_params, resolve_model
from octavo.models.loading.safetensors_source import SafetensorsSource
from octavo.models.loading.safetensors_writer import SafetensorsWriter
from octavo.models.quantization.activation_aware import Inputs
from octavo.models.quantization.weights import dequantize
from octavo.serving import cli

CASES = json.loads((Path(__file__).parents[1] / "models" / "goldens" / "cases.json").read_text(encoding="utf-8"))
MESH = Mesh(np.array(jax.devices()[:1]), ("tp",))
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
LINEARS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word holds this column of its eight."""
OPTIONS: dict[str, dict[str, Any]] = {
    "awq": {"method": "awq", "group_size": 32},
    "gptq": {"method": "gptq", "group_size": 32},
    "gptq-8-asym": {"method": "gptq", "group_size": 32, "bits": 8, "symmetric": False},
    "gptq-4-asym": {"method": "gptq", "group_size": 32, "symmetric": False},
    "fp8": {"method": "fp8"},
    "fp8-tensor": {"method": "fp8", "per_channel": False},
}


def nibbles(words: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """i32 [rows, words] → [rows, words * 32 / bits], one number at a time."""
    count = 32 // bits
    found = np.zeros((len(words), words.shape[1] * count), np.int64)
    for place in range(found.shape[1]):
        word, nibble = divmod(place, count)
        column = place if order is None else word * count + order[nibble]
        found[:, column] = words[:, word].astype(np.int64) >> (bits * nibble) & ((1 << bits) - 1)
    return found


def reference(tensors: dict[str, np.ndarray], name: str, config: dict[str, Any], wrong: str = "") -> np.ndarray:
    """f32 [out, in], from the description of the format; ``wrong`` makes one mistake."""
    get = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
    method = config["quant_method"]
    if method == "compressed-tensors":
        return get["weight"].astype(np.float32) * get["weight_scale"]
    scales = get["scales"].astype(np.float32).T
    if method == "awq":
        order = None if wrong == "order" else AWQ_NIBBLES
        codes = nibbles(get["qweight"], 4, order).T
        zeros = nibbles(get["qzeros"], 4, order).T
    else:
        codes = nibbles(get["qweight"].T, config["bits"])
        zeros = nibbles(get["qzeros"], config["bits"]).T + (0 if wrong == "zero" else 1)
        assert (get["g_idx"] == np.arange(codes.shape[1]) // config["group_size"]).all()
    wide = np.repeat(np.arange(scales.shape[1]), config["group_size"])
    return (codes - zeros[:, wide]).astype(np.float32) * scales[:, wide]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def stored_tensors(folder: Path) -> dict[str, np.ndarray]:
    """As they are in the files, float8 included."""
    source = SafetensorsSource(folder)
    return {name: source.raw(name) for name in source.tensors}


def load(folder: Path, dtype: Any = jnp.float32) -> Any:
    model = resolve_model(str(folder))
    architecture = get_architecture(model.config.architecture)
    config = architecture.decoder_config(model.config)
    return load_params(model.path, architecture, config, dtype=dtype, mesh=MESH, load_format=model.format)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("plain") / "model", **SIZES))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(np.random.default_rng(3).choice(PAIRS.split(), 4000)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def made(plain: Path, text: Path) -> dict[str, Path]:
    """One folder for each of ``OPTIONS``, and one for each without calibration."""
    folders = {}
    for name, options in OPTIONS.items():
        samples = None if "fp8" in name else Samples(text, count=6, length=24)
        for suffix, chosen in {"": samples, "-nearest": None}.items():
            folders[name + suffix] = plain.parent / (name + suffix)
            quantize(ModelOptions(str(plain)), QuantizeOptions(**options, samples=chosen), folders[name + suffix])
    return folders


@pytest.mark.parametrize("name", [*OPTIONS, *(f"{name}-nearest" for name in OPTIONS if "fp8" not in name)])
def test_it_is_loaded_as_the_weights_that_the_format_says(made: dict[str, Path], name: str) -> None:
    folder = made[name]
    tensors, config = stored_tensors(folder), config_of(folder)
    wrongs = {"awq": "order", "gptq": "zero"}
    for dtype in (jnp.float32, jnp.bfloat16):
        for index, layer in enumerate(load(folder, dtype)["layers"]):
            for part, modules in LINEARS.items():
                block = "attention" if part in ("qkv", "o") else "mlp"
                found = np.asarray(dequantize(layer[block][part]["weight"], jnp.float32))
                names = [f"model.layers.{index}.{module}" for module in modules]
                expected = np.concatenate([reference(tensors, module, config) for module in names])
                np.testing.assert_array_equal(found, expected)
                if wrong := wrongs.get(config["quant_method"]):
                    other = np.concatenate([reference(tensors, module, config, wrong) for module in names])
                    assert (found != other).mean() > 0.5


def greedy(folder: Path, **options: Any) -> tuple[list[int], dict[int, float]]:
    """Eight tokens after a text, and the log-probabilities of the 20 likeliest first ones."""
    llm = LLM(
        str(folder),
        compile_cache_dir=str(CACHE_FOLDER / "quantized"),
        enforce_eager=True,
        block_size=4,
        max_model_len=32,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=12,
        **options,
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=20)
    (output,) = llm.generate(["the rest is"], params, use_tqdm=False)
    first = {token: found.logprob for token, found in output.outputs[0].logprobs[0].items()}
    return list(output.outputs[0].token_ids), first


@pytest.mark.parametrize("method", ["awq", "gptq-4-asym", "fp8"])
def test_the_engine_says_what_the_plain_weights_would(made: dict[str, Path], tmp_path: Path, method: str) -> None:
    folder = made[method]
    tensors, config = stored_tensors(folder), config_of(folder)
    names = [f"model.layers.{layer}.{module}" for layer in range(2) for part in LINEARS.values() for module in part]
    stand_for = {f"{name}.weight": np.ascontiguousarray(reference(tensors, name, config)) for name in names}
    others = {key: value for key, value in tensors.items() if key.rpartition(".")[0] not in names}
    add_tokenizer(tmp_path)
    text = json.loads((folder / "config.json").read_text())
    del text["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(text))
    save_file({**others, **stand_for}, tmp_path / "model.safetensors")
    (tokens, first), (expected_tokens, expected) = greedy(folder), greedy(tmp_path)
    assert tokens == expected_tokens
    shared = first.keys() & expected.keys()
    assert len(shared) > 15
    assert max(abs(first[token] - expected[token]) for token in shared) < 1e-4


def test_what_stays_plain_is_copied_to_the_bit(plain: Path, made: dict[str, Path]) -> None:
    before = load_file(plain / "model.safetensors")
    kept = {name for name in before if "_proj" not in name}
    for name, folder in made.items():
        after = stored_tensors(folder)
        assert kept <= after.keys()
        changed = {key for key in kept if not np.array_equal(after[key], before[key])}
        norms = {key for key in kept if "layers" in key and "norm" in key}
        assert changed == (norms if name == "awq" else set())
        assert json.loads((folder / "config.json").read_text()) == {
            **json.loads((plain / "config.json").read_text()),
            "quantization_config": config_of(folder),
        }
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert (folder / file).read_bytes() == (plain / file).read_bytes()


def test_a_scaled_norm_of_a_bfloat16_model_and_its_columns(plain: Path, text: Path, tmp_path: Path) -> None:
    """What rounding a norm to bfloat16 leaves of a scale is what the columns are multiplied by."""
    tensors = load_file(plain / "model.safetensors")
    shutil.copytree(plain, tmp_path / "narrow")
    narrow = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    save_file(narrow, tmp_path / "narrow" / "model.safetensors")
    options = QuantizeOptions("awq", Samples(text, 6, 24), group_size=32)
    quantize(ModelOptions(str(tmp_path / "narrow")), options, tmp_path / "awq")
    after = stored_tensors(tmp_path / "awq")
    norm = "model.layers.0.input_layernorm.weight"
    assert after[norm].dtype == ml_dtypes.bfloat16
    scales = 1 / after[norm].astype(np.float32)  # the norms are ones
    assert scales.max() / scales.min() > 1.2
    module = "model.layers.0.self_attn.q_proj"
    found = reference(after, module, config_of(tmp_path / "awq")) / scales
    wide = narrow[f"{module}.weight"].astype(np.float32)
    assert np.abs(found - wide).mean() < 0.25 * np.abs(wide).mean()
    assert np.abs(found * scales - wide).mean() > 1.1 * np.abs(found - wide).mean()


# ---- calibration ----------------------------------------------------------------------------


def test_samples_are_spread_over_the_text(plain: Path, text: Path) -> None:
    tokenizer = Tokenizer.load(plain)
    ids = tokenizer.encode(text.read_text(), add_special_tokens=False)
    samples = Samples(text, 5, 32).read(tokenizer)
    assert samples.shape == (5, 32)
    assert (samples[:, 0] == tokenizer.bos_token_id).all()
    assert samples[0, 1:].tolist() == ids[:31]
    assert samples[-1, 1:].tolist() == ids[-31:]
    assert samples[2, 1:].tolist() == ids[(len(ids) - 31) // 2 :][:31]


def test_inputs_of_the_first_layer_are_those_of_its_norm(plain: Path) -> None:
    """Against NumPy: sums over all samples of what the norm, and the whole layer's MLP, are given."""
    model = resolve_model(str(plain))
    architecture = get_architecture(model.config.architecture)
    decoder = architecture.decoder_config(model.config)
    ids = np.random.default_rng(1).integers(3, 290, (3, 20)).astype(np.int32)
    tensors = load_file(plain / "model.safetensors")
    hidden = tensors["model.embed_tokens.weight"][ids]
    params = load(plain)["layers"][0]
    runner, layer = LayerRunner(decoder, 20), decoder.layers[0]
    after, found = runner.outputs(layer, params, hidden), runner.inputs(layer, params, hidden)
    assert after.shape == hidden.shape
    normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-5)
    assert set(found) == set(LINEARS)
    flat = normed.reshape(60, -1)
    np.testing.assert_allclose(found["qkv"].moments, flat.T @ flat / 60, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found["qkv"].magnitudes, np.abs(flat).mean(0), rtol=1e-3)
    one = runner.outputs(layer, params, hidden[1:2])
    np.testing.assert_allclose(one[0], after[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["llama_biases", "gemma2", "qwen3"])
def test_folding_scales_leaves_the_model_as_it_was(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random scales, nothing rounded: the layer computes the same. Not so if the producers stay as they are."""
    model = ModelConfig.from_dict(CASES[case])
    architecture = get_architecture(model.architecture)
    decoder = architecture.decoder_config(model)
    rng = np.random.default_rng(8)
    prefix = architecture.layer_prefix.format(0)
    mappings = [m for m in architecture.weight_mappings(decoder) if m.target.startswith("layers.0.")]
    tensors = {
        name: rng.uniform(0.2, 0.6, shape).astype(np.float32) * rng.choice([-1, 1], shape).astype(np.float32)
        for mapping in mappings
        for name, shape in zip(mapping.sources, mapping.shapes, strict=True)
    }
    hidden = rng.standard_normal((1, 12, decoder.hidden_size)).astype(np.float32)
    runner = LayerRunner(decoder, 12)

    def run(plain: dict[str, np.ndarray]) -> np.ndarray:
        tree: dict[str, Any] = {}
        for mapping in mappings:
            *path, last = mapping.target.split(".")[2:]
            place = functools.reduce(lambda inner, key: inner.setdefault(key, {}), path, tree)
            place[last] = np.concatenate([plain[name] for name in mapping.sources])
        return runner.outputs(decoder.layers[0], tree, hidden)

    def search(weights: Any, inputs: Any, channels: np.ndarray, grid: Any) -> np.ndarray:
        return rng.uniform(0.3, 3.0, channels.max() + 1).astype(np.float32)

    monkeypatch.setattr(quantize_layers, "search_scales", search)
    method = quantize_layers.AwqMethod(32, decoder, architecture)
    linears = quantize_layers.LayerWeights.names(architecture.weight_mappings(decoder), 0)
    weights = {f"{name}.weight" for part in linears.values() for name in part}
    layer = quantize_layers.LayerWeights(
        linears, dict(tensors), {name: value for name, value in tensors.items() if name not in weights}
    )
    given = {part: Inputs(np.eye(256, dtype=np.float32), np.ones(256, np.float32)) for part in linears}
    monkeypatch.setattr(Inputs, "scaled", lambda self, scales: self)
    made = quantize_layers.QuantizedLayer()
    method._fold(layer, given, prefix, made)
    before, after = run(tensors), run(layer.plain)
    moved = np.abs(before - hidden).max()
    assert np.abs(after - before).max() < 1e-4 * moved
    assert made.written.keys() == {
        name for name in layer.stored if not np.array_equal(layer.plain[name], tensors[name])
    }
    wrong = {name: layer.plain[name] if name in weights else value for name, value in tensors.items()}
    assert np.abs(run(wrong) - before).max() > 1e-2 * moved


# ---- what is refused ------------------------------------------------------------------------


def test_calibration_files_that_are_no_use(plain: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("the rest")
    (tmp_path / "latin").write_bytes("the rest is für".encode("latin-1"))
    for file, complaint in {
        tmp_path / "none": "none cannot be read: No such file",
        tmp_path: "cannot be read: Is a directory",
        tmp_path / "latin": "latin is not UTF-8: .* at byte 13",
        tmp_path / "short": r"short is too short: \d tokens, but 6 samples of 24 take 138; give a longer",
    }.items():
        with pytest.raises(ConfigError, match=complaint):
            quantize(
                ModelOptions(str(plain)), QuantizeOptions("gptq", Samples(file, 6, 24), group_size=32), tmp_path / "o"
            )
        assert not list(tmp_path.glob("*partial*"))
    assert not (tmp_path / "o").exists()


def changed(plain: Path, folder: Path, **changes: Any) -> Path:
    """A copy with other tensors or, by a plain value, another config.json."""
    shutil.copytree(plain, folder)
    tensors, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    for name, value in changes.items():
        if isinstance(value, np.ndarray):
            tensors[name] = value
        else:
            config[name] = value
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_models_that_are_refused(plain: Path, text: Path, made: dict[str, Path], tmp_path: Path) -> None:
    nan, down = np.full((64, 96), np.nan, np.float32), "model.layers.1.mlp.down_proj.weight"
    tiny = tiny_model(tmp_path / "odd", intermediate_size=100, num_hidden_layers=1)
    scale = {"model.layers.0.self_attn.v_scale": np.ones(1, np.float32)}
    scale["model.layers.0.self_attn.k_scale"] = scale["model.layers.0.self_attn.v_scale"]
    moe = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    olmo = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    samples, default = Samples(text, 6, 24), find_default_model()
    assert default is not None
    for name, (folder, options, complaint) in {
        "twice": (made["awq"], {"method": "fp8"}, r"quantised already \(awq\)"),
        "gguf": (default, {"method": "fp8"}, "is of format gguf; octavo quantize reads plain safetensors"),
        "groups": (plain, {"method": "awq"}, r"layers\.0\.self_attn\.q_proj: its 64 .* groups of 128; 32 and 64 would"),
        "down": (plain, {"method": "gptq", "group_size": 64}, r"layers\.0\.mlp\.down_proj: its 96 .* 64; 32 would"),
        "words": (
            tiny,
            {"method": "gptq", "group_size": None},
            r"gate_proj: 64 input columns and 100 output rows of 4",
        ),
        "rows": (tiny, {"method": "awq", "group_size": 32}, r"gate_proj: its 100 output rows are not a multiple of 8"),
        "nan": (changed(plain, tmp_path / "nan", **{down: nan}), {"method": "fp8"}, "down_proj.*not finite"),
        "shape": (changed(plain, tmp_path / "shape", **{down: nan[:60]}), {"method": "fp8"}, r"expected \(64, 96\)"),
        "layers": (changed(plain, tmp_path / "more", num_hidden_layers=3), {"method": "fp8"}, "lacks 9 tensors"),
        "moe": (changed(plain, tmp_path / "moe", **moe), {"method": "fp8"}, "does not make quantised mixtures"),
        "olmo": (
            changed(tiny_model(tmp_path / "olmo_plain", num_hidden_layers=1), tmp_path / "olmo", **olmo),
            {"method": "awq", "group_size": 32, "samples": samples},
            "lacks|use gptq or fp8",
        ),
        "scale": (
            changed(plain, tmp_path / "scale", **scale),
            {"method": "awq", "group_size": 32, "samples": samples},
            "scales of an FP8 KV cache",
        ),
    }.items():
        with pytest.raises(ConfigError, match=complaint):
            quantize(ModelOptions(str(folder)), QuantizeOptions(**options), tmp_path / "output")
        assert not (tmp_path / "output").exists(), name


def test_an_output_in_use(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    for output, complaint in ((tmp_path, "is not empty"), (tmp_path / "mine", "is a file")):
        with pytest.raises(ConfigError, match=complaint):
            quantize(ModelOptions(str(plain)), QuantizeOptions("fp8"), output)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# ---- writing --------------------------------------------------------------------------------


def test_several_files_in_and_out(
    plain: Path, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(plain / "model.safetensors")
    shutil.copytree(plain, tmp_path / "in", ignore=shutil.ignore_patterns("*.safetensors"))
    writer = SafetensorsWriter(tmp_path / "in", max_bytes=60_000)
    for name, array in tensors.items():
        writer.add(name, array)
    writer.close()
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 3
    monkeypatch.setattr("octavo.models.loading.safetensors_writer.MAX_FILE_BYTES", 30_000)
    written = quantize(ModelOptions(str(tmp_path / "in")), QuantizeOptions("fp8"), tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == written.bytes_after < written.bytes_before
    found, expected = stored_tensors(tmp_path / "out"), stored_tensors(made["fp8"])
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in found)


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_nothing_is_left_of_what_was_interrupted(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def interrupted(*arguments: Any) -> None:
        assert len(list(tmp_path.iterdir())) == 1
        raise error

    monkeypatch.setattr(SafetensorsWriter, "close", interrupted)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ConfigError):
        quantize(ModelOptions(str(plain)), QuantizeOptions("fp8"), tmp_path / "output")
    assert list(tmp_path.iterdir()) == []


# ---- the command ----------------------------------------------------------------------------


def test_the_command(
    plain: Path, made: dict[str, Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--method", "gptq", "--group-size", "32", "--asymmetric", "--calibration-file", str(text)]
    command = ["quantize", str(plain), str(tmp_path / "out"), *given, "--num-samples", "6", "--sample-length", "24"]
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    before, after = (
        sum(array.nbytes for array in stored_tensors(f).values()) / 2**20 for f in (plain, tmp_path / "out")
    )
    assert out == (
        f"{tmp_path / 'out'}: 14 linear layers of 2 decoder layers quantised (gptq); "
        f"{before:.1f} MiB before, {after:.1f} MiB after\n"
    )
    assert err.splitlines() == ["layer 1 of 2", "layer 2 of 2"]
    found, expected = stored_tensors(tmp_path / "out"), stored_tensors(made["gptq-4-asym"])
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--method", "fp8"], QuantizeOptions("fp8")),
        (["--method", "fp8", "--scales", "tensor"], QuantizeOptions("fp8", per_channel=False)),
        (["--method", "awq", "--round-to-nearest"], QuantizeOptions("awq")),
        (
            ["--method", "gptq", "--damping", "0.1", "--calibration-file", "f", "--num-samples", "3"],
            QuantizeOptions("gptq", Samples(Path("f"), 3), damping=0.1),
        ),
        (["--method", "awq", "--calibration-file", "f"], QuantizeOptions("awq", Samples(Path("f")))),
        (
            ["--method", "gptq", "--bits", "8", "--group-size", "64", "--round-to-nearest"],
            QuantizeOptions("gptq", bits=8, group_size=64),
        ),
    ],
)
def test_options_of_the_command(
    arguments: list[str], options: QuantizeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fake(model: ModelOptions, chosen: QuantizeOptions, output: Path, progress: Any) -> Quantized:
        asked.append((model, chosen, output))
        return Quantized(output, 1, 1, 2**20, 2**19)

    monkeypatch.setattr("octavo.engine.quantize.quantize", fake)
    assert cli.main(["quantize", "m", "o", *arguments]) == 0
    assert asked == [(ModelOptions("m"), options, Path("o"))]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--method"),
        (["--method", "int3"], "int3"),
        (["--method", "awq"], "awq takes either --calibration-file FILE or --round-to-nearest"),
        (["--method", "gptq", "--round-to-nearest", "--calibration-file", "f"], "gptq takes either"),
        (["--method", "fp8", "--round-to-nearest"], "--round-to-nearest is for awq and gptq, not for fp8"),
        (["--method", "fp8", "--num-samples", "3"], "--num-samples goes with --calibration-file"),
        (["--method", "awq", "--round-to-nearest", "--sample-length", "9"], "--sample-length goes with --calibration"),
        (["--method", "gptq", "--round-to-nearest", "--damping", "0.1"], "--damping goes with --calibration-file"),
        (["--method", "awq", "--num-samples", "1.5"], "'1.5' is not a whole number above zero"),
        (["--method", "fp8", "--group-size", "32"], "--group-size is for awq and gptq, not for fp8"),
        (["--method", "awq", "--bits", "4", "--round-to-nearest"], "--bits is for gptq, not for awq"),
        (["--method", "gptq", "--scales", "tensor", "--round-to-nearest"], "--scales is for fp8, not for gptq"),
        (["--method", "gptq", "--group-size", "48", "--round-to-nearest"], "--group-size is 32, 64 or 128, not 48"),
        (["--method", "gptq", "--damping", "0", "--calibration-file", "f"], "--damping is between 0 and 1, not 0.0"),
        (["--method", "awq", "--num-samples", "0", "--round-to-nearest"], "'0' is not a whole number above zero"),
        (["--method", "fp8"], "no such file or folder"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(["quantize", "/nowhere", "output", *arguments])
    assert refused.value.code == 2
    assert complaint in capsys.readouterr().err
