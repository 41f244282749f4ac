"""A whole decode step, sampling included, as the engine dispatches it, beside its floor.

The model has a preset's shape and random weights, and each row 1,024 tokens of random keys and values. The same step
is dispatched again and again without waiting, its inputs packed by the host each time, as in steady decoding; the
clock stops when the last one's tokens are read. The floor is what the bytes and products of the step take at the
measured ceilings.
"""

import sys
import time

from octavo.engine.block_pool import Block
from octavo.engine.messages import EngineRequest
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler_output import ScheduledRow, SchedulerOutput

from .dummy_engine import DummyEngine, Sizes, build
from .parts import Options, Report
from .timing import time_chain

ROWS = (1, 64, 256)
CONTEXT = 1024
SMOKE_ROWS, SMOKE_CONTEXT = (2,), 20
BLOCK_SIZE = 16


def run(report: Report, options: Options) -> None:
    """``options.arguments``: the preset. Where the chosen attention fails, plain JAX is tried too."""
    (name,) = options.arguments
    backend = options.attention_backend
    for attempt in (backend, "xla"):
        failures = sum("error" in figure for figure in report.figures)
        choice = _run(report, name, attempt, smoke=options.smoke)
        if choice == "xla" or sum("error" in figure for figure in report.figures) == failures:
            return


def _run(report: Report, name: str, backend: str, *, smoke: bool) -> str:
    row_counts, context = (SMOKE_ROWS, SMOKE_CONTEXT) if smoke else (ROWS, CONTEXT)
    blocks_per_row = -(-context // BLOCK_SIZE)
    most = max(row_counts)
    engine: DummyEngine | None = None
    with report.guard(f"{name} start", implementation=backend):
        sizes = Sizes(
            max_num_seqs=most,
            max_num_batched_tokens=most,
            max_model_len=blocks_per_row * BLOCK_SIZE,
            num_blocks=1 + most * blocks_per_row,
            decode_sizes=row_counts,
            mixed_sizes=(most,),
        )
        began = time.perf_counter()
        engine = build(name, sizes, backend, smoke=smoke)
        engine.randomise_kv()
        print(f"{name}: built in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    if engine is None:
        return backend
    for num_rows in sorted(row_counts, key=lambda rows: (rows != 64, rows)):  # the aim is at 64
        with report.guard(f"{name} {num_rows} rows", implementation=engine.choice.implementation):
            _measure(report, engine, name, num_rows, context, smoke=smoke)
    return engine.choice.implementation


def _measure(report: Report, engine: DummyEngine, name: str, num_rows: int, context: int, *, smoke: bool) -> None:
    runner = engine.runner
    began = time.perf_counter()
    runner.programs.step(runner.buckets.select(num_rows, num_rows, decode_only=True))
    compile_s = time.perf_counter() - began
    handle = runner.dispatch(decode_plan(num_rows, context, admitted=True))
    plan = decode_plan(num_rows, context, admitted=False)
    timing = time_chain(lambda _: runner.dispatch(plan), handle, runner.resolve, smoke=smoke, target_s=0.3, repeats=5)
    work = engine.work()
    report.add(
        f"{name} {num_rows} rows",
        implementation=engine.choice.implementation,
        rows=num_rows,
        context=context,
        bytes=work.decode_bytes(num_rows, context),
        flops=work.decode_flops(num_rows, context),
        compile_s=compile_s,
        tokens_per_s=num_rows / timing.median_s,
        **timing.microseconds(),
    )


def decode_plan(num_rows: int, context: int, *, admitted: bool) -> SchedulerOutput:
    """One token for each of ``num_rows`` greedy rows of ``context`` tokens, each over blocks of its own."""
    blocks_per_row = -(-context // BLOCK_SIZE)
    rows = []
    for row in range(num_rows):
        source = EngineRequest(
            request_id=str(row),
            prompt_token_ids=[1 + row % 7] * context,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
            arrival_time_s=0.0,
        )
        request = Request(source, 0, row)
        request.row = row
        ids = range(1 + row * blocks_per_row, 1 + (row + 1) * blocks_per_row)
        request.blocks = [Block(block_id) for block_id in ids]
        request.num_computed_tokens = context - 1
        new_block_ids = list(ids) if admitted else []
        rows.append(ScheduledRow(request, context - 1, 1, admitted, new_block_ids, samples=True))
    return SchedulerOutput(rows=rows, num_tokens=num_rows)
