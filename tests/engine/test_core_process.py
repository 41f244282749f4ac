"""The core in a process of its own, seen from ``AsyncLLM``: how it starts, dies and ends, and what crosses to it."""

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import aclosing
from dataclasses import fields, replace
from pathlib import Path

import fake_core
import psutil
import pytest
from async_engine import OPTIONS, choices_of
from fake_core import FAIL, HANG, TOKEN
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import add_tokenizer, tiny_model

from octavo import LLM, AsyncLLM, RequestError, SamplingParams
from octavo.engine import core_child, wire
from octavo.engine.args import EngineArgs
from octavo.engine.config import EngineConfig
from octavo.engine.core_client import CoreConnection
from octavo.engine.core_server import CoreServer
from octavo.engine.errors import ConfigError, EngineDeadError
from octavo.engine.messages import (
    AbortRequest,
    ChoiceOutput,
    EngineRequest,
    FinishReason,
    RequestTiming,
    SampledLogprobs,
    StepOutputs,
    StepStats,
)
from octavo.engine.sampling_params import OutputKind
from octavo.engine.stats_board import CoreFigures, StatsBoard, create_board

PARAMS = SamplingParams(max_tokens=20, output_kind=OutputKind.DELTA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("core") / "model"))


@pytest.fixture
def scratch(monkeypatch):
    """Where private folders are made; short, as the path of a socket in it is limited."""
    with tempfile.TemporaryDirectory(prefix="ot-", dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


@pytest.fixture
def fake(monkeypatch, scratch):
    """Cores that AsyncLLM starts are ``fake_core.py``."""
    monkeypatch.setattr(core_child, "core_command", lambda: [sys.executable, fake_core.__file__])
    return scratch


async def started(folder: Path, **options) -> AsyncLLM:
    engine = AsyncLLM(EngineArgs(model=str(folder), **options))
    await engine.start()
    return engine


async def final(engine: AsyncLLM, first_id: int, request_id: str, params: SamplingParams = PARAMS):
    """The ids of all deltas, and the last output."""
    ids = []
    async with aclosing(engine.generate([first_id], params, request_id)) as stream:
        async for output in stream:
            ids += output.outputs[0].token_ids
    return ids, output


def logprobs_of(results) -> dict[tuple, float]:
    """(request, choice or -1 for the prompt, position, token id) -> log-probability."""
    lists = [(i, -1, output.prompt_logprobs) for i, output in enumerate(results)]
    lists += [(i, choice.index, choice.logprobs) for i, output in enumerate(results) for choice in output.outputs]
    return {
        (i, index, position, token_id): one.logprob
        for i, index, entries in lists
        for position, entry in enumerate(entries or [])
        for token_id, one in (entry or {}).items()
    }


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def gone(pid: int) -> None:
    async with asyncio.timeout(15):
        while is_alive(pid):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)


# ---- AsyncLLM and its core --------------------------------------------------------------------


async def test_it_serves_and_leaves_nothing(folder, fake):
    engine = await started(folder)
    pid = engine._core.pid
    results = await asyncio.gather(*(final(engine, TOKEN, f"r{i}") for i in range(20)))
    assert all(ids == [TOKEN] * 20 and output.finished for ids, output in results)
    assert engine.stats().generation_tokens_total == 400
    assert await engine.reset_prefix_cache()
    [private] = fake.iterdir()
    assert private.stat().st_mode & 0o777 == 0o700
    engine.shutdown()
    assert not psutil.pid_exists(pid)
    assert list(fake.iterdir()) == []
    with pytest.raises(EngineDeadError):
        await final(engine, TOKEN, "late")


WAYS = {
    "killed": (TOKEN, "killed by SIGKILL"),
    "suspended": (TOKEN, "no step within 0.5 s"),
    "hangs": (HANG, "no step within 0.5 s"),
    "fails": (FAIL, "RuntimeError: the device is gone"),
}


