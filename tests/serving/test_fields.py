"""The table of request fields agrees with the request structs, and the three lists do what they say (R28)."""

import logging

import pytest
from msgspec.structs import fields

from octavo.engine.errors import RequestError
from octavo.serving.protocol.fields import FIELDS, Api, select_fields, served_fields
from octavo.serving.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_request,
)

STRUCTS = {
    Api.CHAT: ChatRequest,
    Api.COMPLETIONS: CompletionRequest,
    Api.TOKENIZE: TokenizeRequest,
    Api.DETOKENIZE: DetokenizeRequest,
}


@pytest.mark.parametrize("api", list(Api))
def test_what_is_served_is_what_the_struct_has(api):
    assert served_fields(api) == {field.name for field in fields(STRUCTS[api])}


def test_no_field_is_in_two_lists():
    seen = [(field.name, api) for field in FIELDS for api in field.apis]
    assert len(seen) == len(set(seen))


NOT_BUILT = [(field, api) for field in FIELDS if field.neutral is not None for api in sorted(field.apis)]


@pytest.mark.parametrize(("field", "api"), NOT_BUILT, ids=lambda item: getattr(item, "name", item))
def test_not_built(field, api):
    for value in (None, *field.neutral):
        assert select_fields(api, {field.name: value}) == {}
    for value in ({"unheard": "of"}, ["x"], 7, "x", True):
        with pytest.raises(RequestError, match=field.name) as refused:
            select_fields(api, {field.name: value})
        assert refused.value.param == field.name


def test_neutral_values_are_exact():
    """1 equals True and 0 equals False, but they are not the same request."""
    with pytest.raises(RequestError):
        select_fields(Api.CHAT, {"best_of": True})
    with pytest.raises(RequestError):
        select_fields(Api.CHAT, {"use_beam_search": 0})


def test_what_is_not_known_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="octavo"):
        for _ in range(3):
            assert select_fields(Api.CHAT, {"a_field_of_tomorrow": 1, "n": 2}) == {"n": 2}
    assert caplog.text.count("a_field_of_tomorrow") == 1


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{}", "prompt", "required"),
        (b'{"prompt": "a", "stop": [1]}', "stop", "stop[0]: Expected str, got int"),
        (b'{"prompt": "a", "stream_options": {"include_usage": 1}}', "stream_options", "stream_options.include_usage"),
        (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias", "Expected int"),
        (b'{"prompt": "a", "logit_bias": {"1": NaN}}', "logit_bias", "finite"),
        (b'{"prompt": "\\ud800"}', None, "not JSON"),
    ],
)
def test_messages(body, param, words):
    with pytest.raises(RequestError) as refused:
        parse_request(body, CompletionRequest)
    assert refused.value.param == param
    assert words in str(refused.value)
