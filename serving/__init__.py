"""The HTTP server (OpenAI's API), its metrics, and the command line.

A request's way through: ``app`` (middlewares: count, CORS, errors, key) -> a handler (``completions``, ``chat``) ->
``protocol`` (exact types, known fields) -> ``sampling`` and ``prompts`` (engine options, token ids, context check) ->
``generation`` (one merged, bounded stream of outputs) -> a builder of one JSON body, or ``sse`` for a stream.
Nothing here imports jax; the engine is reached through the protocol in ``engine_client``.
"""