@pytest.mark.parametrize("way", WAYS)
async def test_death_reaches_everybody(folder, fake, way):
    first_id, said = WAYS[way]
    engine = await started(folder, engine_step_timeout=0.5)
    core = psutil.Process(engine._core.pid)
    long = PARAMS.clone(max_tokens=10_000 // 4)
    jobs = [asyncio.create_task(final(engine, TOKEN, f"r{i}", long)) for i in range(3)]
    while engine.stats().generation_tokens_total < 6:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.01)
    if way == "killed":
        core.kill()
    elif way == "suspended":
        core.suspend()
    else:
        jobs.append(asyncio.create_task(final(engine, first_id, "cause", long)))
    results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 5.0)
    assert {type(result) for result in results} == {EngineDeadError}
    assert said in str(results[0])
    assert not engine.ready
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    await gone(core.pid)
    async with asyncio.timeout(15):
        while list(fake.iterdir()):  # noqa: ASYNC110 - another thread
            await asyncio.sleep(0.01)
    engine.shutdown()


async def test_an_answer_to_a_caller_who_has_just_gone(folder, fake):
    """The answer is read in the very turn of the event loop in which its caller is cancelled."""
    engine = await started(folder)
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    call = asyncio.create_task(engine.reset_prefix_cache())
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251 - the answer arrives meanwhile
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0)
    assert await engine.reset_prefix_cache()
    assert not problems
    engine.shutdown()


async def test_an_idle_core_may_rest(folder, fake):
    """Without work no step is due, however long that lasts; and the first one has its full time."""
    engine = await started(folder, engine_step_timeout=0.5)
    await asyncio.sleep(2.0)
    assert (await final(engine, TOKEN, "a"))[0] == [TOKEN] * 20
    engine.shutdown()


async def test_an_idle_core_that_hangs_is_noticed(folder, fake):
    engine = await started(folder, engine_step_timeout=0.5)
    psutil.Process(engine._core.pid).suspend()
    with pytest.raises(EngineDeadError, match="no step within"):
        await asyncio.wait_for(final(engine, TOKEN, "a"), 6.0)
    engine.shutdown()


async def test_a_short_suspension_is_survived(folder, fake):
    """Longer than the step timeout, but the core goes on before it is asked again."""
    engine = await started(folder, engine_step_timeout=0.5)
    core = psutil.Process(engine._core.pid)
    core.suspend()
    await asyncio.sleep(0.8)
    core.resume()
    assert (await final(engine, TOKEN, "a"))[0] == [TOKEN] * 20
    engine.shutdown()


async def test_a_core_that_cannot_start(folder, fake):
    with pytest.raises(ConfigError, match="this model is not known"):
        await started(folder, seed=FAIL)
    with pytest.raises(ConfigError, match="no such file"):
        await started(folder / "nowhere")
    assert list(fake.iterdir()) == []


async def test_a_core_that_dies_while_it_starts(folder, fake):
    engine = AsyncLLM(EngineArgs(model=str(folder), seed=HANG))
    starting = asyncio.create_task(engine.start())
    while engine._core.pid is None:  # noqa: ASYNC110 - set by the task
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    psutil.Process(engine._core.pid).kill()
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        await asyncio.wait_for(starting, 5.0)
    assert list(fake.iterdir()) == []


async def test_a_stop_while_it_starts(folder, fake):
    engine = AsyncLLM(EngineArgs(model=str(folder), seed=HANG))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0.3)
    began_s = time.monotonic()
    await asyncio.to_thread(engine.shutdown)
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(starting, 5.0)
    assert time.monotonic() - began_s < 3.0
    assert list(fake.iterdir()) == []


