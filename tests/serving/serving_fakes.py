"""An engine whose every answer can be worked out by hand: the next token is ``PERM[last]``.

The vocabulary is the 256 bytes and two special ids. Text is UTF-8; choice k starts k steps further along the cycle.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.args import EngineArgs
from octavo.engine.errors import EngineDeadError, QueueFullError, RequestError
from octavo.engine.messages import FinishReason, StepStats
from octavo.engine.metrics import FinishedRequest, StatSink
from octavo.engine.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.engine.sampling_params import OutputKind, SamplingParams

BOS, EOS, VOCAB_SIZE = 256, 257, 258
CYCLE = "abcdefghijklmnopqrstuvwxyz"
"""The text that greedy decoding spells, over and over; 'z' is followed by 'a', anything else by its successor."""


def next_token(token: int) -> int:
    if token == ord("z"):
        return ord("a")
    return token + 1 if ord("a") <= token < ord("z") else ord("a")


class FakeTokenizer:
    has_chat_template = True

    def id_to_token(self, token_id: int) -> str | None:
        return {BOS: "<s>", EOS: "</s>"}.get(token_id, chr(token_id))

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


@dataclass
class FakeConfig:
    served_model_names: tuple[str, ...] = ("perm", "org/perm-alias")
    model_path: str = "models/perm"
    max_model_len: int = 64
    max_logprobs: int = 5
    vocab_size: int = VOCAB_SIZE
    max_num_seqs: int = 4
    block_size: int = 16
    num_blocks: int = 100


@dataclass
class FakeOptions:
    step_s: float = 0.0
    """Time of a step."""
    hold: bool = False
    """Requests wait before their first token until ``release`` is set."""
    start_s: float = 0.0
    eos_after: int | None = None
    """Tokens until choice 0 is at its end; choice k ends k tokens earlier."""
    defaults: dict[str, Any] = field(default_factory=dict)
    start_error: Exception | None = None
    queue_limit: int | None = None
    error_at: int | None = None
    """The token at which a choice's numbers are not finite."""


class FakeEngine:
    def __init__(self, args: EngineArgs, stat_sink: StatSink, options: FakeOptions | None = None) -> None:
        self.options = options or FakeOptions()
        self.config = FakeConfig()
        self.tokenizer: FakeTokenizer | None = FakeTokenizer()
        self.default_sampling_params = self.options.defaults
        self.ready = False
        self.dead_error: BaseException | None = None
        self.release = asyncio.Event()
        self.open: dict[str, SamplingParams] = {}
        self.seen: list[tuple[list[int], SamplingParams]] = []
        self.aborted: list[str] = []
        self.was_shut_down = False
        self.totals = StepStats()
        self._sink = stat_sink

    async def start(self) -> None:
        await asyncio.sleep(self.options.start_s)
        if self.options.start_error is not None:
            raise self.options.start_error
        self.ready = True

    def die(self) -> None:
        self.ready = False
        self.dead_error = RuntimeError("a step failed")
        self.release.set()

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([BOS] if add_special_tokens else []) + list(text.encode())

    async def decode(self, token_ids: list[int]) -> str:
        return FakeTokenizer().decode(token_ids)

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        if messages[0]["role"] == "refused":
            raise RequestError("the template refuses this role", "messages")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        if options["add_generation_prompt"]:
            text += "<assistant>"
        return [BOS, *text.encode()]

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.release.set()

    async def reset_prefix_cache(self) -> bool:
        return not self.open

    def stats(self) -> StepStats:
        self.totals.num_running = len(self.open)
        return self.totals

    def stalled_s(self) -> float:
        return 0.0

    async def wait_drained(self, timeout_s: float) -> bool:
        return not self.open

    def shutdown(self) -> None:
        self.was_shut_down = True

    async def generate(self, prompt, sampling_params, request_id, *, priority=0, cache_salt=None):
        if len(prompt) >= self.config.max_model_len:
            raise RequestError("the prompt is too long", "prompt")
        if self.options.queue_limit is not None and len(self.open) >= self.options.queue_limit:
            raise QueueFullError("the queue is full")
        run = _Run(self, prompt, sampling_params, request_id)
        self.open[request_id] = sampling_params
        self.seen.append((prompt, sampling_params))
        self.totals.prompt_tokens_total += len(prompt)
        try:
            if self.options.hold:
                await self.release.wait()
            async for output in run.outputs():
                yield output
        finally:
            del self.open[request_id]
            self._sink.record_finished(run.figures())

    def check_alive(self) -> None:
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error))


