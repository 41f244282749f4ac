"""The server with its real engine, a tiny random model and a real socket, through OpenAI's client."""

import asyncio
import itertools
import json
import time

import numpy as np
import openai
import pytest
import pytest_asyncio
from real_server import RealServer, serve
from safetensors.numpy import load_file, save_file
from tiny_model import add_tokenizer, tiny_model

from octavo.engine.compile_cache import COMPILES

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = {"temperature": 0.0, "ignore_eos": True}
COMPLETIONS = {
    "greedy": {**GREEDY, "max_tokens": 12},
    "seeded": {"temperature": 1.2, "top_p": 0.9, "top_k": 30, "seed": 5, "max_tokens": 20},
    "choices": {"temperature": 1.3, "seed": 1, "n": 3, "logprobs": 2, "max_tokens": 10},
    "logprobs": {**GREEDY, "logprobs": 4, "max_tokens": 8},
    "echo": {**GREEDY, "echo": True, "max_tokens": 6},
    "echo_logprobs": {"echo": True, "logprobs": 2, "max_tokens": 6, "seed": 2, "n": 2},
    "only_prompt": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "penalties": {
        "seed": 3,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "temperature": 1.0,
        "max_tokens": 16,
        "logprobs": 1,
    },
    "min_tokens": {"temperature": 0.0, "logit_bias": {"2": 100}, "min_tokens": 8, "max_tokens": 16, "logprobs": 0},
    "stop_id": {"temperature": 0.0, "logit_bias": {"70": 100}, "stop_token_ids": [70], "max_tokens": 16},
    "specials": {"temperature": 0.0, "logit_bias": {"1": 100}, "skip_special_tokens": False, "max_tokens": 3},
    "defaults": {"seed": 9},
}
CHATS = {
    "greedy": {**GREEDY, "max_tokens": 12},
    "seeded": {"seed": 6, "temperature": 1.1, "min_p": 0.05, "max_completion_tokens": 20},
    "choices": {"seed": 2, "n": 3, "logprobs": True, "top_logprobs": 2, "max_tokens": 10},
    "no_top": {**GREEDY, "logprobs": True, "max_tokens": 8},
    "penalties": {"seed": 3, "presence_penalty": 1.5, "repetition_penalty": 1.3, "max_tokens": 16},
    "rest_of_the_context": {**GREEDY},
}
NATIVE = frozenset(
    (
        *("temperature", "top_p", "seed", "max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs"),
        *("echo", "stop", "presence_penalty", "frequency_penalty", "logit_bias"),
    )
)
"""Options that OpenAI's client knows; the others go into its ``extra_body``."""
PROMPT = "the tiny model says ü: "
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say é, then more"}]
_salts = map(str, itertools.count())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("real") / "model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder):
    async with serve(folder) as server:
        yield server
        await server.until_idle()


@pytest.fixture
def slow(server, monkeypatch):
    """Every step takes 10 ms longer, so that a request lasts about a second."""
    resolve = server.core.runner.resolve

    def late(handle):
        time.sleep(0.01)
        return resolve(handle)

    monkeypatch.setattr(server.core.runner, "resolve", late)


def arguments(options: dict, fresh: bool = True) -> dict:
    """Of a call; ``fresh`` ones find nothing in the prefix cache, so that both calls of a pair compute the same."""
    native = {name: value for name, value in options.items() if name in NATIVE}
    extra = {name: value for name, value in options.items() if name not in NATIVE}
    if fresh:
        extra["cache_salt"] = next(_salts)
    return {"model": "tiny", **native, "extra_body": extra}


async def complete(server: RealServer, options: dict, stream: bool, prompt: object = PROMPT) -> dict:
    """{choice: (text, finish reason, stop reason, logprobs), "usage": usage}"""
    create = server.openai.completions.create
    if not stream:
        answer = await create(prompt=prompt, **arguments(options))
        made = {c.index: [c.text, c.finish_reason, c.stop_reason, dump(c.logprobs)] for c in answer.choices}
        return {**made, "usage": answer.usage}
    made, usage = {}, None
    options_of_stream = {"include_usage": True}
    async for chunk in await create(prompt=prompt, stream=True, stream_options=options_of_stream, **arguments(options)):
        assert bool(chunk.choices) == (chunk.usage is None), "usage comes once, in a chunk of its own"
        usage = chunk.usage
        for c in chunk.choices:
            add(made.setdefault(c.index, ["", None, None, None]), c.text, c, dump(c.logprobs))
    return {**made, "usage": usage}


