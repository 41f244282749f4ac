"""What the server needs of an engine: ``engine.async_llm.AsyncLLM`` satisfies it, and so does a fake in tests."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..engine.args import EngineArgs
from ..engine.messages import StepStats
from ..engine.metrics import StatSink
from ..engine.outputs import RequestOutput
from ..engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..engine.async_llm import AsyncLLM


class EngineConfigView(Protocol):
    """Derived options, known once the engine has started."""

    @property
    def served_model_names(self) -> tuple[str, ...]: ...
    @property
    def model_path(self) -> Any: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def max_logprobs(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...


class TokenizerView(Protocol):
    """The cheap part of a tokenizer, which may run on the event loop."""

    @property
    def has_chat_template(self) -> bool: ...

    def id_to_token(self, token_id: int) -> str | None: ...


class EngineClient(Protocol):
    """An engine that runs beside the event loop. ``config`` and the rest are valid once ``start`` has returned."""

    @property
    def ready(self) -> bool: ...
    @property
    def dead_error(self) -> BaseException | None: ...
    @property
    def config(self) -> EngineConfigView: ...
    @property
    def tokenizer(self) -> TokenizerView | None: ...
    @property
    def default_sampling_params(self) -> Mapping[str, Any]: ...

    async def start(self) -> None:
        """Loads and warms up. Raises ConfigError."""

    def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request; refusals are raised by the first ``__anext__``; closing it aborts."""
        ...

    async def abort(self, request_id: str) -> None: ...

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]: ...

    async def decode(self, token_ids: Sequence[int]) -> str: ...

    async def reset_prefix_cache(self) -> bool:
        """False, and nothing done, while requests hold blocks."""
        ...

    def stats(self) -> StepStats: ...

    def stalled_s(self) -> float:
        """Seconds since the core has done anything."""
        ...

    async def wait_drained(self, timeout_s: float) -> bool: ...

    def shutdown(self) -> None: ...


EngineFactory = Callable[[EngineArgs, StatSink], EngineClient]
"""Makes an engine that is not started. May import jax, so it runs in a thread."""


if TYPE_CHECKING:

    def _checked(engine: AsyncLLM) -> EngineClient:
        """The type checker reads here that the real engine is one."""
        return engine
