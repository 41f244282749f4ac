"""OpenVINO GenAI's continuous batching on a GGUF, computing in float32.

Needs ``openvino-genai`` (see ``peers.py --setup openvino``). The model is a GGUF file: the float16 one that
``export_default_model.py --gguf-f16`` writes, so that its weights are those of the other engines, rounded to float16.
"""

import numpy as np
import openvino
import openvino_genai
from protocol import Measured, WorkItem, adapter_arguments, claim_stdout, now, serve

CACHE_GIB = 3
MAX_BATCHED_TOKENS = 512


def main() -> None:
    stream = claim_stdout()
    args = adapter_arguments()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
    scheduler.enable_prefix_caching = True
    # Without the hint it computes in bfloat16 where the processor can.
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)

    def config(item: WorkItem) -> openvino_genai.GenerationConfig:
        result = openvino_genai.GenerationConfig()
        result.do_sample = False
        result.ignore_eos = True
        result.max_new_tokens = item.max_tokens
        return result

    def run(items: list[WorkItem]) -> Measured:
        inputs = [openvino.Tensor(np.array([item.prompt_ids], dtype=np.int64)) for item in items]
        configs = [config(item) for item in items]
        # generate() reports one time to first token for the whole call, so the steps are driven from here.
        start = now()
        handles = [pipeline.add_request(i, ids, c) for i, (ids, c) in enumerate(zip(inputs, configs, strict=True))]
        first_s: dict[int, float] = {}
        while pipeline.has_non_finished_requests():
            pipeline.step()
            if len(first_s) < len(handles):
                at_s = now() - start
                first_s |= {i: at_s for i, h in enumerate(handles) if i not in first_s and h.can_read()}
        wall_s = now() - start
        output_ids = [[int(i) for i in handle.read_all()[0].generated_ids] for handle in handles]
        return Measured(wall_s, output_ids, [first_s[i] for i in range(len(handles))])

    serve(stream, {"engine": "openvino-genai", "version": openvino_genai.__version__, "precision": "float32"}, run)


if __name__ == "__main__":
    main()
