"""The command line: names, values, refusals, warnings; and the terminal clients against a real server."""

import asyncio
import subprocess
import sys

import pytest

from octavo import __version__
from octavo.engine.args import EngineArgs
from octavo.engine.config import EngineConfig
from octavo.serving import cli, flags


def parse(*argv: str):
    return cli.make_parser().parse_args(flags.normalise_names(["serve", *argv]))


def engine_args(*argv: str) -> EngineArgs:
    return flags.engine_args(parse(*argv))


def test_defaults_are_those_of_the_engine():
    """But for the queue's bound: a list of prompts given to ``LLM`` is not refused for its length."""
    assert engine_args() == EngineArgs(max_num_queued_reqs=16384)


def test_every_engine_option_has_a_flag():
    missing = set(EngineArgs.__dataclass_fields__) - set(vars(parse()))
    assert not missing


def test_values():
    args = engine_args(
        *(
            "some/model",
            "--served-model-name",
            "a",
            "b",
            "--max_model_len",
            "4k",
            "--max-num-seqs=8",
            "--dtype",
            "half",
        ),
        *("--max-num-batched-tokens", "1K", "--no-enable-prefix-caching", "--kv-cache-memory-bytes", "2G", "-tp", "2"),
        *("--hf-overrides", '{"rope_theta": 5}', "--swap_space", "0.5", "--seed", "-3", "--block_size", "32"),
    )
    assert args.model == "some/model"
    assert args.served_model_name == ("a", "b")
    assert (args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens) == (4000, 8, 1024)
    assert (args.dtype, args.block_size, args.seed, args.swap_space) == ("half", 32, -3, 0.5)
    assert args.enable_prefix_caching is False
    assert args.kv_cache_memory_bytes == 2 << 30
    assert args.hf_overrides == {"rope_theta": 5}
    assert args.tensor_parallel_size == 2


def test_async_scheduling_is_on_unless_told_otherwise():
    for argv, expected in [((), True), (("--async-scheduling",), True), (("--no_async_scheduling",), False)]:
        args = engine_args(*argv)
        assert args.async_scheduling is EngineConfig.from_args(args).scheduler.async_scheduling is expected


def test_context_length():
    assert engine_args("--max-model-len", "auto").max_model_len is None
    assert engine_args("--max-model-len=-1").max_model_len is None
    assert engine_args("--max-model-len", "-1").max_model_len is None


def test_underscores_in_values_stay():
    assert engine_args("--model=my_model").model == "my_model"
    assert engine_args("--model", "my_model").model == "my_model"
    assert engine_args("my_model").model == "my_model"


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), ("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("2m", 2 * 10**6), ("1.5G", 3 << 29)]
)
def test_human_int(text, value):
    assert flags.human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "1kk", "-1", "1.5", "1.0001k", "auto", "1e3", "0x10", "nan"])
def test_not_human_int(text):
    with pytest.raises(Exception, match="whole number"):
        flags.human_int(text)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--enable-lora"], "--enable-lora"),
        (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill"),
        (["-pp", "2"], "--pipeline-parallel-size"),
        (["--kv-cache-dtype", "fp8_e5m2"], "fp8_e5m2"),
        (["--scheduling_policy", "longest"], "scheduling_policy"),
        (["--max-num-queued-tokens", "0"], "max_num_queued_tokens"),
        (["--speculative-config", "{}"], "--speculative-config"),
        (["--watermark", "0.1"], "--watermark"),
        (["--served-model-name", "a", ""], "served_model_name"),
        (["--seed", str(2**63)], "seed"),
        (["--fully-sharded-loras"], "--fully-sharded-loras"),
        (["--dtype", "float99"], "float99"),
        (["--max-model-len", "many"], "--max-model-len"),
        (["--hf-overrides", "[]"], "--hf-overrides"),
        (["--generation-config", "some/folder"], "some/folder"),
        (["--override-generation-config", '{"temprature": 1}'], "temprature"),
        (["--override-generation-config", '{"top_p": 0}'], "top_p"),
        (["--ssl-keyfile", "key.pem"], "--ssl-certfile"),
        (["--ssl-certfile", "no-such.pem"], "--ssl-certfile no-such.pem: [Errno 2] No such file"),
        (["--ssl-certfile", __file__], f"--ssl-certfile {__file__}"),
        (["--stall-timeout", "0"], "--stall-timeout"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout"),
        (["--max-request-body-bytes", "0"], "--max-request-body-bytes"),
        (["--port", "65536"], "--port"),
        (["--no-such-option"], "--no-such-option"),
        (["a", "--model", "b"], "two models"),
        (["--api-key", ""], "API key"),
    ],
)
def test_refusals_name_the_option(capsys, argv, named):
    with pytest.raises(SystemExit) as stop:
        cli.main(["serve", *argv])
    assert stop.value.code == 2
    assert named in capsys.readouterr().err


