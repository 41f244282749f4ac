"""Keys: everything needs one, once a key is configured, except a short public list (rule R27)."""

import hmac
from collections.abc import Sequence

from aiohttp import web

from .errors import ApiError

PUBLIC_PATHS = frozenset({"/health", "/live", "/ready"})


class KeyCheck:
    """Checks ``Authorization: Bearer <key>``; with no keys every request passes."""

    def __init__(self, keys: Sequence[str], public_metrics: bool = False) -> None:
        self._keys = tuple(key.encode("utf-8") for key in keys)
        self._public = PUBLIC_PATHS | ({"/metrics"} if public_metrics else set())

    def check(self, request: web.Request) -> None:
        """Raises ApiError 401. The raw path is compared, so that no other spelling of a path is public."""
        if not self._keys or request.method == "OPTIONS" or request.raw_path.partition("?")[0] in self._public:
            return
        if not self._matches(request.headers.getall("Authorization", [])):
            message = "a valid API key is needed: send the header 'Authorization: Bearer <key>'"
            raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})

    def _matches(self, headers: Sequence[str]) -> bool:
        if len(headers) != 1:
            return False
        scheme, _, given = headers[0].partition(" ")
        # aiohttp keeps bytes that are not UTF-8 as surrogates; this turns them back into the bytes sent.
        candidate = given.strip().encode("utf-8", "surrogateescape")
        # Every key is compared, so that the time taken does not tell which one matched.
        matched = [hmac.compare_digest(candidate, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matched)
