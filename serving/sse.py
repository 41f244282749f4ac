"""Server-sent events: frames, late headers, one way to end, and no patience for readers that do not read."""

import asyncio

from aiohttp import web

from .errors import as_api_error

DONE = b"data: [DONE]\n\n"
_ROOM_BYTES = 1 << 14
"""As much may wait in a connection's buffer before writing has to wait, which aiohttp does from 64 KiB on."""

CLIENT_GONE = 499
"""The status in logs and metrics when nobody was left to get one."""

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class StalledReaderError(ConnectionError):
    """The client took nothing for too long; its connection has been cut."""


def frame(payload: bytes) -> bytes:
    """One event. JSON holds no raw line break, so a single data line is enough."""
    return b"data: " + payload + b"\n\n"


class EventStream:
    """Writes events to one client. The HTTP status is sent with the first one, not before.

    What a slow client has not taken stays in the socket's buffer (bounded: writing waits) and, beyond that, in the
    engine's merging slot for the request.
    """

    def __init__(self, request: web.Request, stall_timeout_s: float) -> None:
        self._request = request
        self._stall_timeout_s = stall_timeout_s
        self._response: web.StreamResponse | None = None

    async def send(self, data: bytes) -> None:
        """Sends frames. Raises StalledReaderError when the client has taken nothing for the stall time."""
        if self._response is not None and self._has_room(data):
            await self._response.write(data)  # does not wait, so it needs no timer, which would cost as much again
            return
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                if self._response is None:
                    response = web.StreamResponse(headers=HEADERS)
                    await response.prepare(self._request)
                    self._response = response
                await self._response.write(data)
        except TimeoutError:
            raise self._drop() from None

    async def end(self) -> web.StreamResponse:
        """The regular end."""
        return await self._close(DONE)

    async def fail(self, error: Exception) -> web.StreamResponse:
        """The other end: one error event. Before the first event the error is raised, to become an HTTP status."""
        if self._response is None or isinstance(error, ConnectionError):
            raise error
        return await self._close(frame(as_api_error(error).body()))

    async def _close(self, last: bytes) -> web.StreamResponse:
        await self.send(last)
        assert self._response is not None
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._response.write_eof()
        except TimeoutError:
            raise self._drop() from None
        return self._response

    def _has_room(self, data: bytes) -> bool:
        transport = self._request.transport
        return transport is not None and transport.get_write_buffer_size() + len(data) < _ROOM_BYTES

    def _drop(self) -> StalledReaderError:
        if self._request.transport is not None:
            self._request.transport.abort()
        return StalledReaderError(f"the client read nothing for {self._stall_timeout_s:g} s")