def test_neutral_values_of_what_is_not_built():
    args = parse(
        *("-pp", "1", "--kv-cache-dtype", "auto", "--cpu-offload-gb", "0", "--scheduling-policy", "fcfs"),
        *("--enable-chunked-prefill", "--no-enable-lora", "--swap-space", "0", "-tp", "1", "--runner", "generate"),
        *("--watermark", "0.0", "--ssl-cert-reqs", "0"),
    )
    assert flags.refused_options(args) == []


def test_options_of_the_past():
    args = parse("--disable-log-requests", "--task", "generate", "--device", "cuda", "model")
    sentences = flags.removed_options(args)
    assert len(sentences) == 3
    assert any("--disable-log-requests" in text for text in sentences)
    assert flags.engine_args(args).model == "model"
    assert flags.removed_options(parse()) == []


def options(*argv: str, environment: tuple[str, ...] = ()):
    return flags.server_options(parse(*argv), environment)


def test_keys():
    assert options().api_keys == ()
    assert options("--api-key", "a", "b", "--api-key", "c").api_keys == ("a", "b", "c")
    assert options(environment=("e",)).api_keys == ("e",)
    assert options("--api-key", "a", environment=("e",)).api_keys == ("a",)


def test_keys_of_the_environment(monkeypatch):
    for name in cli.CLIENT_KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert cli._keys(cli.SERVER_KEY_VARIABLES) == []
    monkeypatch.setenv("VLLM_API_KEY", "v")
    assert cli._keys(cli.SERVER_KEY_VARIABLES) == ["v"]
    monkeypatch.setenv("OCTAVO_API_KEY", "o")
    assert cli._keys(cli.SERVER_KEY_VARIABLES) == ["o"]


def test_origins():
    assert options().cors.origins == []
    assert options("--api-key", "a").cors.origins == ["*"]
    assert options("--allowed-origins", '["http://a", "http://b"]').cors.origins == ["http://a", "http://b"]
    assert options("--api-key", "a", "--allowed-origins", "[]").cors.origins == []


def test_help_is_light():
    """Neither jax nor a web framework is imported before serving."""
    code = (
        "import sys, octavo.serving.cli as cli; cli.make_parser(); "
        "print([name for name in ('jax', 'aiohttp', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


async def run(*argv: str, stdin: str = "") -> tuple[int, str, str]:
    """(exit code, output, errors) of a terminal client in its own process."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "octavo", *argv),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(child.communicate(stdin.encode()), 30)
    return child.returncode, out.decode(), err.decode()


async def test_complete(launch):
    running = await launch(api_keys=("k",))
    argv = ("--url", f"{running.url}/v1", "--api-key", "k", "--max-tokens", "4", "--temperature", "0")
    assert await run("complete", "xy", *argv) == (0, "zabc\n", "")
    assert await run("complete", *argv, stdin="a\nk\n") == (0, "bcde\nlmno\n", "")
    code, _, err = await run("complete", "xy", "--url", running.url, "--api-key", "wrong")
    assert (code, "401" in err) == (1, True)


async def test_chat_keeps_the_conversation(running):
    argv = ("--url", running.url, "--model", "perm", "--max-tokens", "3", "--system-prompt", "s")
    assert await run("chat", *argv, stdin="hi\nyo\n") == (0, "abc\nabc\n", "")
    prompt = bytes(running.engine.seen[-1][0][1:]).decode()
    assert prompt == "<system>s<user>hi<assistant>abc<user>yo<assistant>"
    assert (await run("chat", "hi", *argv))[:2] == (0, "abc\n")


async def test_no_server():
    code, _, err = await run("chat", "hi", "--url", "http://127.0.0.1:9")
    assert code == 1
    assert "no answer from http://127.0.0.1:9" in err


async def test_an_error_in_mid_stream_is_told(launch):
    running = await launch(error_at=2)
    code, out, err = await run("complete", "xy", "--url", running.url, "--max-tokens", "9")
    assert (code, out.strip()) == (1, "za")
    assert "the engine could not finish this request" in err


@pytest.mark.parametrize("ending", [b"", b"40\r\ndata: {"])
async def test_a_stream_that_is_cut_off_is_told(ending):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        chunk = b'data: {"choices": [{"text": "za"}]}\n\n'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"%x\r\n%s\r\n" % (len(chunk), chunk) + ending)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    code, out, err = await run("complete", "xy", "--model", "m", "--url", url)
    server.close()
    assert (code, out.strip()) == (1, "za")
    assert err.startswith("octavo: the answer ended before it was complete")
