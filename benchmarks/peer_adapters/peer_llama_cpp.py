"""llama.cpp through llama-cpp-python: one request after the other, which is what its Python API offers.

Needs ``llama-cpp-python``, which compiles for many minutes (see ``peers.py --setup llama_cpp``). The model is a GGUF
file: the float16 one of ``export_default_model.py --gguf-f16``. It keeps the longest common prefix of one request and
the next in its cache by itself.
"""

import llama_cpp
from protocol import Measured, WorkItem, adapter_arguments, claim_stdout, now, serve


def run_one(llm: llama_cpp.Llama, item: WorkItem, start: float) -> tuple[list[int], float]:
    """The output ids, and the seconds from ``start`` to the first of them."""
    output: list[int] = []
    first_s = 0.0
    for token in llm.generate(item.prompt_ids, temp=0.0, repeat_penalty=1.0):
        if not output:
            first_s = now() - start
        output.append(int(token))
        if len(output) == item.max_tokens:
            break
    return output, first_s


def main() -> None:
    stream = claim_stdout()
    args = adapter_arguments()
    llm = llama_cpp.Llama(args.model, n_ctx=args.max_model_len, n_batch=512, verbose=False)

    def run(items: list[WorkItem]) -> Measured:
        start = now()
        answers = [run_one(llm, item, start) for item in items]
        return Measured(now() - start, [ids for ids, _ in answers], [first_s for _, first_s in answers])

    about = {"engine": "llama-cpp-python", "version": llama_cpp.__version__, "precision": "float16 weights and cache"}
    serve(stream, about, run)


if __name__ == "__main__":
    main()
