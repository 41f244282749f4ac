"""transformers on PyTorch, float32: ``generate`` for one request, continuous batching for more.

Needs ``torch`` and ``transformers`` (see ``peers.py --setup transformers``).
"""

import os
from typing import Any

from protocol import Measured, WorkItem, adapter_arguments, claim_stdout, now, serve

os.environ["HF_HUB_OFFLINE"] = "1"  # read while transformers is imported

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

NUM_PAGES = 160
"""Pages of 256 tokens, 1.9 GB for SmolLM2-135M; the default takes most of the memory."""


class FirstToken(BaseStreamer):
    """Notes when the first new token came; the prompt itself is the first thing a streamer is given."""

    def __init__(self) -> None:
        self.puts = 0
        self.time_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.time_s = now()

    def end(self) -> None:
        pass


def run_one(model: transformers.PreTrainedModel, item: WorkItem) -> Measured:
    """One request through ``generate``."""
    ids = torch.tensor([item.prompt_ids])
    streamer = FirstToken()
    start = now()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=item.max_tokens,
        min_new_tokens=item.max_tokens,
        streamer=streamer,
    )
    wall_s = now() - start
    return Measured(wall_s, [output[0, ids.shape[1] :].tolist()], [streamer.time_s - start])


def run_many(model: transformers.PreTrainedModel, items: list[WorkItem]) -> Measured:
    """All requests through continuous batching, each with its own length."""
    manager = model.init_continuous_batching(
        generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=NUM_PAGES, max_batch_tokens=512),
    )
    done: dict[str, Any] = {}
    start = now()
    manager.start()
    try:
        for index, item in enumerate(items):
            manager.add_request(
                item.prompt_ids, request_id=str(index), max_new_tokens=item.max_tokens, record_timestamps=True
            )
        while len(done) < len(items):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = result
            elif result is None and not manager.is_running():
                raise RuntimeError("the continuous batching thread died")
        wall_s = now() - start
    finally:
        manager.stop(block=True)
    results = [done[str(index)] for index in range(len(items))]
    # Its timestamps are of perf_counter, which is the monotonic clock on Linux.
    return Measured(wall_s, [list(r.generated_tokens) for r in results], [r.timestamps[0] - start for r in results])


def main() -> None:
    stream = claim_stdout()
    args = adapter_arguments()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.eval()

    def run(items: list[WorkItem]) -> Measured:
        with torch.inference_mode():
            return run_one(model, items[0]) if len(items) == 1 else run_many(model, items)

    about = {"engine": "transformers", "version": transformers.__version__, "precision": "float32"}
    serve(stream, about, run)


if __name__ == "__main__":
    main()
