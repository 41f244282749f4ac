"""From chat messages to prompt text: normalised messages, a sandboxed template, and limits (rule R21).

The template is the operator's (the model's own, or ``--chat-template``), never the caller's. The
messages are the caller's, so text in them that spells a control token must stay text: see
:meth:`ChatTemplate.render`.
"""

import contextvars
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from .chat_messages import append_to_final_message, map_strings, normalise_messages, normalise_tools
from .errors import ConfigError, RequestError

MAX_RENDER_TIME_S = 5.0
MAX_RENDERED_CHARS = 16 * 2**20
_MAX_OPERATION_CHARS = 2**20
"""Longest string or list that one ``*`` in a template may make."""
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Code points that no text contains: Unicode keeps them for internal use."""
_RESERVED = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"),
        *("bos_token", "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now"),
    )
)
"""Names in a template that are not the caller's to set."""
_PROBE = "octavo-probe"

_deadline_s: contextvars.ContextVar[float] = contextvars.ContextVar("chat_template_deadline", default=float("inf"))


class ChatTemplate:
    """A compiled chat template.

    ``source`` is the template, or several by name: "tool_use" is taken when there are tools,
    "default" otherwise. ``special_tokens`` maps names as ``bos_token`` to their text. Raises
    ConfigError for a template that does not compile.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if not sources:
            raise ConfigError("the chat template is empty")
        environment = _Environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._wants_parts: dict[str, bool] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        control_tokens: Sequence[str] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """The prompt, as pieces to be encoded one by one and joined.

        Wherever the caller's text spells one of ``control_tokens``, a piece ends inside it, so that
        no piece contains it: what the template writes is control, what the caller writes is text.
        Almost always there is one piece. With ``continue_final_message`` the prompt ends with the
        last message's text. Raises RequestError for unfit messages, for what the template itself
        refuses, and for a template that fails or passes its limits.
        """
        _check_options(messages, add_generation_prompt, continue_final_message, chat_template_kwargs)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(f"the model has chat templates {sorted(self._templates)}, none named 'default'")
        as_parts = self._needs_parts(name)
        values: dict[str, Any] = {
            **(chat_template_kwargs or {}),
            "messages": normalise_messages(messages, as_parts=as_parts),
            "tools": normalise_tools(tools),
        }
        text_mark, end_mark = _unused_marks(values)
        if control_tokens:
            values = map_strings(values, _splitter(control_tokens, text_mark))
        if continue_final_message:
            append_to_final_message(values["messages"], end_mark)
        text = self._run(name, values, add_generation_prompt)
        if continue_final_message:
            text, found, _ = text.rpartition(end_mark)
            if not found:
                raise RequestError(
                    "continue_final_message: the chat template does not show the last message's text", "messages"
                )
        return text.split(text_mark)

    def _run(self, name: str, values: Mapping[str, Any], add_generation_prompt: bool) -> str:
        context = {**self._special_tokens, "documents": None, **values, "add_generation_prompt": add_generation_prompt}
        token = _deadline_s.set(time.monotonic() + MAX_RENDER_TIME_S)
        try:
            return "".join(_limited(self._templates[name].generate(context)))
        except RequestError:
            raise
        except jinja2.TemplateError as error:
            raise RequestError(f"chat template: {error.message or type(error).__name__}", "messages") from error
        except Exception as error:
            # The template is a program fed with the caller's data: whatever it raises is about that data.
            raise RequestError(f"chat template: {type(error).__name__}: {error}", "messages") from error
        finally:
            _deadline_s.reset(token)

    def _needs_parts(self, name: str) -> bool:
        """True for templates that show a message's text only when it comes as a list of parts."""
        if name not in self._wants_parts:
            parts = [{"type": "text", "text": _PROBE}]
            self._wants_parts[name] = not self._shows(name, _PROBE) and self._shows(name, parts)
        return self._wants_parts[name]

    def _shows(self, name: str, content: str | list[dict[str, str]]) -> bool:
        values = {"messages": [{"role": "user", "content": content}], "tools": None}
        try:
            text = self._run(name, values, True)
        except RequestError:
            return False
        # In quotes: the template printed the list, not the text in it.
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text


def _check_options(
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    continue_final_message: bool,
    kwargs: Mapping[str, Any] | None,
) -> None:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise RequestError("chat_template_kwargs must be an object", "chat_template_kwargs")
    for key in kwargs or ():
        if key in _RESERVED:
            raise RequestError(f"chat_template_kwargs must not set {key!r}", "chat_template_kwargs")
    if not continue_final_message:
        return
    if add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt must not both be true", "continue_final_message"
        )
    last = messages[-1] if isinstance(messages, Sequence) and messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        raise RequestError("continue_final_message needs a last message of role 'assistant'", "continue_final_message")


def _unused_marks(values: Mapping[str, Any]) -> tuple[str, str]:
    """Two characters that the caller's data does not contain, to mark places in it."""
    used: set[str] = set()
    map_strings(values, lambda text: used.update(text) or text)  # type: ignore[func-returns-value]
    free = [mark for mark in _NONCHARACTERS if mark not in used]
    if len(free) < 2:
        raise RequestError("the messages contain Unicode noncharacters", "messages")
    return free[0], free[1]


def _splitter(control_tokens: Sequence[str], mark: str) -> Any:
    """A function that puts ``mark`` after the first character of every control token in a text."""
    # A lookahead, so that overlapping ones are found too. One character cannot be split.
    spelled = "|".join(re.escape(token) for token in control_tokens if len(token) > 1)
    if not spelled:
        return lambda text: text
    pattern = re.compile(f"(?=(?:{spelled}))(.)", re.DOTALL)
    return lambda text: pattern.sub(rf"\1{mark}", text)


def _limited(pieces: Iterator[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_RENDERED_CHARS:
            raise RequestError(f"the chat template made more than {MAX_RENDERED_CHARS} characters", "messages")
        _check_deadline()
        yield piece


def _check_deadline() -> None:
    if time.monotonic() > _deadline_s.get():
        raise RequestError(f"the chat template took longer than {MAX_RENDER_TIME_S:g} s", "messages")


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox plus a deadline: a loop comes past one of these methods whenever it reads or makes a thing."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_deadline()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check_deadline()
        return super().getitem(obj, argument)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _check_deadline()
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_deadline()
        if operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and isinstance(times, int):
                    _check_size(len(sized) * times)
        elif operator == "**" and isinstance(right, int | float) and abs(right) > 64:
            raise SecurityError("exponents above 64 are not allowed")
        elif operator == "%" and isinstance(left, str) and re.search(r"\d{4,}|\*", left):
            raise SecurityError("a format with a width above 999 is not allowed")
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            _check_size(len(left) + len(right), MAX_RENDERED_CHARS)
        return super().call_binop(context, operator, left, right)


def _check_size(size: int, limit: int = _MAX_OPERATION_CHARS) -> None:
    if size > limit:
        raise SecurityError(f"an operation that makes {size} items is not allowed")


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; for inference it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own annotation

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes for HTML, and templates are written for one that does not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
