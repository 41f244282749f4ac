"""Greedy continuations of the embedded SmolLM2-135M-Instruct, computed by transformers, for test_smollm2.py.

Run in an environment of its own with torch and transformers, on a folder that
``benchmarks/export_default_model.py`` wrote:

    python make_smollm2_golden.py FOLDER

It writes ``smollm2.json`` beside itself: the versions, and for each prompt its ids, 64 greedy
tokens, and at each the gap between the two best logits.
"""

import json
import sys
from pathlib import Path

NUM_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8, 13,",
    "Water boils at 100 degrees Celsius because",
    "<|im_start|>user\nWrite a haiku about autumn.<|im_end|>\n<|im_start|>assistant\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics are:\n1.",
]


def main(folder: str) -> None:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        tokens, gaps, past, feed = [], [], None, torch.tensor([ids])
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                out = model(feed, past_key_values=past, use_cache=True)
                best = torch.topk(out.logits[0, -1].float(), 2)
                tokens.append(int(best.indices[0]))
                gaps.append(round(float(best.values[0] - best.values[1]), 5))
                past, feed = out.past_key_values, best.indices[:1][None]
        cases.append({"prompt": prompt, "prompt_ids": ids, "token_ids": tokens, "gaps": gaps})
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    text = json.dumps({"versions": versions, "cases": cases}, indent=1)
    Path(__file__).with_name("smollm2.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