async def chat(server: RealServer, options: dict, stream: bool, messages: object = MESSAGES) -> dict:
    """As ``complete``."""
    create = server.openai.chat.completions.create
    if not stream:
        answer = await create(messages=messages, **arguments(options))
        made = {c.index: [c.message.content, c.finish_reason, c.stop_reason, dump(c.logprobs)] for c in answer.choices}
        return {**made, "usage": answer.usage}
    made, usage = {}, None
    options_of_stream = {"include_usage": True}
    async for chunk in await create(
        messages=messages, stream=True, stream_options=options_of_stream, **arguments(options)
    ):
        usage = chunk.usage
        for c in chunk.choices:
            add(made.setdefault(c.index, ["", None, None, None]), c.delta.content or "", c, dump(c.logprobs))
    return {**made, "usage": usage}


def add(made: list, text: str, choice, logprobs: dict | None) -> None:
    assert made[1] is None, "a choice went on after its end"
    made[0] += text
    made[1], made[2] = choice.finish_reason, getattr(choice, "stop_reason", None)
    if logprobs is not None:
        made[3] = {name: [*((made[3] or {}).get(name) or []), *(logprobs[name] or [])] for name in logprobs}


def dump(logprobs) -> dict | None:
    if logprobs is None:
        return None
    return {name: value or [] for name, value in logprobs.model_dump().items()}


@pytest.mark.parametrize("name", COMPLETIONS)
async def test_completions_streamed_or_not(server, name):
    options = COMPLETIONS[name]
    whole = await complete(server, options, stream=False)
    assert await complete(server, options, stream=True) == whole
    usage = whole.pop("usage")
    ids = (await server.post("/tokenize", prompt=PROMPT))["tokens"]
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (len(ids), 0)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert sorted(whole) == list(range(options.get("n", 1)))
    for text, reason, _, logprobs in whole.values():
        assert text.startswith(PROMPT) is bool(options.get("echo"))
        if logprobs is not None:
            assert "".join(logprobs["tokens"]) == text
            assert len({*map(len, logprobs.values())}) == 1
        if options.get("ignore_eos"):
            assert (reason, usage.completion_tokens) == ("length", options["max_tokens"])


async def test_what_the_options_do(server):
    made = {name: await complete(server, options, stream=False) for name, options in COMPLETIONS.items()}
    assert made["echo"][0][0].startswith(PROMPT + made["greedy"][0][0][:3])
    assert len({made["choices"][index][0] for index in range(3)}) == 3
    assert made["min_tokens"]["usage"].completion_tokens == 9, "eight, and then what had been held back"
    assert made["min_tokens"][0][1:3] == ["stop", None]
    assert made["stop_id"][0][:3] == ["", "stop", 70]
    assert made["specials"][0][0] == "<s><s><s>"
    assert made["only_prompt"][0][0] == PROMPT
    assert made["only_prompt"]["usage"].completion_tokens == 0
    pushed = {"temperature": 0.0, "logit_bias": {"70": 15}, "max_tokens": 8}
    assert len(set((await complete(server, pushed, stream=False))[0][0])) == 1
    assert len(set((await complete(server, pushed | {"frequency_penalty": 2.0}, stream=False))[0][0])) > 1
    assert (await complete(server, COMPLETIONS["seeded"], stream=False))[0] == made["seeded"][0]
    assert (await complete(server, COMPLETIONS["seeded"] | {"seed": 6}, stream=False))[0] != made["seeded"][0]
    explicit = {"seed": 9, "temperature": 0.8, "top_k": 40, "max_tokens": 16}
    assert await complete(server, explicit, stream=False) == made["defaults"], "the generation config's defaults"


@pytest.mark.parametrize("name", CHATS)
async def test_chats_streamed_or_not(server, name):
    options = CHATS[name]
    whole = await chat(server, options, stream=False)
    assert await chat(server, options, stream=True) == whole
    usage = whole.pop("usage")
    ids = (await server.post("/tokenize", messages=MESSAGES))["tokens"]
    assert usage.prompt_tokens == len(ids)
    assert sorted(whole) == list(range(options.get("n", 1)))
    for text, reason, _, logprobs in whole.values():
        if logprobs is not None:
            assert "".join(entry["token"] for entry in logprobs["content"]) == text
            assert {len(entry["top_logprobs"]) for entry in logprobs["content"]} == {options.get("top_logprobs", 0)}
        if options.get("ignore_eos"):
            assert (reason, usage.completion_tokens) == ("length", options.get("max_tokens", 96 - len(ids)))


