"""Cross-origin requests: preflights are answered before any key is asked for, and errors carry the headers too."""

from aiohttp import web

from .options import CorsPolicy


def cors_headers(policy: CorsPolicy, request: web.Request) -> dict[str, str]:
    """Headers for the answer to ``request``; none when its origin is not allowed or not named."""
    origin = request.headers.get("Origin")
    any_origin = "*" in policy.origins
    if origin is None or not (any_origin or origin in policy.origins):
        return {}
    result = {"Access-Control-Allow-Origin": "*" if any_origin and not policy.credentials else origin}
    if result["Access-Control-Allow-Origin"] != "*":
        result["Vary"] = "Origin"
    if policy.credentials:
        result["Access-Control-Allow-Credentials"] = "true"
    result["Access-Control-Expose-Headers"] = "X-Request-Id"
    if request.method == "OPTIONS":
        result |= _preflight_headers(policy, request)
    return result


def _preflight_headers(policy: CorsPolicy, request: web.Request) -> dict[str, str]:
    # With "*" what was asked for is given back: the literal "*" does not cover Authorization.
    wanted_method = request.headers.get("Access-Control-Request-Method", "GET")
    wanted_headers = request.headers.get("Access-Control-Request-Headers", "")
    return {
        "Access-Control-Allow-Methods": wanted_method if "*" in policy.methods else ", ".join(policy.methods),
        "Access-Control-Allow-Headers": wanted_headers if "*" in policy.headers else ", ".join(policy.headers),
        "Access-Control-Max-Age": "600",
    }
