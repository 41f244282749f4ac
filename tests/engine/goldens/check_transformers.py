"""Checkpoints that ``octavo quantize`` wrote, in transformers and in Octavo: are the log-probabilities the same?

    python check_transformers.py write FOLDER FILE     where torch, transformers and what it needs for the format are
    python check_transformers.py compare FOLDER FILE   where Octavo is

transformers needs accelerate, and compressed-tensors for FP8, gptqmodel for AWQ, gptqmodel and optimum for GPTQ. Both
sides run on the CPU in float32. What was found is in docs/quantization.md.
"""

import argparse
import importlib
import json
from pathlib import Path

TEXT = (
    "A folio is a sheet of paper that is folded once, so that it makes two leaves, or four pages. Folded a second time "
    "it is a quarto, and a third time an octavo, which has eight leaves. Printers in Venice made the octavo popular "
    "around 1501, since a book of that size could be carried in a pocket and read anywhere."
)
KEPT = 20
"""Likeliest tokens at each position."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("folder")
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    (write if args.what == "write" else compare)(args.folder, args.file)


def write(folder: str, file: Path) -> None:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    print("a linear layer is", type(model.model.layers[0].mlp.down_proj))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    values, tokens = logprobs.topk(KEPT)
    file.write_text(json.dumps({"ids": ids, "tokens": tokens.tolist(), "logprobs": values.tolist()}))


def compare(folder: str, file: Path) -> None:
    octavo = importlib.import_module("octavo")
    theirs = json.loads(file.read_text())
    llm = octavo.LLM(
        folder, dtype="float32", max_model_len=256, max_num_seqs=1, enforce_eager=True, skip_tokenizer_init=True
    )
    asked = octavo.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=KEPT)
    (output,) = llm.generate([theirs["ids"]], asked, use_tqdm=False)
    differences, same = [], 0
    for place, found in enumerate(output.prompt_logprobs[1:]):
        expected = dict(zip(theirs["tokens"][place], theirs["logprobs"][place], strict=True))
        differences += [abs(found[token].logprob - value) for token, value in expected.items() if token in found]
        same += next(token for token, entry in found.items() if entry.rank == 1) == theirs["tokens"][place][0]
    count = len(output.prompt_logprobs) - 1
    print(
        f"{folder}: largest difference of {len(differences)} log-probabilities {max(differences):.2e}, mean "
        f"{sum(differences) / len(differences):.2e}; the same likeliest token at {same} of {count} positions"
    )


if __name__ == "__main__":
    main()
