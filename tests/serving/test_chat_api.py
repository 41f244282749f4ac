"""/v1/chat/completions through the openai client, against hand-computed answers."""

import pytest

USER = [{"role": "user", "content": "hi"}]
PROMPT = "<user>hi<assistant>"


async def test_answer(running):
    answer = await running.openai().chat.completions.create(model="perm", messages=USER, max_completion_tokens=5)
    assert answer.choices[0].message.content == "abcde"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.model == "perm"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens == len(PROMPT) + 1
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == len(PROMPT) + 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_max_tokens_defaults_to_the_rest_of_the_context(running):
    answer = await running.openai().chat.completions.create(model="perm", messages=USER)
    assert answer.usage.total_tokens == running.engine.config.max_model_len


async def stream(client, **options):
    """(texts by index, finish by index, logprob tokens by index, usage chunks, roles) of a stream."""
    texts, finishes, tokens, usages, roles = {}, {}, {}, [], []
    async for chunk in await client.chat.completions.create(stream=True, **options):
        assert chunk.object == "chat.completion.chunk"
        if not chunk.choices:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            assert choice.index not in finishes, "a chunk after the finish"
            if choice.delta.role:
                roles.append((choice.index, choice.delta.role, choice.delta.content))
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.logprobs:
                tokens.setdefault(choice.index, []).extend(item.token for item in choice.logprobs.content)
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    return texts, finishes, tokens, usages, roles


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 7},
        {"max_tokens": 9, "stop": ["fgZ", "def"]},
        {"max_tokens": 6, "stop": "efgh"},
        {"n": 3, "temperature": 1.0, "max_tokens": 8},
        {"max_tokens": 4, "logprobs": True, "top_logprobs": 2},
        {"max_tokens": 4, "logprobs": True},
    ],
    ids=["plain", "stop", "held at the end", "n", "top_logprobs", "logprobs"],
)
async def test_stream_equals_answer(launch, options):
    client = (await launch(eos_after=12)).openai()
    whole = await client.chat.completions.create(model="perm", messages=USER, **options)
    texts, finishes, tokens, usages, roles = await stream(
        client, model="perm", messages=USER, stream_options={"include_usage": True}, **options
    )
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert finishes == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usages == [whole.usage]
    assert roles == [(index, "assistant", "") for index in range(len(whole.choices))]
    expected = {c.index: [item.token for item in c.logprobs.content] for c in whole.choices if c.logprobs}
    assert tokens == expected


async def test_choices_end_on_their_own(launch):
    """The first to end does not silence the others, and each has its own index."""
    running = await launch(eos_after=6)
    texts, finishes, _, _, _ = await stream(
        running.openai(), model="perm", messages=USER, n=3, temperature=1.0, max_tokens=20
    )
    assert texts == {0: "abcdef", 1: "bcdef", 2: "cdef"}
    assert finishes == {0: "stop", 1: "stop", 2: "stop"}


async def test_logprobs(running):
    answer = await running.openai().chat.completions.create(
        model="perm", messages=USER, max_tokens=2, logprobs=True, top_logprobs=4
    )
    first = answer.choices[0].logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("a", -1.0, [97])
    assert [item.token for item in first.top_logprobs] == ["h", "a", "j", "l"]
    assert first.top_logprobs[3].logprob == -9999.0, "minus infinity is not JSON"


async def test_vllm_extras(running):
    status, answer = await running.post(
        "/v1/chat/completions",
        {
            "messages": USER,
            "max_tokens": 2,
            "prompt_logprobs": 0,
            "return_token_ids": True,
            "stop": ["b"],
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
        },
    )
    assert status == 200
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", "b")
    assert choice["token_ids"] == [97, 98]
    assert answer["prompt_token_ids"] == [256, *PROMPT.encode()]
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1] == {"60": {"logprob": -1.0, "rank": 2, "decoded_token": "<"}}
    params = running.engine.seen[-1][1]
    assert (params.top_k, params.min_p, params.repetition_penalty) == (5, 0.1, 1.2)


async def test_defaults_of_the_generation_config(launch):
    running = await launch(defaults={"temperature": 0.5, "top_k": 7, "max_tokens": 3})
    await running.post("/v1/chat/completions", {"messages": USER, "temperature": None})
    params = running.engine.seen[-1][1]
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 7, 1.0, 3)
    await running.post("/v1/chat/completions", {"messages": USER, "temperature": 0.25, "max_tokens": 5, "top_k": 0})
    params = running.engine.seen[-1][1]
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 0, 5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"role": "refused", "content": "x"}]}, "messages"),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": USER, "logprobs": True, "top_logprobs": 6}, "top_logprobs"),
        ({"messages": USER, "logprobs": 1}, "logprobs"),
        ({"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": USER, "continue_final_message": True}, "continue_final_message"),
        (
            {"messages": USER, "continue_final_message": True, "add_generation_prompt": False},
            "continue_final_message",
        ),
        ({"messages": USER, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": USER, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"messages": USER, "reasoning_effort": "much"}, "reasoning_effort"),
        ({"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
        ({"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": USER, "max_tokens": 64}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 64}]}, "messages"),
    ],
)
async def test_refusals(running, body, param):
    for stream in (False, True):
        status, answer = await running.post("/v1/chat/completions", {**body, "stream": stream})
        assert status == 400
        assert answer["error"]["param"] == param
        assert answer["error"]["code"] == 400
        assert answer["error"]["type"] == "BadRequestError"
    assert not running.engine.seen


async def test_neutral_values_of_what_is_not_built(running):
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "best_of": 1,
        "use_beam_search": False,
        "guided_json": None,
        "structured_outputs": None,
        "echo": False,
        "user": "someone",
        "never_heard_of": {"x": 1},
    }
    status, _ = await running.post("/v1/chat/completions", {"messages": USER, "max_tokens": 1, **neutral})
    assert status == 200


async def test_no_template(running):
    running.engine.tokenizer.has_chat_template = False
    status, answer = await running.post("/v1/chat/completions", {"messages": USER})
    assert status == 400
    assert "chat template" in answer["error"]["message"]
    status, _ = await running.post("/v1/completions", {"prompt": "hi", "max_tokens": 1})
    assert status == 200
