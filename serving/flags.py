"""The options of ``octavo serve`` under vLLM's names: those served, those not built yet, those that vLLM removed."""

import argparse
import json
import logging
import math
import re
import ssl
from collections.abc import Sequence
from typing import Any

from ..engine.args import EngineArgs
from .logging import LEVELS
from .options import CorsPolicy, ServerOptions

logger = logging.getLogger(__name__)

_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)\Z")
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}

NOT_BUILT_VALUES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("pipeline-parallel-size", "data-parallel-size", "nnodes"), ("1",)),
    **dict.fromkeys(("decode-context-parallel-size", "stream-interval"), ("1",)),
    **dict.fromkeys(
        ("cpu-offload-gb", "kv-offloading-size", "long-prefill-token-threshold", "node-rank"), ("0", "0.0")
    ),
    **dict.fromkeys(("tokenizer-mode", "config-format", "chat-template-content-format"), ("auto",)),
    "ssl-cert-reqs": ("0",),
    "watermark": ("0", "0.0"),
    "logprobs-mode": ("raw_logprobs",),
    "prefix-caching-hash-algo": ("sha256",),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "reasoning-parser": ("",),
    "root-path": ("",),
    **dict.fromkeys(
        (
            *("tool-call-parser", "tool-parser-plugin", "reasoning-parser-plugin"),
            *("speculative-config", "structured-outputs-config", "lora-modules"),
            *("limit-mm-per-prompt", "mm-processor-kwargs", "pooler-config", "kv-transfer-config", "kv-events-config"),
            *("default-chat-template-kwargs", "middleware", "otlp-traces-endpoint", "profiler-config"),
            *("hf-config-path", "hf-token", "code-revision", "tokenizer-revision", "model-loader-extra-config"),
            *("ignore-patterns", "log-config-file", "max-log-len", "config", "compilation-config"),
            *("optimization-level", "performance-mode", "distributed-executor-backend", "ssl-ca-certs"),
            *("show-hidden-metrics-for-version", "max-loras", "max-lora-rank", "kv-offloading-backend"),
            *("data-parallel-address", "data-parallel-size-local", "master-addr", "master-port"),
            *("data-parallel-backend", "data-parallel-rank", "data-parallel-rpc-port", "all2all-backend"),
            *("max-cpu-loras", "mm-processor-cache-gb", "allowed-local-media-path", "allowed-media-domains"),
            *("collect-detailed-traces", "h11-max-header-count", "h11-max-incomplete-event-size"),
        ),
        (),
    ),
}
"""Options with a value that are known but not built -> values that ask for nothing."""

NOT_BUILT_SWITCHES: dict[str, bool] = {
    "enable-chunked-prefill": True,
    **dict.fromkeys(("enable-prompt-tokens-details", "enable-request-id-headers"), True),
    **dict.fromkeys(("disable-fastapi-docs", "disable-custom-all-reduce"), True),
    **dict.fromkeys(
        (
            *("enable-lora", "enable-expert-parallel", "enable-eplb", "enable-auto-tool-choice", "enable-sleep-mode"),
            *("headless", "trust-request-chat-template", "return-tokens-as-token-ids", "enable-log-requests"),
            *("enable-server-load-tracking", "enable-force-include-usage", "enable-per-request-metrics"),
            *("enable-tokenizer-info-endpoint", "enable-mfu-metrics", "kv-cache-metrics", "enable-log-outputs"),
            *("fully-sharded-loras",),
        ),
        False,
    ),
}
"""Switches that cannot be set otherwise yet -> what the server does."""

REMOVED_VALUES = (
    *("num-scheduler-steps", "preemption-mode", "tokenizer-pool-size", "tokenizer-pool-type"),
    *("tokenizer-pool-extra-config", "task", "rope-scaling", "rope-theta", "guided-decoding-backend", "device"),
    *("max-seq-len-to-capture", "max-num-partial-prefills", "max-long-partial-prefills"),
)
REMOVED_SWITCHES = (
    *("use-v2-block-manager", "calculate-kv-scales", "worker-use-ray", "disable-log-requests", "enable-reasoning"),
)
"""Options that old command lines have and vLLM no longer knows: accepted, with one warning each."""

