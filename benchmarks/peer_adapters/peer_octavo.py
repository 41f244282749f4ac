"""Octavo itself, in process, float32: the same protocol as every peer."""

from protocol import Measured, WorkItem, adapter_arguments, claim_stdout, now, serve

import octavo


def main() -> None:
    stream = claim_stdout()
    args = adapter_arguments()
    llm = octavo.LLM(model=args.model, dtype="float32", max_model_len=args.max_model_len, max_num_seqs=64)

    def run(items: list[WorkItem]) -> Measured:
        params = [octavo.SamplingParams(temperature=0.0, max_tokens=i.max_tokens, ignore_eos=True) for i in items]
        prompts = [{"prompt_token_ids": item.prompt_ids} for item in items]
        start = now()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wall_s = now() - start
        output_ids = [list(output.outputs[0].token_ids) for output in outputs]
        return Measured(wall_s, output_ids, [output.metrics.first_token_time_s - start for output in outputs])

    serve(stream, {"engine": "octavo", "version": octavo.__version__, "precision": "float32"}, run)


if __name__ == "__main__":
    main()
