"""``octavo chat`` and ``octavo complete``: a terminal for any server with OpenAI's API. Only the standard library."""

import http.client
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 600.0


class ClientError(Exception):
    """The server cannot be reached, or refuses; the message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """Talks to the server at ``url`` (with or without ``/v1``)."""

    url: str
    api_key: str | None = None

    def default_model(self) -> str:
        """The first model that the server lists. Raises ClientError."""
        connection, response = self._request("GET", "models", None)
        try:
            models = json.loads(response.read())["data"]
        finally:
            connection.close()
        if not models:
            raise ClientError("the server lists no model")
        return models[0]["id"]

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """First choices of a stream's chunks. Raises ClientError, also for a stream that is cut off."""
        connection, response = self._request("POST", path, body | {"stream": True})
        try:
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if not data or not line.startswith(b"data: "):
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ClientError(chunk["error"]["message"])
                if chunk["choices"]:
                    yield chunk["choices"][0]
            raise ClientError("the answer ended before it was complete")
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"the answer ended before it was complete: {error}") from None
        finally:
            connection.close()

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        base = parts.path.rstrip("/").removesuffix("/v1")
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection = kind(parts.netloc, timeout=CONNECT_TIMEOUT_S)
            data = None if body is None else json.dumps(body)
            connection.request(method, f"{base}/v1/{path}", data, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"no answer from {self.url}: {error}") from None
        if response.status != 200:
            text = response.read().decode("utf-8", "replace")
            connection.close()
            raise ClientError(f"{response.status}: {_message(text)}")
        return connection, response


def _message(text: str) -> str:
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text[:500]


def chat(client: Client, model: str | None, options: dict[str, Any], system: str | None, once: str | None) -> int:
    """One answer to ``once``, or a conversation until end of file. Returns the exit code."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def answer(text: str) -> None:
        body = {"model": model or client.default_model(), "messages": [*messages, {"role": "user", "content": text}]}
        pieces = (choice["delta"].get("content") or "" for choice in client.stream("chat/completions", body | options))
        reply = _print_pieces(pieces, sys.stdout)
        messages.extend([{"role": "user", "content": text}, {"role": "assistant", "content": reply}])

    return _converse(answer, once)


def complete(client: Client, model: str | None, options: dict[str, Any], once: str | None) -> int:
    """Continues ``once``, or every line until end of file. Returns the exit code."""

    def answer(text: str) -> None:
        body = {"model": model or client.default_model(), "prompt": text}
        _print_pieces((choice["text"] for choice in client.stream("completions", body | options)), sys.stdout)

    return _converse(answer, once)


def _print_pieces(pieces: Iterator[str], out: TextIO) -> str:
    """Prints as it comes; Ctrl-C ends this answer and keeps what there is."""
    parts = []
    try:
        for piece in pieces:
            parts.append(piece)
            print(piece, end="", flush=True, file=out)
    except KeyboardInterrupt:
        pass
    print(file=out)
    return "".join(parts)


def _converse(answer: Callable[[str], None], once: str | None) -> int:
    try:
        if once is not None:
            answer(once)
            return 0
        while True:
            try:
                text = input("> " if sys.stdin.isatty() else "")
            except (EOFError, KeyboardInterrupt):
                return 0
            if text.strip():
                answer(text)
    except ClientError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
