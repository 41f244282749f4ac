"""Offline throughput of the core: 256 requests at the shape of Qwen3-0.6B, prompt and output each 100 to 1,024 tokens.

The workload that nano-vllm made known: lengths uniform, ids random, end of sequence ignored. The requests go to the
scheduler at once, and the loop of the engine's core runs until the last one ends: no tokenizer, no server. Programs
are compiled before, and a few short requests are run first, uncounted.
"""

import random
import time

from octavo.engine.compile_cache import COMPILES
from octavo.engine.core import EngineCore
from octavo.engine.messages import EngineRequest
from octavo.engine.sampling_params import SamplingParams

from .dummy_engine import Sizes, build
from .parts import Options, Report

MODEL = "qwen3-0.6b"
NUM_REQUESTS = 256
LENGTHS = (100, 1024)
SMOKE_REQUESTS, SMOKE_LENGTHS = 5, (3, 9)
SIZES = Sizes(
    max_num_seqs=256,
    max_num_batched_tokens=4096,
    max_model_len=2048,
    num_blocks=1 + 256 * 128,
    decode_sizes=(32, 64, 128, 192, 256),
    mixed_sizes=(512, 4096),
)
"""Every request fits, so that none is preempted. Fewer shapes than the engine itself compiles: padding costs it a
little, compiling a great many would take the minutes that this check has."""
SMOKE_SIZES = Sizes(
    max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, num_blocks=17, decode_sizes=(4,), mixed_sizes=(16,)
)
WARM_UP_REQUESTS = 16


def run(report: Report, options: Options) -> None:
    """Two figures: how long compiling took, and the throughput."""
    smoke = options.smoke
    with report.guard("256 requests", implementation=options.attention_backend):
        began = time.perf_counter()
        engine = build(MODEL, SMOKE_SIZES if smoke else SIZES, options.attention_backend, smoke=smoke)
        engine.compile()
        report.add("start", implementation=engine.choice.implementation, seconds=time.perf_counter() - began)
        low, high = SMOKE_LENGTHS if smoke else LENGTHS
        vocab_size = engine.config.vocab_size
        warm_up = workload(2 if smoke else WARM_UP_REQUESTS, (low, low), vocab_size, seed=1, name="warm-up")
        drive(engine.core, warm_up)
        COMPILES.mark_ready()
        requests = workload(SMOKE_REQUESTS if smoke else NUM_REQUESTS, (low, high), vocab_size, seed=0, name="r")
        core = engine.core
        seconds, steps = drive(core, requests)
        expected = sum(request.sampling_params.max_tokens or 0 for request in requests)
        stats = core.stats()
        if stats.generation_tokens_total != expected:
            raise RuntimeError(f"{stats.generation_tokens_total} tokens were made, {expected} were asked for")
        report.add(
            f"{len(requests)} requests",
            implementation=engine.choice.implementation,
            input_tokens=sum(len(request.prompt_token_ids) for request in requests),
            output_tokens=expected,
            seconds=seconds,
            steps=steps,
            preemptions=stats.num_preemptions_total,
            compiles_while_running=stats.compiles_after_ready_total,
            output_tokens_per_s=expected / seconds,
        )


def workload(count: int, lengths: tuple[int, int], vocab_size: int, *, seed: int, name: str) -> list[EngineRequest]:
    """Greedy requests whose prompt and output lengths are uniform in ``lengths``, both ends included."""
    rng = random.Random(seed)
    return [
        EngineRequest(
            request_id=f"{name}-{index}",
            prompt_token_ids=[rng.randrange(vocab_size) for _ in range(rng.randint(*lengths))],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=rng.randint(*lengths), ignore_eos=True),
            arrival_time_s=time.monotonic(),
        )
        for index in range(count)
    ]


def drive(core: EngineCore, requests: list[EngineRequest]) -> tuple[float, int]:
    """Runs the requests to their ends; seconds and turns of the loop. Raises RuntimeError if one fails."""
    began, steps = time.perf_counter(), 0
    for request in requests:
        core.handle(request)
    while core.has_work:
        for output in core.step().outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
        steps += 1
    return time.perf_counter() - began, steps
