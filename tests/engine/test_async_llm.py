"""The engine beside an event loop: the same results as offline, and nothing is left of a request that ends early."""

import asyncio
import random
import threading
import time
from collections import Counter
from contextlib import aclosing, suppress
from itertools import pairwise

import pytest
import pytest_asyncio
from async_engine import OPTIONS, Running, choices_of, join, make_slow
from tiny_model import add_tokenizer, tiny_model

from octavo import LLM, RequestError, SamplingParams
from octavo.engine.errors import EngineDeadError
from octavo.engine.launch import make_scheduler
from octavo.engine.messages import FinishReason
from octavo.engine.outputs import RequestOutput
from octavo.engine.sampling_params import OutputKind

pytestmark = pytest.mark.asyncio(loop_scope="module")

CUMULATIVE, DELTA, FINAL_ONLY = OutputKind.CUMULATIVE, OutputKind.DELTA, OutputKind.FINAL_ONLY
LONG = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, output_kind=DELTA)
PROMPTS = [[(11 * i + 5 * j) % 290 + 3 for j in range(3 + 5 * i % 13)] for i in range(16)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=4, max_tokens=9, ignore_eos=True, n=3),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, max_tokens=15, presence_penalty=1.0, prompt_logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=5, logit_bias={2: 100.0}, min_tokens=3),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("async") / "model"))


@pytest.fixture(scope="module")
def expected(folder) -> list[RequestOutput]:
    """What the offline engine makes of PROMPTS."""
    llm = LLM(str(folder), **OPTIONS)
    return llm.generate(PROMPTS, [PARAMS[i % 4] for i in range(16)], use_tqdm=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(folder):
    running = Running(folder)
    await running.engine.start()
    yield running
    await running.until_idle()
    running.engine.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def launch(folder):
    started = []  # few of their programs are needed, hence eager

    async def start(**options) -> Running:
        started.append(Running(folder, enforce_eager=True, **options))
        await started[-1].engine.start()
        return started[-1]

    yield start
    for running in started:
        running.engine.shutdown()


@pytest.fixture
def slow(running, monkeypatch):
    """Every step takes 10 ms longer, so that a request lasts about a second."""
    make_slow(running, monkeypatch)


async def test_requests_at_once_give_the_same_as_offline(running, expected):
    jobs = [running.final(PROMPTS[i], PARAMS[i % 4], f"r{i}") for i in range(16)]
    outputs = await asyncio.gather(*jobs)
    assert [choices_of(output) for output in outputs] == [choices_of(output) for output in expected]
    assert [output.request_id for output in outputs] == [f"r{i}" for i in range(16)]
    assert all(output.prompt_token_ids == prompt for output, prompt in zip(outputs, PROMPTS, strict=True))


@pytest.mark.parametrize("place", range(4))
async def test_kinds_of_output_agree(running, expected, place):
    params = PARAMS[place]
    streams = [
        await running.outputs(PROMPTS[place], params.clone(output_kind=kind), kind.name)
        for kind in (DELTA, CUMULATIVE, FINAL_ONLY)
    ]
    deltas, cumulative, final = streams
    assert len(final) == 1
    assert join(deltas) == choices_of(cumulative[-1]) == choices_of(final[0]) == choices_of(expected[place])
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    lengths = [[len(choice.token_ids) for choice in output.outputs] for output in cumulative]
    assert all(a <= b for one, two in pairwise(lengths) for a, b in zip(one, two, strict=True))
    if params.logprobs is not None:
        joined = [entry for output in deltas for choice in output.outputs for entry in choice.logprobs]
        assert joined == final[0].outputs[0].logprobs
        assert [max(entry, key=lambda t: entry[t].logprob) for entry in joined] == final[0].outputs[0].token_ids


@pytest.mark.usefixtures("slow")
async def test_deltas_come_as_they_are_made(running):
    first_s, start_s = None, time.monotonic()
    async with running.generate(PROMPTS[0], LONG, "d") as stream:
        async for _ in stream:
            first_s = first_s or time.monotonic() - start_s
    assert first_s < (time.monotonic() - start_s) / 2


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("params", [LONG, LONG.clone(temperature=1.0, n=4)], ids=["one", "four"])
async def test_leaving_the_iterator_aborts(running, params):
    before, finished = running.engine.stats().generation_tokens_total, len(running.sink.finished)
    async with running.generate(PROMPTS[3], params, "leaves") as stream:
        async for _ in stream:
            break
    await running.until_idle()
    assert running.engine.stats().generation_tokens_total - before < 40 * params.n
    assert [one.finish_reason for one in running.sink.finished[finished:]] == [FinishReason.ABORT]


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.1])
async def test_cancelling_a_task_aborts(running, delay_s):
    before = running.engine.stats().generation_tokens_total
    tasks = [asyncio.create_task(running.final(PROMPTS[i % 16], LONG, f"c{i}")) for i in range(12)]
    await asyncio.sleep(delay_s)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await running.until_idle()
    assert running.engine.stats().generation_tokens_total - before < 12 * 40


