"""The one table of request fields (rule R28).

Every field a client may send is in one of three lists: served; known but not built, which is refused by name unless
it has a neutral value; and anything else, which is ignored and logged once by name.
"""

import enum
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...engine.errors import RequestError

logger = logging.getLogger(__name__)

MAX_LOGGED_NAMES = 1000
"""Most names of ignored fields remembered (and so logged), and 64 characters of each: clients choose them."""


class Api(enum.StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"


@dataclass(frozen=True, slots=True)
class Field:
    """``neutral`` is None for a served field; else the values that ask for nothing (null always does)."""

    name: str
    apis: frozenset[Api]
    neutral: tuple[object, ...] | None = None


GENERATE = (Api.CHAT, Api.COMPLETIONS)


def _served(apis: Iterable[Api], names: str) -> list[Field]:
    return [Field(name, frozenset(apis)) for name in names.split()]


def _not_built(apis: Iterable[Api], *fields: tuple[str, tuple[object, ...]]) -> list[Field]:
    return [Field(name, frozenset(apis), neutral) for name, neutral in fields]


FIELDS: tuple[Field, ...] = (
    *_served(
        GENERATE,
        "model n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop "
        "stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs skip_special_tokens "
        "spaces_between_special_tokens include_stop_str_in_output logit_bias stream stream_options "
        "priority cache_salt return_token_ids return_tokens_as_token_ids",
    ),
    *_served(
        (Api.CHAT,),
        "messages max_completion_tokens top_logprobs add_generation_prompt continue_final_message "
        "chat_template_kwargs reasoning_effort",
    ),
    *_served((Api.COMPLETIONS,), "prompt echo add_special_tokens"),
    *_served(
        (Api.TOKENIZE,),
        "model prompt messages add_special_tokens add_generation_prompt continue_final_message chat_template_kwargs "
        "return_token_strs",
    ),
    *_served((Api.DETOKENIZE,), "model tokens"),
    *_not_built(
        GENERATE,
        ("best_of", (1,)),
        ("use_beam_search", (False,)),
        ("length_penalty", (1.0, 1)),
        ("logits_processors", ([],)),
        ("logprob_token_ids", ([],)),
        ("allowed_token_ids", ()),
        ("bad_words", ([],)),
        ("truncate_prompt_tokens", ()),
        ("thinking_token_budget", ()),
        ("repetition_detection", ()),
        ("watermarking", ()),
        ("response_format", ({"type": "text"},)),
        ("structured_outputs", ()),
        ("guided_json", ()),
        ("guided_regex", ()),
        ("guided_choice", ()),
        ("guided_grammar", ()),
        ("guided_decoding_backend", ()),
        ("guided_whitespace_pattern", ()),
        ("prompt_embeds", ()),
        ("kv_transfer_params", ()),
        ("ec_transfer_params", ()),
        ("vllm_xargs", ({},)),
        ("stream_interval", (1,)),
        ("return_token_offsets", (False,)),
        ("return_prompt_text", (False,)),
    ),
    *_not_built((Api.COMPLETIONS,), ("suffix", ("",))),
    *_not_built(
        (Api.CHAT,),
        ("tool_choice", ("none", "auto")),
        ("functions", ([],)),
        ("function_call", ("none", "auto")),
        ("modalities", (["text"],)),
        ("audio", ()),
        ("prediction", ()),
        ("web_search_options", ()),
        ("echo", (False,)),
        ("add_special_tokens", (False,)),
        ("media_io_kwargs", ({},)),
    ),
    *_not_built(
        (Api.CHAT, Api.TOKENIZE),
        ("tools", ([],)),
        ("documents", ([],)),
        ("chat_template", ()),
        ("mm_processor_kwargs", ({},)),
    ),
)

_TABLE: dict[Api, dict[str, Field]] = {api: {field.name: field for field in FIELDS if api in field.apis} for api in Api}
_logged: set[str] = set()


def served_fields(api: Api) -> frozenset[str]:
    """Names of the fields that ``api`` serves."""
    return frozenset(name for name, field in _TABLE[api].items() if field.neutral is None)


def select_fields(api: Api, body: Mapping[str, Any]) -> dict[str, Any]:
    """The served fields of ``body`` that were given; null means not given.

    Raises RequestError for a field that is known but not built, unless it is at a neutral value.
    """
    table = _TABLE[api]
    selected: dict[str, Any] = {}
    for name, value in body.items():
        field = table.get(name)
        if field is None:
            _log_ignored(api, name)
        elif value is None:
            continue
        elif field.neutral is None:
            selected[name] = value
        elif not any(type(value) is type(neutral) and value == neutral for neutral in field.neutral):
            raise RequestError(f"{name} is not supported yet", name)
    return selected


def _log_ignored(api: Api, name: str) -> None:
    name = name[:64]
    if name not in _logged and len(_logged) < MAX_LOGGED_NAMES:
        _logged.add(name)
        logger.info("request field %r is not known (%s) and is ignored; said once", name, api)