_HINTS = {"rope-scaling": "use --hf-overrides", "rope-theta": "use --hf-overrides", "device": "set JAX_PLATFORMS"}


def human_int(text: str) -> int:
    """4096, 4k (4000), 4K (4096), 25.6k (25600); m, g, t and M, G, T likewise."""
    match = _HUMAN.match(text)
    value = float(match[1]) * _UNITS[match[2]] if match else 0.5
    if match and "." not in match[1]:
        value = int(match[1]) * _UNITS[match[2]]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number like 4096, 4k or 4K")
    return int(value)


def context_length(text: str) -> int | None:
    """A number of tokens; ``auto`` or -1 is the default: the model's context, or what of it fits."""
    return None if text in ("auto", "-1") else human_int(text)


def port_number(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def positive_int(text: str) -> int:
    """As ``human_int``, from 1 on."""
    value = human_int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value


def seconds(text: str) -> float:
    """A time; 0 and the endless ones are no times to wait."""
    value = wait_seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be more than 0 seconds")
    return value


def wait_seconds(text: str) -> float:
    """A time that may be 0: not waiting."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def text_list(text: str) -> list[str]:
    """A JSON list of texts, as vLLM takes it, or one text."""
    if not text.startswith("["):
        return [text]
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"{text!r} must hold texts only")
    return value


def normalise_names(argv: Sequence[str]) -> list[str]:
    """Underscores in option names are dashes: ``--max_model_len`` is ``--max-model-len``. Values stay."""
    result = []
    for item in argv:
        name, equals, value = item.partition("=")
        result.append(name.replace("_", "-") + equals + value if name.startswith("--") else item)
    return result


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """All options of ``octavo serve``."""
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="folder, .gguf file or hub id; the same as --model"
    )
    _add_model_options(parser.add_argument_group("model"))
    _add_engine_options(parser.add_argument_group("engine"))
    _add_server_options(parser.add_argument_group("server"))
    for name in (*NOT_BUILT_VALUES, *REMOVED_VALUES):
        short = {"pipeline-parallel-size": ["-pp"], "data-parallel-size": ["-dp"], "speculative-config": ["-sc"]}
        parser.add_argument(f"--{name}", *short.get(name, []), help=argparse.SUPPRESS)
    for name in NOT_BUILT_SWITCHES:
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    for name in REMOVED_SWITCHES:
        parser.add_argument(f"--{name}", action="store_const", const=True, help=argparse.SUPPRESS)


def _add_model_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--model", help="folder, .gguf file or hub id; default: the embedded SmolLM2-135M-Instruct")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names the server answers to")
    group.add_argument("--tokenizer", help="folder, file or hub id; default: the model's own")
    group.add_argument("--skip-tokenizer-init", action="store_true", help="token ids only")
    group.add_argument("--chat-template", help="a file, or the template itself; default: the model's own")
    group.add_argument("--trust-remote-code", action=argparse.BooleanOptionalAction, default=False)
    group.add_argument("--revision", help="branch, tag or commit on the hub")
    group.add_argument("--download-dir", help="folder for files from the hub")
    group.add_argument("--load-format", default="auto", help="auto, safetensors, gguf, orbax or dummy")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 (float, half)")
    group.add_argument(
        "--quantization",
        "-q",
        help="the checkpoint's method, if it has one (default); gguf: keep weights packed; fp8, int8 or int4: quantise "
        "plain weights while they are loaded",
    )
    group.add_argument("--hf-overrides", type=json_object, metavar="JSON", help="entries put over config.json")
    group.add_argument("--generation-config", default="auto", help="auto: the model's; vllm: OpenAI's defaults")
    group.add_argument("--override-generation-config", type=json_object, metavar="JSON")
    group.add_argument("--max-logprobs", type=int, default=20, help="most alternatives per token")


def _add_engine_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--max-model-len", type=context_length, help="context in tokens; default: auto")
    group.add_argument("--max-num-seqs", type=human_int, help="requests in a step; default: 64 on CPU, 256 on GPU")
    group.add_argument("--max-num-batched-tokens", type=human_int, help="tokens in a step")
    group.add_argument("--block-size", type=human_int, default=16, help="tokens in a KV block")
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="plan and send off each step before the one before it is read",
    )
    group.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    group.add_argument("--num-gpu-blocks-override", type=human_int, help="KV blocks, on CPU too")
    group.add_argument("--gpu-memory-utilization", type=float, default=0.92, help="share of GPU memory to use")
    group.add_argument("--kv-cache-dtype", default="auto", help="auto (the model's), fp8, bfloat16, float16, float32")
    group.add_argument("--kv-cache-memory-bytes", type=human_int, help="KV cache per device; on CPU: 1 GiB in all")
    group.add_argument("--scheduling-policy", default="fcfs", help="fcfs, or priority: lower values run earlier")
    group.add_argument("--max-num-queued-reqs", type=human_int, default=16384, help="more are answered 503")
    group.add_argument("--max-num-queued-tokens", type=human_int, help="prompt tokens; more are answered 503")
    group.add_argument("--swap-space", type=float, default=0.0, help="GiB of host memory per device for KV blocks")
    group.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, help="devices that share one model")
    group.add_argument(
        "--enforce-eager", action=argparse.BooleanOptionalAction, default=False, help="compile on first use"
    )
    group.add_argument(
        "--compile-cache-dir", help="where compiled programs are kept (default: ~/.cache/octavo/compiled)"
    )
    group.add_argument("--attention-backend", default="auto", help="auto, xla or mosaic")
    group.add_argument("--tuned-config-folder", help="kernel sizes that `octavo tune` wrote, instead of the package's")
    group.add_argument(
        "--engine-step-timeout",
        type=seconds,
        default=300.0,
        help="seconds without a finished step, while there is work, after which the engine counts as dead",
    )


def _add_server_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--host", help="address to listen on; default: all")
    group.add_argument("--port", type=port_number, default=8000)
    group.add_argument(
        "--api-server-count", "-asc", type=positive_int, default=1, help="processes that take requests and make text"
    )
    group.add_argument("--uds", help="listen on this Unix socket instead")
    group.add_argument("--ssl-certfile")
    group.add_argument("--ssl-keyfile")
    group.add_argument("--api-key", nargs="+", action="extend", metavar="KEY", help="or the variable OCTAVO_API_KEY")
    group.add_argument("--public-metrics", action="store_true", help="/metrics needs no key")
    group.add_argument(
        "--allowed-origins", type=text_list, help="e.g. '[\"*\"]'; default: all with a key, none without"
    )
    group.add_argument("--allowed-methods", type=text_list, default=["*"])
    group.add_argument("--allowed-headers", type=text_list, default=["*"])
    group.add_argument("--allow-credentials", action="store_true")
    group.add_argument("--max-request-body-bytes", type=positive_int, default=32 << 20)
    group.add_argument("--max-prompts-per-request", type=positive_int, default=1024)
    group.add_argument(
        "--shutdown-timeout", type=wait_seconds, default=25.0, help="seconds running requests get after SIGTERM"
    )
    group.add_argument(
        "--stall-timeout", type=seconds, default=60.0, help="seconds until a client that reads nothing is cut"
    )
    group.add_argument(
        "--stuck-timeout", type=seconds, default=10.0, help="seconds without progress until /health fails"
    )
    group.add_argument("--log-level", "--uvicorn-log-level", choices=LEVELS, default="info")
    group.add_argument("--disable-log-stats", action="store_true", help="no line per request, no line every 10 s")
    group.add_argument("--disable-access-log", "--disable-uvicorn-access-log", action="store_true")


def refused_options(args: argparse.Namespace) -> list[str]:
    """A sentence for every option given that is not built yet."""
    result = []
    for name, neutral in NOT_BUILT_VALUES.items():
        value = _get(args, name)
        if value is not None and value not in neutral:
            result.append(f"--{name} {value} is not supported yet")
    for name, fixed in NOT_BUILT_SWITCHES.items():
        value = _get(args, name)
        if value is not None and value is not fixed:
            result.append(f"--{'' if value else 'no-'}{name} is not supported yet")
    return result


def removed_options(args: argparse.Namespace) -> list[str]:
    """A sentence for every option given that is accepted and does nothing."""
    names = [name for name in (*REMOVED_VALUES, *REMOVED_SWITCHES) if _get(args, name) is not None]
    hints = {name: f" ({_HINTS[name]})" if name in _HINTS else "" for name in names}
    return [f"--{name} is an option of the past and does nothing{hints[name]}" for name in names]


def engine_args(args: argparse.Namespace) -> EngineArgs:
    """The engine's share. Raises ValueError when MODEL and --model differ."""
    if args.model_tag and args.model and args.model_tag != args.model:
        raise ValueError(f"two models were given: {args.model_tag} and --model {args.model}")
    values = {name: getattr(args, name) for name in EngineArgs.__dataclass_fields__ if hasattr(args, name)}
    values["model"] = args.model or args.model_tag
    values["served_model_name"] = tuple(args.served_model_name) if args.served_model_name else None
    return EngineArgs(**values)


def _check_certificate(certfile: str, keyfile: str | None) -> None:
    """Raises ValueError now, for what would otherwise end an API process when it listens."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certfile, keyfile)
    except OSError as error:  # SSLError is one
        key = f", --ssl-keyfile {keyfile}" if keyfile else ""
        raise ValueError(f"--ssl-certfile {certfile}{key}: {error}") from error


def server_options(
    args: argparse.Namespace, environment_keys: Sequence[str], *, dev_mode: bool = False
) -> ServerOptions:
    """The server's share; keys of the environment count when none are given.

    Raises ValueError for an empty key, and for a certificate or private key that cannot be used.
    """
    keys = tuple(args.api_key or environment_keys)
    if not all(keys):
        raise ValueError("an API key is empty")
    if args.ssl_keyfile and not args.ssl_certfile:
        raise ValueError("--ssl-keyfile needs --ssl-certfile")
    if args.ssl_certfile:
        _check_certificate(args.ssl_certfile, args.ssl_keyfile)
    origins = args.allowed_origins
    if origins is None:
        # Without a key, any page that a user of this machine visits could use the server if it were allowed to.
        origins = ["*"] if keys else []
    return ServerOptions(
        host=args.host,
        port=args.port,
        uds=args.uds,
        api_server_count=args.api_server_count,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        api_keys=keys,
        public_metrics=args.public_metrics,
        cors=CorsPolicy(
            origins=origins,
            methods=args.allowed_methods,
            headers=args.allowed_headers,
            credentials=args.allow_credentials,
        ),
        max_request_body_bytes=args.max_request_body_bytes,
        max_prompts=args.max_prompts_per_request,
        max_queued=args.max_num_queued_reqs,
        shutdown_timeout_s=args.shutdown_timeout,
        stall_timeout_s=args.stall_timeout,
        stuck_timeout_s=args.stuck_timeout,
        disable_log_stats=args.disable_log_stats,
        disable_access_log=args.disable_access_log,
        dev_mode=dev_mode,
    )


def _get(args: argparse.Namespace, name: str) -> Any:
    return getattr(args, name.replace("-", "_"), None)