@pytest.mark.usefixtures("slow")
async def test_abort_in_mid_stream(running, expected):
    reference = (await running.final(PROMPTS[0], LONG.clone(output_kind=FINAL_ONLY), "all")).outputs[0]
    outputs, before = [], running.engine.stats().generation_tokens_total
    async with running.generate(PROMPTS[0], LONG, "mid") as stream:
        async for output in stream:
            outputs.append(output)
            if len(outputs) == 4:
                await running.engine.abort("mid")
    ((_, text, ids, reason, _),) = join(outputs)
    assert reason is FinishReason.ABORT
    assert 4 <= len(ids) < 40
    assert (reference.text[: len(text)], reference.token_ids[: len(ids)]) == (text, ids)
    await running.until_idle()
    assert running.engine.stats().generation_tokens_total - before < 60


@pytest.mark.usefixtures("slow")
async def test_abort_in_the_queue(running):
    """Eight rows are taken; the ninth request ends where it waits and the others do not notice."""
    params = LONG.clone(max_tokens=30, output_kind=FINAL_ONLY)
    tasks = [asyncio.create_task(running.final(PROMPTS[i], params, f"q{i}")) for i in range(9)]
    await running.until(lambda: running.engine.stats().num_waiting == 1)
    (queued,) = running.core.scheduler.waiting
    place = next(i for i in range(9) if queued.source.prompt_token_ids == PROMPTS[i])
    await running.engine.abort(f"q{place}")
    output = await asyncio.wait_for(tasks[place], 2.0)
    assert choices_of(output) == [(0, "", [], FinishReason.ABORT, None)]
    results = await asyncio.gather(*tasks)
    assert [len(result.outputs[0].token_ids) for result in results] == [0 if i == place else 30 for i in range(9)]
    await running.until_idle()


async def test_abort_while_the_prompt_is_encoded(running, monkeypatch):
    made, release = running.engine._inputs.make_request, threading.Event()
    finished = len(running.sink.finished)

    def late(*args, **options):
        release.wait(5.0)
        return made(*args, **options)

    monkeypatch.setattr(running.engine._inputs, "make_request", late)
    before = running.engine.stats()
    task = asyncio.create_task(running.final("a text", LONG, "early"))
    await running.until(lambda: "early" in running.engine._engine_ids)
    await running.engine.abort("early")
    release.set()
    output = await asyncio.wait_for(task, 2.0)
    assert choices_of(output) == [(0, "", [], FinishReason.ABORT, None)]
    await running.until_idle()
    assert running.engine.stats().prompt_tokens_total == before.prompt_tokens_total
    assert [one.finish_reason for one in running.sink.finished[finished:]] == [FinishReason.ABORT]


async def test_abort_of_an_unknown_id_does_nothing(running, expected):
    await running.engine.abort("nobody")
    output = await running.final(PROMPTS[0], PARAMS[0], "somebody")
    await running.engine.abort("somebody")
    assert choices_of(output) == choices_of(expected[0])
    await running.until_idle()


@pytest.mark.usefixtures("slow")
async def test_an_id_in_use_is_refused(running):
    async with running.generate(PROMPTS[0], LONG.clone(max_tokens=20), "same") as stream:
        outputs = [await anext(stream)]
        with pytest.raises(RequestError, match="'same' is already in use"):
            await running.final(PROMPTS[1], LONG, "same")
        outputs += [output async for output in stream]
    assert len(join(outputs)[0][2]) == 20
    assert (await running.final(PROMPTS[0], LONG.clone(max_tokens=1), "same")).finished


