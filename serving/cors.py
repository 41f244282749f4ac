"""Cross-origin requests: preflights are answered before any key is asked for, and errors carry the headers too."""

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web


@dataclass(frozen=True, kw_only=True)
class CorsPolicy:
    """``origins`` empty: no page of another origin may read answers; ``*``: any may."""

    origins: Sequence[str] = ()
    methods: Sequence[str] = ("*",)
    headers: Sequence[str] = ("*",)
    credentials: bool = False

    def response_headers(self, request: web.Request) -> dict[str, str]:
        origin = request.headers.get("Origin")
        any_origin = "*" in self.origins
        if origin is None or not (any_origin or origin in self.origins):
            return {}
        result = {"Access-Control-Allow-Origin": "*" if any_origin and not self.credentials else origin}
        if result["Access-Control-Allow-Origin"] != "*":
            result["Vary"] = "Origin"
        if self.credentials:
            result["Access-Control-Allow-Credentials"] = "true"
        result["Access-Control-Expose-Headers"] = "X-Request-Id"
        if request.method == "OPTIONS":
            result |= self._preflight_headers(request)
        return result

    def _preflight_headers(self, request: web.Request) -> dict[str, str]:
        # With "*" what was asked for is given back: the literal "*" does not cover Authorization.
        wanted_method = request.headers.get("Access-Control-Request-Method", "GET")
        wanted_headers = request.headers.get("Access-Control-Request-Headers", "")
        return {
            "Access-Control-Allow-Methods": wanted_method if "*" in self.methods else ", ".join(self.methods),
            "Access-Control-Allow-Headers": wanted_headers if "*" in self.headers else ", ".join(self.headers),
            "Access-Control-Max-Age": "600",
        }
