"""Every error as JSON in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``, code = HTTP status."""

import logging
from collections.abc import Mapping

from aiohttp import web

from ..engine.errors import EngineDeadError, QueueFullError, RequestError
from .protocol.responses import encode_json

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """An answer other than 2xx. ``param`` names the field at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return encode_json({"error": error})

    def response(self) -> web.Response:
        response = web.Response(body=self.body(), status=self.status, content_type="application/json")
        response.headers.update(self.headers)
        return response


def unavailable(message: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    return ApiError(503, message, headers={"Retry-After": str(retry_after_s)})


def as_api_error(error: BaseException) -> ApiError:
    """What the caller is told. Anything unforeseen is logged with its traceback and told as 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), error.param)
    if isinstance(error, QueueFullError):
        return unavailable(str(error) or "the queue is full")
    if isinstance(error, EngineDeadError):
        return unavailable("the engine has stopped; this server can generate nothing more")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, f"the request body is too large: {error.text}")
    if isinstance(error, web.HTTPException):
        return _from_http(error)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal server error")


def _from_http(error: web.HTTPException) -> ApiError:
    if error.status == 404:
        return ApiError(404, "no such route")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return ApiError(405, f"{error.method} is not allowed here, only {allowed}", headers={"Allow": allowed})
    return ApiError(error.status, error.text or error.reason)
