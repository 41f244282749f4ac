"""``octavo quantize`` and the world: architectures of every kind, full disks, outputs of odd kinds, damaged models."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tiny_model import tiny_model

from octavo.engine.calibration import Samples
from octavo.engine.config import ModelOptions
from octavo.engine.convert import convert
from octavo.engine.errors import ConfigError
from octavo.engine.quantize import QuantizeOptions, quantize
from octavo.engine.quantize_layers import LayerWeights
from octavo.models.architectures import get_architecture
from octavo.models.config import ModelConfig
from octavo.models.loading import safetensors_writer
from octavo.serving import cli

CASES = json.loads((Path(__file__).parents[1] / "models" / "goldens" / "cases.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("plain") / "model", num_hidden_layers=1)


def test_linear_layers_are_the_matrices_of_every_architecture() -> None:
    seen = set()
    for case in CASES.values():
        config = ModelConfig.from_dict(case)
        architecture = get_architecture(config.architecture)
        decoder = architecture.decoder_config(config)
        if any(layer.moe is not None for layer in decoder.layers):
            continue
        seen.add(architecture.name)
        mappings = architecture.weight_mappings(decoder)
        for layer in range(decoder.num_layers):
            found = [f"{name}.weight" for part in LayerWeights.names(mappings, layer).values() for name in part]
            matrices = [
                name
                for mapping in mappings
                if mapping.target.startswith(f"layers.{layer}.")
                for name, shape in zip(mapping.sources, mapping.shapes, strict=True)
                if len(shape) == 2
            ]
            assert found == matrices, architecture.name
            # What convert and the loader ask a quantisation method about: no part that the decoder does not have.
            prefix = architecture.layer_prefix.format(layer)
            parts = ("qkv", "o", "gate_up", "up", "down")
            named = {f"{prefix}{n}.weight" for part in parts for n in architecture.names.get(part, ())}
            assert named == set(matrices), architecture.name
    assert "Starcoder2ForCausalLM" in seen
    assert len(seen) > 8


def test_a_full_disk_is_a_sentence(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    def orbax_full(*arguments: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Error writing: [OS error 28: No space left on device]")

    monkeypatch.setattr(safetensors_writer, "save_file", full)
    monkeypatch.setattr("octavo.engine.convert.save_params", orbax_full)
    with pytest.raises(ConfigError, match=r"output .*o cannot be written: .*No space left"):
        quantize(ModelOptions(str(plain)), QuantizeOptions("fp8"), tmp_path / "o")
    with pytest.raises(ConfigError, match=r"output .*o cannot be written: no space left"):
        convert(ModelOptions(str(plain)), tmp_path / "o")
    assert list(tmp_path.iterdir()) == []


def test_others_may_read_the_weights_as_they_may_any_file(plain: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        quantize(ModelOptions(str(plain)), QuantizeOptions("fp8"), tmp_path / "o")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "o").iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), 0o640)


# ---- where the output goes -------------------------------------------------------------------


def test_links_lead_to_where_the_model_is_written(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, target in (("link", "empty"), ("dangling", "new")):
        (tmp_path / name).symlink_to(tmp_path / target)
        quantize(ModelOptions(str(plain)), QuantizeOptions("fp8"), tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / target / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "empty", "link", "new"]


def test_outputs_are_refused_before_any_work(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "mount").mkdir()
    (tmp_path / "locked").mkdir()
    for module in ("quantize", "convert"):
        monkeypatch.setattr(f"octavo.engine.{module}.find_model", lambda options: pytest.fail("work was begun"))
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path).name == "mount")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "locked")
    for output, complaint in {
        "new/..": "is not empty",
        "mount": "is a mount point",
        "file/below": "file is a file|Not a directory",
        "locked/new/deep": "locked is not writable",
        "x" * 300: "too long",
        "nul\0": "null",
    }.items():
        with pytest.raises(ConfigError, match=complaint):
            quantize(ModelOptions(str(plain)), QuantizeOptions("fp8"), tmp_path / output)
        with pytest.raises(ConfigError, match=complaint):
            convert(ModelOptions(str(plain)), tmp_path / output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "locked", "mount"]


@pytest.mark.parametrize("command", [["quantize", "--method", "fp8"], ["convert"]])
def test_a_terminated_command_leaves_nothing(
    command: list[str], plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminated(source: Path, folder: Path) -> None:
        assert len(list(tmp_path.iterdir())) == 1
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    for module in ("quantize", "convert"):
        monkeypatch.setattr(f"octavo.engine.{module}.copy_texts", terminated)
    output = [str(tmp_path / "o")] if command[0] == "quantize" else ["--output", str(tmp_path / "o")]
    with pytest.raises(SystemExit) as ended:
        cli.main([command[0], str(plain), *output, *command[1:]])
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_named_and_kept(plain: Path, tmp_path: Path) -> None:
    (tmp_path / ".o.partial-12345678").mkdir()
    said: list[str] = []
    quantize(ModelOptions(str(plain)), QuantizeOptions("fp8"), tmp_path / "o", said.append)
    assert said[0].startswith("left over")
    assert ".o.partial-12345678" in said[0]
    assert (tmp_path / ".o.partial-12345678").is_dir()


# ---- damaged models --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize(
    ("token", "size", "complaint"),
    [(10**6, 1.0, r"token 1000000 of the text, but .*embed_tokens has \d+ rows"), (5, 1e30, "layer 0.*not finite")],
)
def test_calibration_that_cannot_be(
    method: str, token: int, size: float, complaint: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"] *= np.float32(size)
    folder = shutil.copytree(plain, tmp_path / "in")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("octavo.engine.quantize.Tokenizer.load", lambda path: None)
    monkeypatch.setattr(Samples, "read", lambda self, tokenizer: np.full((2, 16), token, np.int32))
    options = QuantizeOptions(method, Samples(Path("text"), 2, 16), group_size=32)
    with pytest.raises(ConfigError, match=complaint):
        quantize(ModelOptions(str(folder)), options, tmp_path / "o")
    assert not (tmp_path / "o").exists()