async def test_a_chat_is_its_rendered_prompt(server):
    ids = (await server.post("/tokenize", messages=MESSAGES))["tokens"]
    prompt = (await server.post("/detokenize", tokens=ids))["prompt"]
    assert prompt == "<s>s:be brief\nu:say é, then more\na:"
    made = await complete(server, COMPLETIONS["greedy"], stream=False, prompt=ids)
    assert made[0] == (await chat(server, CHATS["greedy"], stream=False))[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings(server, stream):
    options = GREEDY | {"max_tokens": 50}
    plain = (await complete(server, options, stream=False))[0][0]
    stop = plain[11:14]
    for run, length in ((complete, 11), (chat, None)):
        if length is None:
            plain = (await chat(server, options, stream=False))[0][0]
            stop, length = plain[17:19], plain.index(plain[17:19])
        for kept, extra in ((length, {}), (length + len(stop), {"include_stop_str_in_output": True})):
            made = await run(server, options | {"stop": ["never to be seen", stop]} | extra, stream)
            assert made[0][:3] == [plain[:kept], "stop", stop]
            assert made["usage"].completion_tokens < 50
    await server.until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts(server, stream):
    """The index of a choice counts on over the prompts."""
    options = {"seed": 4, "temperature": 1.2, "n": 2, "max_tokens": 6, "logprobs": 1, "echo": True}
    prompts = ["one thing", "another", "the third of them"]
    made = await complete(server, options, stream, prompts)
    alone = [await complete(server, options, False, prompt) for prompt in prompts]
    assert [made[i][:3] for i in range(6)] == [one[k][:3] for one in alone for k in range(2)]
    assert [made[i][3]["tokens"] for i in range(6)] == [one[k][3]["tokens"] for one in alone for k in range(2)]
    assert made["usage"].completion_tokens == sum(one["usage"].completion_tokens for one in alone)
    assert made["usage"].prompt_tokens == sum(one["usage"].prompt_tokens for one in alone)


async def test_mixed_traffic_compiles_nothing(server):
    jobs = [(complete, options) for options in COMPLETIONS.values()] + [(chat, options) for options in CHATS.values()]
    jobs += [(chat, options) for options in CHATS.values()]
    assert len(jobs) == 24
    alone = [await run(server, options, stream=False) for run, options in jobs]
    before, compiled = (await server.metrics())["compiles_after_ready_total"], COMPILES.total
    at_once = await asyncio.gather(*(run(server, options, i % 2 == 0) for i, (run, options) in enumerate(jobs)))
    for one, other in zip(alone, at_once, strict=True):
        assert one.pop("usage") == other.pop("usage")
        assert {index: choice[:3] for index, choice in one.items()} == {i: choice[:3] for i, choice in other.items()}
    assert COMPILES.total == compiled
    assert (await server.metrics())["compiles_after_ready_total"] == before
    await server.until_idle()


async def test_metrics_add_up(server):
    before = await server.metrics()
    prompts, sizes = [[50 + i, *range(60, 65 + i)] for i in range(10)], [1 + 2 * i for i in range(10)]
    jobs = [
        server.post(
            "/v1/completions",
            prompt=prompt,
            max_tokens=size,
            n=1 + i % 3,
            seed=i,
            ignore_eos=True,
            cache_salt=next(_salts),
            temperature=1.0,
        )
        for i, (prompt, size) in enumerate(zip(prompts, sizes, strict=True))
    ]
    await asyncio.gather(*jobs)
    after = await server.metrics()
    new = {name: after[name] - before.get(name, 0) for name in after}
    choices = [1 + i % 3 for i in range(10)]
    num_prompt = sum(map(len, prompts))
    num_made = sum(count * size for count, size in zip(choices, sizes, strict=True))
    num_gaps = num_made - sum(choices)
    assert new["prompt_tokens_total"] == new["request_prompt_tokens_sum"] == num_prompt
    assert new["generation_tokens_total"] == new["request_generation_tokens_sum"] == num_made
    assert new["request_params_max_tokens_sum"] == sum(sizes)
    assert new["request_params_n_sum"] == sum(choices)
    assert new["inter_token_latency_seconds_count"] == num_gaps
    assert new["request_success_total length"] == 10
    assert sum(new[f"request_success_total {reason}"] for reason in ("stop", "abort", "error")) == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert new[f"{name}_count"] == 10
        assert new[f"{name}_sum"] > 0
    cached = new["prompt_tokens_cached_total"]
    assert new["request_prefill_kv_computed_tokens_sum"] == num_prompt - cached
    assert (new["num_requests_running"], after["num_requests_waiting"], after["kv_cache_usage_perc"]) == (0, 0, 0)
    body = {"prompt": prompts[5], "max_tokens": 7, "n": 3, "seed": 1, "ignore_eos": True, "cache_salt": next(_salts)}
    await server.post("/v1/completions", **body)
    steps = (await server.metrics())["iteration_tokens_total_sum"] - after["iteration_tokens_total_sum"]
    assert steps == len(prompts[5]) + 3 * 6, "each token is scheduled once, but the last of each choice"


@pytest.mark.usefixtures("slow")
async def test_choices_that_wait_for_a_row_count_as_one_request(server):
    """Twelve choices over eight rows: the late ones find the prompt in the cache, the request did not."""
    before = await server.metrics()
    body = {"prompt": PROMPT, "n": 12, "max_tokens": 5, "ignore_eos": True, "seed": 1, "cache_salt": next(_salts)}
    answer = await server.post("/v1/completions", **body)
    assert len(answer["choices"]) == 12
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    after = await server.metrics()
    new = {name: after[name] - before[name] for name in after if name in before}
    assert new["prefix_cache_hits_total"] > 0
    assert new["request_prefill_time_seconds_sum"] > 0
    assert (new["request_success_total length"], new["request_params_n_sum"]) == (1, 12)


async def test_cached_prefixes_are_reported(server):
    prompt = (await server.post("/tokenize", prompt="a prefix that nobody else sends"))["tokens"]
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0.0, "cache_salt": next(_salts)}
    before = (await server.metrics())["prefix_cache_hits_total"]
    answers = [await server.post("/v1/completions", **body) for _ in range(2)]
    expected = (len(prompt) - 1) // 4 * 4
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] == [0, expected]
    assert (await server.metrics())["prefix_cache_hits_total"] - before == expected
    assert answers[0]["choices"] == answers[1]["choices"]
    other = await server.post("/v1/completions", **body | {"cache_salt": next(_salts)})
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts(server, path, stream):
    what = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES[1:]}
    body = what | {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True, "stream": stream, "n": 2}
    before = await server.metrics()
    if stream:
        response = await server.http.post(path, json=body)
        assert (await response.content.readline()).startswith(b"data: ")
        response.close()
    else:
        task = asyncio.create_task(server.http.post(path, json=body))
        await server.until(lambda: server.engine.stats().num_running == 2)
        task.cancel()
    await server.until_idle()
    after = await server.metrics()
    assert after["request_success_total abort"] - before["request_success_total abort"] == 1
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 100


