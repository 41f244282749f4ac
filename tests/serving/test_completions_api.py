"""/v1/completions through the openai client, against hand-computed answers."""

import pytest


async def test_answer(running):
    answer = await running.openai().completions.create(model="org/perm-alias", prompt="xy", max_tokens=4)
    assert answer.choices[0].text == "zabc"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model) == ("text_completion", "org/perm-alias")
    assert answer.id.startswith("cmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)


async def test_default_max_tokens_is_16_or_what_fits(running):
    client = running.openai()
    assert len((await client.completions.create(model="perm", prompt="a")).choices[0].text) == 16
    assert len((await client.completions.create(model="perm", prompt="a" * 60)).choices[0].text) == 3


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a", ["bc"]),
        (["a", "k"], ["bc", "lm"]),
        ([97, 98], ["cd"]),
        ([[97], [107, 108]], ["bc", "mn"]),
    ],
)
async def test_forms_of_prompt(running, prompt, texts):
    answer = await running.openai().completions.create(model="perm", prompt=prompt, max_tokens=2)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))


async def test_index_is_prompt_times_n_plus_choice(running):
    options = {"model": "perm", "prompt": ["a", "k"], "n": 2, "temperature": 1, "max_tokens": 2}
    answer = await running.openai().completions.create(**options)
    assert [choice.text for choice in answer.choices] == ["bc", "cd", "lm", "mn"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 8)


async def stream(client, **options):
    """(choices joined by index, usages) of a stream."""
    joined, usages = {}, []
    async for chunk in await client.completions.create(stream=True, **options):
        if not chunk.choices:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            state = joined.setdefault(choice.index, {"text": "", "finish": None, "stop": None, "logprobs": {}})
            assert state["finish"] is None, "a chunk after the finish"
            assert choice.text or choice.finish_reason or choice.logprobs, "an empty chunk"
            state["text"] += choice.text
            state["finish"] = choice.finish_reason
            state["stop"] = choice.model_extra["stop_reason"]
            if choice.logprobs:
                for name, values in choice.logprobs.model_dump().items():
                    state["logprobs"].setdefault(name, []).extend(values)
    return joined, usages


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "a"},
        {"prompt": ["a", "k", "x"], "n": 2, "temperature": 1},
        {"prompt": "a", "stop": ["fg"]},
        {"prompt": "a", "stop": ["fghX", "efghX"], "max_tokens": 7},
        {"prompt": "a", "logprobs": 3},
        {"prompt": "a", "logprobs": 0},
        {"prompt": ["abc", "xyz"], "echo": True},
        {"prompt": ["abc", "xyz"], "echo": True, "logprobs": 2, "n": 2, "temperature": 1},
        {"prompt": ["abc", "xyz"], "echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt": "abc", "echo": True, "max_tokens": 0},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
async def test_stream_equals_answer(launch, options):
    """R7: text, finish, stop, log-probabilities and usage are those of the whole answer."""
    client = (await launch(eos_after=10)).openai()
    whole = await client.completions.create(model="perm", **options)
    joined, usages = await stream(client, model="perm", stream_options={"include_usage": True}, **options)
    assert usages == [whole.usage]
    assert len(joined) == len(whole.choices)
    for choice in whole.choices:
        state = joined[choice.index]
        assert state["text"] == choice.text
        assert state["finish"] == choice.finish_reason
        assert state["stop"] == choice.model_extra["stop_reason"]
        assert state["logprobs"] == (choice.logprobs.model_dump() if choice.logprobs else {})


async def test_logprobs(running):
    answer = await running.openai().completions.create(model="perm", prompt="a", max_tokens=2, logprobs=4)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["b", "c"]
    assert logprobs.token_logprobs == [-1.0, -1.0]
    assert logprobs.text_offset == [0, 1]
    assert logprobs.top_logprobs[0] == {"b": -1.0, "i": -0.5, "k": -1.5, "m": -9999.0}


async def test_logprobs_0_is_the_token_alone(running):
    answer = await running.openai().completions.create(model="perm", prompt="a", max_tokens=1, logprobs=0)
    assert answer.choices[0].logprobs.top_logprobs == [{"b": -1.0}]


async def test_loglikelihood_of_a_prompt(running):
    """What lm-eval asks for: token ids, echo, one token or none, logprobs 1."""
    for max_tokens in (0, 1):
        answer = await running.openai().completions.create(
            model="perm", prompt=[[97, 98, 99]], echo=True, max_tokens=max_tokens, logprobs=1
        )
        choice = answer.choices[0]
        assert choice.text == "abcd"[: 3 + max_tokens]
        assert choice.logprobs.tokens == list(choice.text)
        assert choice.logprobs.token_logprobs == [None, -1.0, -1.0, -1.0][: 3 + max_tokens]
        assert choice.logprobs.text_offset == [0, 1, 2, 3][: 3 + max_tokens]
        assert choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.top_logprobs[1] == {"b": -1.0, "i": -0.5}
        assert choice.finish_reason == "length"
        assert answer.usage.completion_tokens == max_tokens


