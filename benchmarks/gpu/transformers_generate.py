"""A sample of what ``generate`` of Hugging Face transformers does with the same model shape on the same device.

Not the whole workload, which would take many minutes: 4 of its requests one after the other, 64 tokens each, and 32
of them as one padded batch, 128 tokens each. Random weights in bfloat16, greedy, end of sequence ignored. Compare
tokens a second, and remember that it is a sample.
"""

import random
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.models.presets import PRESETS

from .parts import Options, Report

MODEL = "qwen3-0.6b"
LENGTHS, SMOKE_LENGTHS = (100, 1024), (3, 9)
SINGLE, SINGLE_TOKENS = 4, 64
BATCH, BATCH_TOKENS = 32, 128
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def run(report: Report, options: Options) -> None:
    """Tokens a second, one by one and batched."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _model(device, smoke=options.smoke)
    rng = random.Random(0)
    lengths = SMOKE_LENGTHS if options.smoke else LENGTHS
    prompts = [[rng.randrange(model.config.vocab_size) for _ in range(rng.randint(*lengths))] for _ in range(BATCH)]
    single, batch = (2, 2) if options.smoke else (SINGLE, BATCH)
    single_tokens, batch_tokens = (3, 3) if options.smoke else (SINGLE_TOKENS, BATCH_TOKENS)
    _generate(model, prompts[:1], 4)  # uncounted: loads what is loaded on first use
    for name, groups, num_tokens in (
        (f"generate, {single} one by one", [[prompt] for prompt in prompts[:single]], single_tokens),
        (f"generate, batch of {batch}", [prompts[:batch]], batch_tokens),
    ):
        with report.guard(name, implementation="transformers"):
            seconds = sum(_generate(model, group, num_tokens) for group in groups)
            made = sum(map(len, groups)) * num_tokens
            report.add(
                name,
                implementation="transformers",
                is_sample=True,
                input_tokens=sum(len(prompt) for group in groups for prompt in group),
                output_tokens=made,
                seconds=seconds,
                output_tokens_per_s=made / seconds,
            )


def _model(device: str, *, smoke: bool) -> Any:
    keys = {**PRESETS[MODEL], **(TINY if smoke else {})}
    architecture = keys.pop("architectures")[0]
    config = AutoConfig.for_model(architecture.removesuffix("ForCausalLM").lower(), **keys)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _generate(model: Any, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds for ``num_tokens`` more tokens of each prompt, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    began = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    if out.is_cuda:
        torch.cuda.synchronize()
    if out.shape[1] - longest != num_tokens:
        raise RuntimeError(f"generate made {out.shape[1] - longest} tokens instead of {num_tokens}")
    return time.perf_counter() - began