SCRIPT = """
import asyncio, sys
print("run", flush=True)
sys.path.insert(0, sys.argv[2])
import fake_core
from octavo import AsyncLLM, EngineArgs, SamplingParams
from octavo.engine import core_child
core_child.core_command = lambda: [sys.executable, fake_core.__file__]
assert "jax" not in sys.modules

async def main():
    engine = AsyncLLM(EngineArgs(model=sys.argv[1]))
    await engine.start()
    async for output in engine.generate([70], SamplingParams(max_tokens=3), "a"):
        pass
    assert not {"jax", "jaxlib", "flax"} & set(sys.modules)
    print(len(output.outputs[0].token_ids), engine._core.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("signal_name", ["kill", "terminate"])
async def test_the_core_ends_with_its_owner(folder, scratch, tmp_path, monkeypatch, signal_name):
    """A script without a main guard, run once; the core follows it however it ends."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("TMPDIR", str(scratch))
    command = [sys.executable, str(script), str(folder), str(Path(fake_core.__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:  # noqa: ASYNC220
        assert owner.stdout.readline() == "run\n"
        count, pid = map(int, owner.stdout.readline().split())
        assert count == 3
        getattr(owner, signal_name)()
        await gone(pid)
        assert owner.stdout.read() == ""
    async with asyncio.timeout(15):
        while list(scratch.iterdir()):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)


async def test_the_real_core_gives_the_same_as_offline(folder, scratch):
    prompts = [[(7 * i + j) % 290 + 3 for j in range(3 + i)] for i in range(6)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=1.0, seed=3, max_tokens=8, n=3, stop_token_ids=[5], logit_bias={9: 1.5}),
    ]
    expected = LLM(str(folder), **OPTIONS).generate(prompts, [params[i % 2] for i in range(6)], use_tqdm=False)
    engine = await started(folder, **OPTIONS)

    async def one(i: int):
        async with aclosing(engine.generate(prompts[i], params[i % 2], str(i))) as stream:
            return [output async for output in stream][-1]

    outputs = await asyncio.gather(*(one(i) for i in range(6)))
    assert [choices_of(output) for output in outputs] == [choices_of(output) for output in expected]
    got, wanted = logprobs_of(outputs), logprobs_of(expected)
    assert list(got) == list(wanted)
    assert len(got) > 50
    assert list(got.values()) == pytest.approx(list(wanted.values()), abs=1e-4)  # other rows in the batch
    assert engine.stats().compiles_after_ready_total == 0
    engine.shutdown()
    assert list(scratch.iterdir()) == []


# ---- the wire ---------------------------------------------------------------------------------

ints = st.integers(0, 2**31 - 1)
floats = st.floats(allow_nan=False, width=64)
texts = st.text(max_size=20)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 2.0),
    n=st.integers(1, 5),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.none() | st.lists(st.text(min_size=1, max_size=5), max_size=3),
    stop_token_ids=st.none() | st.lists(ints, max_size=3),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.none() | st.dictionaries(ints, st.floats(-100, 100), max_size=3),
    output_kind=st.sampled_from(OutputKind),
)
requests = st.builds(
    EngineRequest,
    request_id=texts,
    prompt_token_ids=st.lists(ints, max_size=5),
    sampling_params=sampling,
    arrival_time_s=floats,
    stop_token_ids=st.frozensets(ints, max_size=3),
    eos_token_ids=st.frozensets(ints, max_size=3),
    priority=st.integers(-(2**31), 2**31),
    cache_salt=st.none() | texts,
)
logprobs = st.builds(
    SampledLogprobs,
    token_id=ints,
    logprob=floats | st.just(float("-inf")),
    rank=ints,
    top_token_ids=st.lists(ints, max_size=3),
    top_logprobs=st.lists(floats, max_size=3),
)
outputs = st.builds(
    ChoiceOutput,
    request_id=texts,
    index=ints,
    token_ids=st.lists(ints, max_size=3),
    logprobs=st.none() | st.lists(logprobs, max_size=2),
    prompt_logprobs=st.none() | st.lists(logprobs, max_size=2),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | ints | texts,
    num_cached_tokens=ints,
    timing=st.none() | st.builds(RequestTiming, arrival_time_s=floats, num_preemptions=ints),
    error=st.none() | texts,
)


@settings(max_examples=60, deadline=None)
@given(requests | st.builds(StepOutputs, outputs=st.lists(outputs, max_size=3), stats=st.builds(StepStats)))
def test_what_crosses_comes_out_equal(message):
    again = wire.decode(wire.encode(message))
    assert again == message
    assert type(again) is type(message)


def test_a_configuration_crosses():
    args = EngineArgs(hf_overrides={"a": {"b": [1, None]}}, served_model_name=("x", "y"), max_model_len=64)
    config = replace(EngineConfig.from_args(args), eos_token_ids=frozenset({1, 2}))
    start = wire.CoreStart(config=config, folder="/tmp/x")
    assert wire.decode_start(wire.encode_start(start)) == start
    assert wire.encode_start(start).count(b"\n") == 1
    assert wire.decode(wire.encode(wire.Ready(config=config))).config == config


@pytest.mark.parametrize("frames", [[], [b"h"], [b"?", b""], [b"h", b"\xc1"], [b"r", b"\x80"], [b"h", b"", b""]])
def test_what_is_no_message_is_refused(frames):
    with pytest.raises(ValueError, match="message"):
        wire.decode(frames)


def test_a_path_too_long_for_a_socket():
    assert wire.socket_address("/tmp/" + "x" * 80)
    with pytest.raises(ConfigError, match="too long"):
        wire.socket_address("/tmp/" + "x" * 100)