async def test_echo_leaves_out_the_begin_token(running):
    """The tokens, joined, are the text."""
    answer = await running.openai().completions.create(model="perm", prompt="abc", echo=True, max_tokens=1, logprobs=0)
    choice = answer.choices[0]
    assert choice.text == "abcd" == "".join(choice.logprobs.tokens)
    assert choice.logprobs.text_offset == [0, 0, 1, 2, 3]


async def test_token_ids_instead_of_texts(running):
    body = {
        "prompt": [97],
        "max_tokens": 2,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }
    _, answer = await running.post("/v1/completions", body)
    choice = answer["choices"][0]
    assert choice["logprobs"]["tokens"] == ["token_id:98", "token_id:99"]
    assert choice["token_ids"] == [98, 99]
    assert choice["prompt_token_ids"] == [97]


async def test_add_special_tokens(running):
    await running.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "add_special_tokens": False})
    assert running.engine.seen[-1][0] == [97]
    await running.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert running.engine.seen[-1][0] == [256, 97]


async def test_context_length(running):
    """A context of 64: both numbers are named, and the last place is usable."""
    cases = [(62, None, 200), (63, 1, 200), (63, 2, 400), (64, 1, 400), (65, None, 400)]
    for length, max_tokens, expected in cases:
        body = {"prompt": [97] * length, "max_tokens": max_tokens}
        status, answer = await running.post("/v1/completions", body)
        assert status == expected, (length, max_tokens)
        if status == 400:
            assert "64" in answer["error"]["message"]
            assert str(length) in answer["error"]["message"]


async def test_one_bad_prompt_of_many_runs_none(running):
    status, answer = await running.post("/v1/completions", {"prompt": [[97], [97] * 65], "max_tokens": 2})
    assert status == 400
    assert answer["error"]["param"] == "prompt"
    assert not running.engine.seen


@pytest.mark.parametrize(
    "prompt", [[999999], [-1], [258], [[-1]], [], "", [[]], [""], [1.5], [True], [[97], "a"], [97, "a"]]
)
async def test_bad_prompts(running, prompt):
    status, answer = await running.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert status == 400
    assert answer["error"]["param"] == "prompt"
    assert not running.engine.seen


async def test_too_many_prompts(launch):
    running = await launch(max_prompts=3)
    assert (await running.post("/v1/completions", {"prompt": ["a"] * 3, "max_tokens": 1}))[0] == 200
    assert (await running.post("/v1/completions", {"prompt": ["a"] * 4, "max_tokens": 1}))[0] == 400
    assert (await running.post("/v1/completions", {"prompt": [97] * 4, "max_tokens": 1}))[0] == 200, "one prompt of ids"


async def test_no_tokenizer(running):
    running.engine.tokenizer = None
    assert (await running.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))[0] == 400
    assert (await running.post("/v1/completions", {"prompt": [97], "max_tokens": 1}))[0] == 200


SP_ROWS = [
    ("n", 0),
    ("n", 10**6),
    ("n", "2"),
    ("n", True),
    ("n", 2.0),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 0.01),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("min_tokens", 17),
    ("logprobs", -1),
    ("logprobs", 6),
    ("logprobs", True),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 6),
    ("seed", 2**63),
    ("seed", 1.5),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", ["x"] * 100000),
    ("stop", ["x" * 10**6]),
    ("stop_token_ids", [999999]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("logit_bias", {"999999": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"x": 5}),
    ("logit_bias", {"1": 1e9}),
    ("logit_bias", {str(i): 1 for i in range(100000)}),
    ("echo", "true"),
    ("stream", 1),
    ("suffix", "after"),
    ("best_of", 2),
    ("use_beam_search", True),
    ("prompt_embeds", "AAAA"),
    ("allowed_token_ids", [1]),
    ("bad_words", ["x"]),
    ("guided_regex", "a+"),
    ("structured_outputs", {"regex": "a+"}),
    ("response_format", {"type": "json_object"}),
    ("truncate_prompt_tokens", 5),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"include_usage": "yes"}),
    ("priority", "high"),
]


@pytest.mark.parametrize(("name", "value"), SP_ROWS, ids=lambda item: str(item)[:30])
async def test_bad_values_name_their_field(running, name, value):
    status, answer = await running.post("/v1/completions", {"prompt": "a", name: value})
    assert status == 400
    assert answer["error"]["param"] == name
    assert name in answer["error"]["message"]
    assert not running.engine.seen
    assert (await running.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))[0] == 200, "alive afterwards"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
async def test_no_number_that_is_not_finite(running, name, literal):
    body = f'{{"prompt": "a", "{name}": {literal}}}'
    async with running.http.post(
        "/v1/completions", data=body, headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == name


async def test_prompt_logprobs_are_not_streamed(running):
    body = {"prompt": "a", "stream": True, "prompt_logprobs": 1}
    status, answer = await running.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
