"""Routes for development: there when asked for, and what they answer."""

import asyncio

import pytest

from octavo.serving import cli, flags


async def reset(running, query: str = "") -> int:
    async with running.http.post(f"/reset_prefix_cache{query}") as response:
        return response.status


async def test_resetting_the_prefix_cache(launch):
    running = await launch(dev_mode=True, hold=True)
    assert await reset(running) == 200
    task = asyncio.create_task(running.post("/v1/completions", {"prompt": "a", "max_tokens": 2}))
    while not running.engine.open:  # noqa: ASYNC110 - the fake has no event for it
        await asyncio.sleep(0.005)
    assert await reset(running) == 409, "while requests hold blocks"
    running.engine.release.set()
    await task
    assert await reset(running, "?reset_running_requests=false&reset_external=true") == 200
    assert await reset(running, "?reset_running_requests=true") == 400


async def test_it_is_not_there_by_default(running):
    assert await reset(running) == 404


async def test_it_needs_a_key_and_an_engine(launch):
    running = await launch(dev_mode=True, api_keys=["secret"])
    assert await reset(running) == 401
    starting = await launch(dev_mode=True, ready=False)
    assert await reset(starting) == 503


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
@pytest.mark.parametrize("name", ["OCTAVO_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE"])
def test_the_environment_asks_for_it(monkeypatch, name, value, on):
    seen = []

    def note(module):
        class Module:
            EngineConfig = cli.importlib.import_module("octavo.engine.config").EngineConfig

            @staticmethod
            def run_supervisor(args, options, log_level):
                seen.append(options.dev_mode)
                return 0

        return Module

    for other in cli.DEV_MODE_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "_load", note)
    assert cli.main(["serve", "somewhere"]) == 0
    assert seen == [on]


def test_server_options_leave_it_out_unless_told():
    parser = cli.make_parser()
    args = parser.parse_args(["serve", "somewhere"])
    assert flags.server_options(args, []).dev_mode is False