class _Choice:
    def __init__(self, run: "_Run", index: int) -> None:
        self.index, self.run = index, run
        self.ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.sent_chars = self.sent_ids = 0
        self.reason: FinishReason | None = None
        self.stop_reason: str | None = None
        self.last = run.prompt[-1]
        for _ in range(index):
            self.last = next_token(self.last)

    def step(self) -> None:
        options, params = self.run.engine.options, self.run.params
        done = options.eos_after is not None and len(self.ids) >= options.eos_after - self.index
        self.last = EOS if done and not params.ignore_eos else next_token(self.last)
        self.ids.append(self.last)
        self.logprobs.append(entry(self.last, params.logprobs or 0))
        stop = next((text for text in params.stop or () if text in self.text()), None)
        if options.error_at is not None and len(self.ids) > options.error_at:
            self.reason = FinishReason.ERROR
        elif stop is not None:
            self.reason, self.stop_reason = FinishReason.STOP, stop
        elif self.last == EOS:
            self.reason = FinishReason.STOP
        elif len(self.ids) >= params.max_tokens:
            self.reason = FinishReason.LENGTH

    def text(self) -> str:
        return FakeTokenizer().decode(self.ids)

    def news(self, delta: bool) -> CompletionOutput:
        text = self.text()
        if self.stop_reason is not None:
            text = text[: text.index(self.stop_reason)]
        held = 0
        if self.reason is None:
            prefixes = [stop[:size] for stop in self.run.params.stop or () for size in range(1, len(stop))]
            held = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        end = len(text) - held
        first_char, first_id = (self.sent_chars, self.sent_ids) if delta else (0, 0)
        self.sent_chars, self.sent_ids = end, len(self.ids)
        logprobs = self.logprobs[first_id:] if self.run.params.logprobs is not None else None
        return CompletionOutput(
            self.index, text[first_char:end], self.ids[first_id:], None, logprobs, self.reason, self.stop_reason
        )


class _Run:
    def __init__(self, engine: FakeEngine, prompt: list[int], params: SamplingParams, request_id: str) -> None:
        self.engine, self.prompt, self.params, self.id = engine, prompt, params, request_id
        self.choices = [_Choice(self, index) for index in range(params.n)]
        self.start_s = time.monotonic()
        self.first_s: float | None = None

    async def outputs(self):
        delta = self.params.output_kind is OutputKind.DELTA
        first = True
        while any(choice.reason is None for choice in self.choices):
            await asyncio.sleep(self.engine.options.step_s)
            self.engine.check_alive()
            running = [choice for choice in self.choices if choice.reason is None]
            for choice in running:
                if self.id in self.engine.aborted:
                    choice.reason = FinishReason.ABORT
                else:
                    choice.step()
                    self.engine.totals.generation_tokens_total += 1
            if self.first_s is None and self.choices[0].ids:
                self.first_s = time.monotonic()
                self.engine._sink.record_first_token(self.first_s - self.start_s)
            if delta:
                yield self.output([choice.news(True) for choice in running], first)
            first = False
        if not delta:
            yield self.output([choice.news(False) for choice in self.choices], True)

    def output(self, choices: list[CompletionOutput], with_prompt: bool) -> RequestOutput:
        top = self.params.prompt_logprobs
        entries = None
        if with_prompt and top is not None:
            entries = [None, *(entry(token, top) for token in self.prompt[1:])]
        finished = all(choice.reason is not None for choice in self.choices)
        return RequestOutput(self.id, None, self.prompt, choices, finished, entries, num_cached_tokens=1)

    def figures(self) -> FinishedRequest:
        reasons = [choice.reason or FinishReason.ABORT for choice in self.choices]
        tokens = sum(len(choice.ids) for choice in self.choices)
        return FinishedRequest(
            request_id=self.id,
            finish_reason=reasons[-1],
            n=self.params.n,
            max_tokens=self.params.max_tokens,
            num_prompt_tokens=len(self.prompt),
            num_cached_tokens=1,
            num_generation_tokens=tokens,
            max_num_generation_tokens=max(len(choice.ids) for choice in self.choices),
            num_preemptions=0,
            e2e_latency_s=time.monotonic() - self.start_s,
            queue_time_s=0.0,
            prefill_time_s=0.0,
            decode_time_s=0.0,
            time_to_first_token_s=None if self.first_s is None else self.first_s - self.start_s,
            time_per_output_token_s=0.001 if tokens > 1 else None,
        )


def entry(token: int, top: int) -> dict[int, Logprob]:
    """The token itself at rank 2, better and worse ones around it, the last impossible."""
    decode = FakeTokenizer().decode
    result = {token: Logprob(-1.0, 2, decode([token]))}
    for rank, other in enumerate([(token + 7) % 256, token, (token + 9) % 256, (token + 11) % 256], start=1):
        if rank <= top and other != token:
            value = float("-inf") if rank == 4 else -0.5 * rank
            result[other] = Logprob(value, rank, decode([other]))
    return result
