"""Chat messages as a template needs them, whatever of OpenAI's forms the caller used (rule R21)."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import RequestError

MAX_NESTING = 64
"""Deepest nesting of lists and objects in messages, tools and template arguments."""
_TEXT_PARTS = ("text", "input_text", "output_text")


def normalise_messages(messages: Sequence[Mapping[str, Any]], *, as_parts: bool) -> list[dict[str, Any]]:
    """Checked copies of the messages.

    ``content`` becomes one string (text parts joined by newlines), or with ``as_parts`` a list of
    text parts. Missing or null content of an assistant message with tool calls is ""; elsewhere it
    is an error. ``tool_calls[].function.arguments`` becomes an object. ``reasoning`` and its older
    name ``reasoning_content`` are both there if one is. Other keys stay.
    Raises RequestError naming the message.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a non-empty list", "messages")
    return [_message(message, f"messages[{index}]", as_parts) for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str, as_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a string", f"{where}.role")
    result = map_strings(dict(message), lambda text: text)
    tool_calls = result.get("tool_calls")
    if tool_calls is None:
        result.pop("tool_calls", None)
    else:
        result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in _items(tool_calls, where)]
    thoughts = result.get("reasoning") or result.get("reasoning_content")
    if thoughts is not None:
        # The newer and the older name: templates read one, clients send the other.
        result |= {"reasoning": thoughts, "reasoning_content": thoughts}
    content = result.get("content")
    if content is None:
        if role != "assistant" or not tool_calls:
            raise RequestError(f"{where}.content must not be null", f"{where}.content")
        content = ""
    text = content if isinstance(content, str) else _joined_text(content, where)
    result["content"] = [{"type": "text", "text": text}] if as_parts else text
    return result


def _items(tool_calls: Any, where: str) -> list[tuple[int, Any]]:
    if not isinstance(tool_calls, list):
        raise RequestError(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
    return list(enumerate(tool_calls))


def _joined_text(content: Any, where: str) -> str:
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of parts", f"{where}.content")
    texts: list[str] = []
    for index, part in enumerate(content):
        name = f"{where}.content[{index}]"
        kind = part.get("type", "text") if isinstance(part, dict) else "text" if isinstance(part, str) else None
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise RequestError(f"{name}: only text parts are supported, got type {kind!r}", name)
        if not isinstance(text, str):
            raise RequestError(f"{name}.text must be a string", name)
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function.name must be a string", where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Templates print arguments as JSON themselves; given a string they would print a quoted one.
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise RequestError(f"{where}.function.arguments is not JSON: {error}", where) from error
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.function.arguments must be a JSON object", where)
    return {**call, "function": {**function, "arguments": arguments}}


def normalise_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Copies of the tool definitions; an empty list is None: templates test for presence."""
    if not tools:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise RequestError("tools must be a list", "tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{index}] must be an object", "tools")
    return map_strings(list(tools), lambda text: text)


def append_to_final_message(messages: list[dict[str, Any]], mark: str) -> None:
    """Puts ``mark`` after the last message's text; the messages are :func:`normalise_messages`'s."""
    content = messages[-1]["content"]
    if isinstance(content, str):
        messages[-1]["content"] = content + mark
    else:
        content[-1]["text"] += mark


def map_strings(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """A deep copy of plain data with every string, keys of objects included, put through ``change``.

    Raises RequestError when it is nested deeper than MAX_NESTING.
    """
    if isinstance(value, str):
        return change(value)
    if depth > MAX_NESTING:
        raise RequestError(f"messages and tools must not be nested deeper than {MAX_NESTING} levels", "messages")
    if isinstance(value, Mapping):
        return {
            change(key) if isinstance(key, str) else key: map_strings(item, change, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [map_strings(item, change, depth + 1) for item in value]
    return value
