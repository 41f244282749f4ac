"""A core's process without a device: ``python fake_core.py``, in the place of ``octavo.engine.core_process``.

Each choice gets token after token, a step every ``STEP_S`` seconds. The first id of a prompt says what happens.
"""

import sys
import time

from octavo.engine.core_server import run_core
from octavo.engine.errors import ConfigError
from octavo.engine.messages import AbortRequest, ChoiceOutput, EngineRequest, FinishReason, StepOutputs, StepStats

STEP_S = 0.01
TOKEN, FAIL, HANG, WAIT = 70, 71, 72, 73
"""TOKEN: what is generated. A prompt that begins with FAIL makes a step fail, with HANG never end, with WAIT waits."""
ROWS = 8


class FakeCore:
    def __init__(self) -> None:
        self._left: dict[str, int] = {}
        self._waiting: list[EngineRequest] = []
        self._ended: list[ChoiceOutput] = []
        self._on_step = TOKEN
        self._totals = StepStats()

    @property
    def has_work(self) -> bool:
        return bool(self._left or self._waiting or self._ended)

    def handle(self, message: EngineRequest | AbortRequest) -> None:
        if isinstance(message, EngineRequest):
            first = message.prompt_token_ids[0]
            if first == WAIT:
                self._waiting.append(message)
                return
            self._on_step = first
            self._left[message.request_id] = message.sampling_params.max_tokens or 1
            self._totals.prompt_tokens_total += len(message.prompt_token_ids)
        else:
            waited = [one.request_id for one in self._waiting]
            self._waiting = [one for one in self._waiting if one.request_id != message.request_id]
            if self._left.pop(message.request_id, None) is not None or message.request_id in waited:
                self._ended.append(_output(message.request_id, [], FinishReason.ABORT))

    def step(self) -> StepOutputs:
        time.sleep(STEP_S)
        if self._on_step == FAIL:
            raise RuntimeError("the device is gone")
        while self._on_step == HANG:
            time.sleep(1.0)
        outputs, self._ended = self._ended, []
        for request_id, left in list(self._left.items()):
            outputs.append(_output(request_id, [TOKEN], FinishReason.LENGTH if left == 1 else None))
            self._left[request_id] = left - 1
            if left == 1:
                del self._left[request_id]
        self._totals.generation_tokens_total += sum(len(one.token_ids) for one in outputs)
        return StepOutputs(outputs=outputs, stats=self.stats())

    def stats(self) -> StepStats:
        self._totals.num_running, self._totals.num_waiting = len(self._left), len(self._waiting)
        return self._totals

    def reset_prefix_cache(self) -> bool:
        return not self.has_work


def _output(request_id: str, token_ids: list[int], reason: FinishReason | None) -> ChoiceOutput:
    return ChoiceOutput(request_id=request_id, index=0, token_ids=token_ids, finish_reason=reason)


def launch(config, resolved, tokenizer_size):
    if config.seed == FAIL:
        raise ConfigError("this model is not known")
    if config.seed == HANG:
        time.sleep(60.0)
    config = config.resolve(
        platform="cpu",
        context_len=4096,
        model_path=str(resolved.path),
        model_name="fake",
        vocab_size=tokenizer_size or resolved.config.vocab_size,
        eos_token_ids=frozenset(),
    )
    return FakeCore(), config.with_pool(1000)


if __name__ == "__main__":
    run_core(launch, sys.stdin.fileno())
