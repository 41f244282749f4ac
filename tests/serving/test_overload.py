"""The real engine behind a real socket when too much comes at once, and when its steps fail."""

import asyncio
import json
import time
from dataclasses import replace

import jax
import pytest
import pytest_asyncio
from conftest_paths import CACHE_FOLDER
from real_server import serve
from tiny_model import add_tokenizer, tiny_model

from octavo import LLM, RequestError, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
POISON = 77


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("overload")))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder):
    async with serve(
        folder, "--scheduling-policy", "priority", "--max-num-queued-tokens", "40", "--max-num-queued-reqs", "1"
    ) as running:
        yield running


@pytest.fixture
def hold(server, monkeypatch):
    """Steps wait until the function that this gives has been called."""
    dispatch, held = server.core._dispatch, [True]

    def waiting(**options):
        if held:
            time.sleep(0.002)
            return None
        return dispatch(**options)

    monkeypatch.setattr(server.core, "_dispatch", waiting)
    return held.clear


async def post(server, prompt, **body):
    async with server.http.post("/v1/completions", json={"prompt": prompt, **BODY, **body}) as response:
        return response.status, response.headers, await response.text()


async def test_past_the_limit_of_prompt_tokens_503_and_nothing_accepted_is_lost(server, hold):
    before = await server.metrics()
    waiting = [asyncio.create_task(post(server, [5] * 30))]
    await server.until(lambda: server.core.scheduler.num_waiting == 1)
    for stream in (False, True):
        status, headers, text = await post(server, [6] * 20, stream=stream)
        error = json.loads(text)["error"]
        assert (status, headers["Retry-After"], error["type"]) == (503, "1", "ServiceUnavailableError")
        assert (error["code"], error["param"]) == (503, None)
        assert "30 prompt tokens wait and this request has 20, at most 40" in error["message"]
    waiting.append(asyncio.create_task(post(server, [7] * 10, stream=True)))
    await server.until(lambda: server.core.scheduler.num_waiting == 2)
    hold()
    (first, _, text), (second, _, stream) = await asyncio.gather(*waiting)
    assert (first, second) == (200, 200)
    assert json.loads(text)["usage"]["completion_tokens"] == 8
    assert stream.endswith("data: [DONE]\n\n")
    await server.until_idle()
    after = await server.metrics()
    assert after["admission_rejections_total"] - before.get("admission_rejections_total", 0) == 2
    finished = "request_success_total length"
    assert after[finished] - before.get(finished, 0) == 2
    assert after["request_success_total error"] == before.get("request_success_total error", 0)


async def test_the_core_counts_choices_for_all_api_processes(server, hold, monkeypatch):
    """Each API process counts its own, and lets through here what another would send."""
    monkeypatch.setattr(server.server.state, "admit", lambda engine, num_choices: memoryview(b""))
    waiting = [asyncio.create_task(post(server, [5], n=8, temperature=1.0))]
    await server.until(lambda: server.core.scheduler.num_waiting == 8)
    waiting.append(asyncio.create_task(post(server, [5])))
    await server.until(lambda: server.core.scheduler.num_waiting == 9)
    status, headers, text = await post(server, [5])
    assert (status, headers["Retry-After"]) == (503, "1")
    assert "9 choices run or wait, at most 8 can run and 1 more may wait" in text
    status, _, text = await post(server, [5], n=10, temperature=1.0)
    assert (status, json.loads(text)["error"]["param"]) == (400, "n")
    hold()
    assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200, 200]
    await server.until_idle()


async def test_a_client_that_leaves_the_queue_makes_room(server, hold):
    waiting = asyncio.create_task(post(server, [5] * 35))
    await server.until(lambda: server.core.scheduler.num_waiting == 1)
    assert (await post(server, [6] * 20))[0] == 503
    waiting.cancel()
    await server.until(lambda: server.core.scheduler.num_waiting == 0)
    hold()
    assert (await post(server, [6] * 20))[0] == 200
    await server.until_idle()