async def test_refused_requests_leave_nothing(running):
    finished = len(running.sink.finished)
    for prompt, params in [
        ([], LONG),
        ([300], LONG),
        ({"text": "x"}, LONG),
        ([5] * 96, LONG),
        ([5] * 30, LONG),
        (PROMPTS[0], LONG.clone(stop_token_ids=[300])),
        (PROMPTS[0], None),
    ]:
        with pytest.raises(RequestError):
            await running.final(prompt, params, "refused")
        await running.until_idle()
    assert len(running.sink.finished) == finished


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
async def test_nothing_after_a_stop_string(running, kind):
    plain = (await running.final(PROMPTS[5], LONG.clone(output_kind=FINAL_ONLY), "plain")).outputs[0]
    stop = plain.text[20:23]
    assert plain.text.index(stop) == 20
    before = running.engine.stats().generation_tokens_total
    outputs = await running.outputs(PROMPTS[5], LONG.clone(stop=[stop], output_kind=kind), "stopped")
    ((_, text, ids, reason, stop_reason),) = join(outputs)
    assert (text, reason, stop_reason) == (plain.text[:20], FinishReason.STOP, stop)
    assert ids == plain.token_ids[: len(ids)]
    await running.until_idle()
    assert running.engine.stats().generation_tokens_total - before < 60, "the core went on to the end"


async def test_finished_is_recorded_once(running, monkeypatch):
    """Whichever way a request ends, and whatever ends it a second time."""
    make_slow(running, monkeypatch, 0.002)
    finished = len(running.sink.finished)

    async def one(i: int) -> None:
        way, number = i % 4, f"f{i}"
        params = LONG.clone(max_tokens=20, temperature=1.0, seed=i, n=1 + i % 3)
        if way < 2:
            output = await running.final(PROMPTS[i], params.clone(output_kind=OutputKind(i % 3)), number)
            assert output.finished
            return
        async with running.generate(PROMPTS[i], params, number) as stream:
            await anext(stream)
            if way == 3:
                await running.engine.abort(number)
                await running.engine.abort(number)
                assert [output async for output in stream][-1].finished

    await asyncio.gather(*map(one, range(16)))
    await running.until_idle()
    new = running.sink.finished[finished:]
    assert Counter(record.finish_reason for record in new) == {FinishReason.LENGTH: 8, FinishReason.ABORT: 8}
    assert len({record.request_id for record in new}) == 16
    assert all(record.num_generation_tokens == 20 * record.n for record in new if record.finish_reason == "length")


async def test_random_aborts_give_all_blocks_back(launch):
    """200 requests over 24 blocks, most of them dropped in some state; preemptions happen meanwhile."""
    running = await launch()
    # A smaller pool in the same device memory: the programs are those of the other tests.
    running.core.scheduler = make_scheduler(running.engine.config.with_pool(25))
    rng = random.Random(3)

    async def one(i: int) -> None:
        length, count = rng.randint(1, 30), rng.choice((1, 1, 1, 4))
        params = LONG.clone(temperature=1.0, seed=i, n=count, max_tokens=rng.randint(1, 30))
        prompt = [(i % 5 + j) % 290 + 3 for j in range(length)]
        await asyncio.sleep(rng.random() * 0.5)
        way = rng.choice(("finish", "leave", "cancel", "abort"))
        if way == "leave":
            async with running.generate(prompt, params, f"x{i}") as stream:
                for _ in range(rng.randint(1, 5)):
                    if await anext(stream, None) is None:
                        break
            return
        task = asyncio.create_task(running.final(prompt, params, f"x{i}"))
        if way != "finish":
            await asyncio.sleep(rng.random() * 0.2)
            task.cancel() if way == "cancel" else await running.engine.abort(f"x{i}")
        with suppress(asyncio.CancelledError):
            await task

    await asyncio.gather(*map(one, range(200)))
    await running.until_idle()
    assert running.engine.stats().num_preemptions_total > 0