@pytest.mark.usefixtures("slow")
async def test_a_client_that_leaves_the_queue(server):
    body = {"prompt": PROMPT, "temperature": 1.0, "max_tokens": 60, "ignore_eos": True, "stream": True}
    streams = await asyncio.gather(*(server.http.post("/v1/completions", json=body) for _ in range(8)))
    await server.until(lambda: server.engine.stats().num_running == 8)
    waiting = asyncio.create_task(server.http.post("/v1/completions", json=body | {"stream": False}))
    await server.until(lambda: server.engine.stats().num_waiting == 1)
    waiting.cancel()
    await server.until(lambda: server.engine.stats().num_waiting == 0, 2.0)
    assert server.engine.stats().num_running == 8
    for response in streams:
        response.close()
    await server.until_idle()


async def test_text_to_ids_and_back(server):
    for text in ("the tiny model", "ü 漢 😀 \n\t", "x" * 300):
        answer = await server.post("/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert (await server.post("/detokenize", tokens=answer["tokens"]))["prompt"] == text
    assert (await server.post("/tokenize", prompt="a"))["tokens"][0] == 1


async def test_refusals_name_both_numbers(server):
    with pytest.raises(openai.BadRequestError, match=r"96 tokens.* 90 "):
        await server.openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=90)
    with pytest.raises(openai.BadRequestError, match="96 tokens"):
        await server.openai.completions.create(model="tiny", prompt="x" * 100)
    await server.until_idle()


async def test_numbers_that_are_not_finite_fail_one_request(folder, tmp_path):
    """A checkpoint with a broken row: who sends that token gets an error, the others their answers."""
    broken = add_tokenizer(tiny_model(tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["model.embed_tokens.weight"][5] = np.inf
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    body = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "logit_bias": {"5": -100}}
    async with serve(broken, "--enforce-eager") as server:
        posts = [
            server.http.post("/v1/completions", json={"prompt": [7, bad or 8, 9], "stream": stream, **body})
            for bad, stream in ((5, False), (5, True), (0, False), (0, True))
        ]
        bad, bad_stream, good, good_stream = await asyncio.gather(*posts)
        assert (bad.status, bad_stream.status, good.status, good_stream.status) == (500, 500, 200, 200)
        assert "not finite" in (await bad.json())["error"]["message"]
        text = (await good.json())["choices"][0]["text"]
        chunks = [line.removeprefix("data: ") for line in (await good_stream.text()).split("\n\n")][:-2]
        assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == text
        await server.until_idle()
        metrics = await server.metrics()
        assert (metrics["request_success_total error"], metrics["request_success_total length"]) == (2, 2)