# ---- several clients of one core ----------------------------------------------------------------


class Frontend:
    resolved = type("Resolved", (), {"path": "model"})
    vocab_size = 300


async def test_each_client_gets_its_own_outputs(scratch):
    """Three clients with equal request numbers; the first one hears of every step, the others of their own."""
    create_board(scratch)
    stop = threading.Event()
    threading.Thread(target=_serve_fake, args=(scratch, stop), daemon=True).start()
    heard: list[list[StepOutputs]] = [[], [], []]
    deaths: list[list[BaseException]] = [[], [], []]
    clients = [CoreConnection(scratch, str(i)) for i in range(3)]
    for client, outputs_of, deaths_of in zip(clients, heard, deaths, strict=True):
        config = await client.start(EngineConfig.from_args(EngineArgs()), Frontend, outputs_of.append, deaths_of.append)
        assert config.num_blocks == 100
    for i, client in enumerate(clients):
        client.send(_request(f"{i}-0", max_tokens=5 + i))
    async with asyncio.timeout(30):
        while clients[2].stats().generation_tokens_total < 18:  # noqa: ASYNC110 - another thread
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
    for i in range(3):
        news = [one for step in heard[i] for one in step.outputs]
        assert [one.request_id for one in news] == [f"{i}-0"] * (5 + i)
    assert len(heard[0]) > len(heard[1])
    assert [client.stats() for client in clients] == [heard[0][-1].stats] * 3
    with pytest.raises(RequestError, match="cannot be sent"):
        clients[0].send(replace(_request("0-1"), priority=1 << 70))
    clients[0].send(_request("0-2", first_id=FAIL))
    async with asyncio.timeout(15):
        while not all(deaths):  # noqa: ASYNC110 - another thread
            await asyncio.sleep(0.01)
    assert all(len(one) == 1 and "the device is gone" in str(one[0]) for one in deaths)
    with pytest.raises(EngineDeadError, match="the device is gone"):
        clients[1].send(AbortRequest(request_id="1-0"))
    for client in clients:
        client.stop()
    await asyncio.sleep(0.05)


def _request(request_id: str, first_id: int = TOKEN, max_tokens: int = 5) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(request_id=request_id, prompt_token_ids=[first_id], sampling_params=params, arrival_time_s=0.0)


def _serve_fake(folder: Path, stop: threading.Event) -> None:
    server = CoreServer(folder)
    server.wait_for_hello()
    config = EngineConfig.from_args(EngineArgs()).resolve(
        platform="cpu", context_len=64, model_path="m", model_name="m", vocab_size=300, eos_token_ids=frozenset()
    )
    try:
        server.serve(fake_core.FakeCore(), config.with_pool(100))
    except RuntimeError as error:
        server.fail(error)
    server.close()


# ---- the board ----------------------------------------------------------------------------------


def test_the_board_is_never_read_half_written(tmp_path):
    """A writer that changes every field at once, and a reader that must never see two of its states mixed."""
    create_board(tmp_path)
    writer, reader = StatsBoard(tmp_path), StatsBoard(tmp_path)
    assert reader.read() == CoreFigures()
    names = [one.name for one in fields(StepStats) if one.type in (int, "int")]
    done = threading.Event()

    def write() -> None:
        value = 0
        while not done.is_set():
            value += 12345
            writer.write(CoreFigures(stats=StepStats(**dict.fromkeys(names, value))))

    thread = threading.Thread(target=write)
    thread.start()
    last = 0
    try:
        for _ in range(20_000):
            stats = reader.read().stats
            values = {getattr(stats, name) for name in names}
            assert len(values) == 1
            [value] = values
            assert value >= last
            last = value
    finally:
        done.set()
        thread.join()
    assert last > 0


def test_a_board_being_written_gives_the_figures_before(tmp_path):
    create_board(tmp_path)
    writer, reader = StatsBoard(tmp_path), StatsBoard(tmp_path)
    before = CoreFigures(stats=StepStats(num_running=3))
    writer.write(before)
    assert reader.read() == before
    writer._map[20] ^= 0xFF
    assert reader.read() == before


def test_stalled():
    assert CoreFigures().stalled_s() == 0.0
    assert 5 <= CoreFigures(progress_time_s=time.monotonic() - 5).stalled_s() < 6
