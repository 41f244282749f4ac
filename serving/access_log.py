"""One log line per HTTP request; probes and scrapes only at debug level, or they would drown the rest."""

import logging

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http_exceptions import HttpProcessingError

from .state import request_label

PROBES = frozenset({"/live", "/health", "/ready", "/metrics"})


class AccessLog(AbstractAccessLogger):
    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """``time`` is seconds."""
        level = logging.DEBUG if request.path in PROBES else logging.INFO
        if not self.logger.isEnabledFor(level):
            return
        label = request_label(request) if isinstance(request, web.Request) else "-"
        self.logger.log(
            level, "%s %s %s %d %.3f s (%s)", request.remote, request.method, request.path, response.status, time, label
        )


def drop_bad_requests(record: logging.LogRecord) -> bool:
    """A filter: bytes that are no HTTP are answered 400, and with a traceback for each a port scanner fills the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