async def test_priorities_order_the_queue(server, hold):
    tasks = []
    for priority in (3, 0, -7, 3, 1):
        tasks.append(asyncio.create_task(post(server, [5], priority=priority)))
        await server.until(lambda: server.core.scheduler.num_waiting == len(tasks))
    assert [one.source.priority for one in server.core.scheduler.waiting] == [-7, 0, 1, 3, 3]
    hold()
    assert all(status == 200 for status, _, _ in await asyncio.gather(*tasks))
    status, _, text = await post(server, [5], priority=2**63)
    assert (status, json.loads(text)["error"]["param"]) == (400, "priority")
    await server.until_idle()


async def test_only_the_request_to_blame_gets_an_error(server, monkeypatch):
    """One fails before its first token, one in mid-stream; who runs beside them gets the text of a quiet run."""
    quiet = [json.loads((await post(server, [20 + k, 9]))[2])["choices"][0]["text"] for k in range(3)]
    resolve, failed = server.core.runner.resolve, []

    def flaky(handle):
        for row in handle.plan.rows:
            done = row.start + row.num_tokens - row.request.num_prompt_tokens
            if POISON in row.request.source.prompt_token_ids[: 1 + (done >= 3)]:
                failed.append(row.request)
                for array in jax.tree.leaves(server.core.runner._state):
                    array.delete()  # as a program that fails after it has been given the state
                raise RuntimeError("the device says no")
        return resolve(handle)

    monkeypatch.setattr(server.core.runner, "resolve", flaky)
    failures = server.engine.stats().step_failures_total
    answers = await asyncio.gather(
        post(server, [POISON, 9]),
        post(server, [9, POISON], stream=True),
        *(post(server, [20 + k, 9]) for k in range(3)),
    )
    (status, _, text), (stream_status, _, events), *others = answers
    assert (status, json.loads(text)["error"]["type"]) == (500, "InternalServerError")
    assert "whenever this request runs" in text
    assert "device says no" not in text, "what the device says is for the log"
    *chunks, end = events.strip().split("\n\n")
    assert stream_status == 200
    assert 1 <= len(chunks) <= 3, "what was sent stays sent, once; a token without text makes no chunk"
    assert "whenever this request runs" in json.loads(end.removeprefix("data: "))["error"]["message"]
    assert [status for status, _, _ in others] == [200] * 3
    assert [json.loads(text)["choices"][0]["text"] for _, _, text in others] == quiet
    assert failed
    await server.until_idle()
    metrics = await server.metrics()
    assert metrics["step_failures_total"] - failures == server.engine.stats().step_failures_total - failures >= 3
    assert metrics["request_success_total error"] == 2
    monkeypatch.undo()
    assert json.loads((await post(server, [20, 9]))[2])["choices"][0]["text"] == quiet[0]


async def test_priorities_offline(folder):
    """Eight rows for ten prompts: the two least urgent begin last, though they came first."""
    options = {"block_size": 4, "max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    llm = LLM(
        str(folder),
        scheduling_policy="priority",
        num_gpu_blocks_override=200,
        compile_cache_dir=str(CACHE_FOLDER / "engine"),
        **options,
    )
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate([[5 + k] for k in range(10)], params, priority=range(9, -1, -1), use_tqdm=False)
    began = [output.metrics.first_scheduled_time_s for output in outputs]
    assert min(began[:2]) > max(began[2:])
    with pytest.raises(RequestError, match="2 priorities for 1 prompts"):
        llm.generate([[5]], params, priority=[1, 2], use_tqdm=False)
    config = llm._inputs._config
    llm._inputs._config = replace(config, scheduler=replace(config.scheduler, policy="fcfs"))
    with pytest.raises(RequestError, match="--scheduling-policy priority") as caught:
        llm.generate([[5]], params, priority=[1], use_tqdm=False)
    assert caught.value.param == "priority"