async def test_death_of_the_engine_reaches_everybody(launch, monkeypatch):
    running = await launch()
    engine = running.engine
    await engine.check_health()
    make_slow(running, monkeypatch)
    streams = [engine.generate(PROMPTS[i], LONG, f"e{i}") for i in range(10)]
    jobs = [asyncio.create_task(consume(stream)) for stream in streams]
    await running.until(lambda: engine.stats().num_running == 8 and engine.stats().generation_tokens_total > 16)

    def fail(plan):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(running.core.runner, "dispatch", fail)
    results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 5.0)
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert "the device is gone" in str(results[0])
    assert "the device is gone" in str(engine.dead_error)
    assert not engine.ready
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    with pytest.raises(EngineDeadError, match="the device is gone"):
        await running.final(PROMPTS[0], LONG, "later")
    assert await engine.wait_drained(1.0)
    assert len(running.sink.finished) == 10
    assert engine._outputs.num_unfinished == 0


async def consume(stream) -> list[RequestOutput]:
    async with aclosing(stream):
        return [output async for output in stream]


async def test_an_output_that_cannot_be_processed_is_the_end_too(launch, monkeypatch):
    running = await launch()

    def fail(outputs):
        raise RuntimeError("no text can be made of this")

    monkeypatch.setattr(running.engine._outputs, "process", fail)
    with pytest.raises(EngineDeadError, match="no text can be made"):
        await asyncio.wait_for(running.final(PROMPTS[0], LONG, "lost"), 20.0)
    assert "no text can be made" in str(running.engine.dead_error)
    with pytest.raises(EngineDeadError):
        await running.engine.check_health()


@pytest.mark.parametrize("in_thread", [False, True])
async def test_shutdown_with_open_requests(launch, monkeypatch, in_thread):
    running = await launch()
    engine = running.engine
    make_slow(running, monkeypatch)
    jobs = [asyncio.create_task(running.final(PROMPTS[i], LONG, f"s{i}")) for i in range(10)]
    await running.until(lambda: engine.stats().num_running == 8, 20.0)
    encoding = [asyncio.create_task(running.final("some text", LONG, f"t{i}")) for i in range(10)]
    await asyncio.sleep(0)
    assert not await engine.wait_drained(0.05)
    if in_thread:
        await asyncio.to_thread(engine.shutdown)
    else:
        engine.shutdown()
    results = await asyncio.wait_for(asyncio.gather(*jobs, *encoding, return_exceptions=True), 5.0)
    assert {type(result) for result in results} == {EngineDeadError}
    assert await engine.wait_drained(1.0)
    with pytest.raises(EngineDeadError):
        await running.final(PROMPTS[0], LONG, "later")
    with pytest.raises(EngineDeadError):
        await engine.encode("text")
    engine.shutdown()


async def test_wait_drained(running, monkeypatch):
    make_slow(running, monkeypatch)
    assert await running.engine.wait_drained(0.0)
    task = asyncio.create_task(running.final(PROMPTS[0], LONG.clone(max_tokens=30), "drains"))
    await running.until(lambda: running.engine.stats().num_running == 1)
    assert not await running.engine.wait_drained(0.02)
    assert await running.engine.wait_drained(5.0)
    assert (await task).finished


async def test_text_goes_both_ways(running):
    engine = running.engine
    text = "the tiny model ü"
    assert await engine.decode(await engine.encode(text, add_special_tokens=False)) == text
    assert (await engine.encode(text))[0] == 1
    assert await engine.decode(await engine.render_chat([{"role": "user", "content": "hi"}])) == "<s>u:hi\na:"
    assert engine.default_sampling_params == {"temperature": 0.8, "top_k": 40}
    output = await running.final(text, PARAMS[0], "text")
    assert (output.prompt, output.prompt_token_ids) == (text, await engine.encode(text))


async def test_before_the_start(folder):
    running = Running(folder)
    assert not running.engine.ready
    with pytest.raises(EngineDeadError, match="not been started"):
        await running.final(PROMPTS[0], LONG, "early")
    with pytest.raises(EngineDeadError):
        await running.engine.check_health()
    running.engine.shutdown()
