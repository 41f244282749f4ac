"""Logits of small random models, computed by transformers, for tests/models/test_goldens.py.

Run in an environment of its own with torch and transformers: ``python make_goldens.py [CASE ...]``. It writes
one ``CASE.npz`` beside itself: ``logits`` f32 [40, V] of the prompt, and the versions that made them. Weights
and prompts are not stored: both sides draw them from the case's name.
"""

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
CASES: dict[str, dict[str, Any]] = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
PROMPT_TOKENS = 40


def draw(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor ``name`` of a case, f32: norms multiply by about 1, biases and matrices are about 0."""
    rng = np.random.default_rng(zlib.crc32(f"{case}/{name}".encode()))
    values = rng.standard_normal(shape)
    if "norm" not in name and "ln_" not in name:
        return (values * 0.15).astype(np.float32)
    centre = 0.0 if case.startswith("gemma") else 1.0  # Gemma adds the 1 itself
    return (values * 0.2 + centre).astype(np.float32)


def draw_prompt(case: str) -> np.ndarray:
    """i32 [PROMPT_TOKENS]."""
    rng = np.random.default_rng(zlib.crc32(case.encode()))
    vocab_size = CASES[case].get("text_config", CASES[case])["vocab_size"]
    return rng.integers(0, vocab_size, PROMPT_TOKENS, dtype=np.int32)


def _logits(case: str) -> np.ndarray:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {key: value for key, value in CASES[case].items() if key != "model_type"}
    config = AutoConfig.for_model(CASES[case]["model_type"], **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    if type(model).__name__ != CASES[case]["architectures"][0]:
        raise SystemExit(f"{case}: transformers made a {type(model).__name__}")
    with torch.no_grad():
        if any(".experts." in name for name, _ in model.named_parameters()):
            model = _through_a_checkpoint(case, model)
        else:
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(draw(case, name, tuple(parameter.shape))))
        ids = torch.from_numpy(draw_prompt(case)).long()[None]
        return model(ids, use_cache=False).logits[0].float().numpy()


def _through_a_checkpoint(case: str, model: Any) -> Any:
    """The model with drawn weights, which transformers stacks itself from the names that a checkpoint has."""
    from safetensors.numpy import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = Path(folder, "model.safetensors")
        drawn = {name: draw(case, name, tensor.shape) for name, tensor in load_file(file).items()}
        save_file(drawn, file, metadata={"format": "pt"})
        return type(model).from_pretrained(folder, attn_implementation="eager").eval()


def main(cases: list[str]) -> None:
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, numpy {np.__version__}"
    for case in cases or CASES:
        logits = _logits(case)
        np.savez_compressed(HERE / f"{case}.npz", logits=logits, versions=np.array(versions))
        print(f"{case}: logits {logits.shape}, standard deviation {logits.std():.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
