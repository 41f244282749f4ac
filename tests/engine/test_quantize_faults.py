"""``octavo quantize`` and the world: architectures of every kind, full disks, outputs of odd kinds, damaged models."""

import json
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError
from tiny_model import tiny_model

from octavo.engine.config import ModelOptions
from octavo.engine.convert import convert
from octavo.engine.errors import ConfigError
from octavo.engine.quantize import QuantizeOptions, quantize
from octavo.engine.quantize_layers import LayerWeights
from octavo.models.architectures import get_architecture
from octavo.models.config import ModelConfig
from octavo.models.loading import safetensors_writer

CASES = json.loads((Path(__file__).parents[1] / "models" / "goldens" / "cases.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("plain") / "model", num_hidden_layers=1)


def test_linear_layers_are_the_matrices_of_every_architecture() -> None:
    seen = set()
    for case in CASES.values():
        config = ModelConfig.from_dict(case["config"] if "config" in case else case)
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
    assert "Starcoder2ForCausalLM" in seen and len(seen) > 8


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
