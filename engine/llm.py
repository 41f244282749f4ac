"""``LLM``: the offline Python API. The core runs in this process and thread."""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from tqdm import tqdm

from .args import EngineArgs
from .config import EngineConfig
from .errors import RequestError
from .frontend import open_model
from .input_processor import InputProcessor, Prompt, default_sampling_params
from .launch import launch_core
from .messages import StepStats
from .metrics import NullStatSink
from .output_processor import OutputProcessor
from .outputs import RequestOutput
from .sampling_params import OutputKind, SamplingParams
from .tokenizer import Tokenizer

ChatMessages = Sequence[Mapping[str, Any]]


class LLM:
    """Loads a model and generates for lists of prompts.

    ``LLM(model, **options)``: the options are the fields of ``EngineArgs``. Without a model the
    embedded SmolLM2-135M-Instruct is used. Raises ConfigError when it cannot be served. Calls from
    several threads run one after the other; ``AsyncLLM`` runs requests side by side.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        args = EngineArgs(model=model, **options)
        config = EngineConfig.from_args(args)
        frontend = open_model(config, skip_tokenizer=args.skip_tokenizer_init, chat_template=args.chat_template)
        self._core, self.config = launch_core(config, frontend.resolved, frontend.vocab_size, compile_bar=True)
        self._tokenizer = frontend.tokenizer
        self._inputs = InputProcessor(self.config, frontend.tokenizer)
        self._outputs = OutputProcessor(frontend.tokenizer, NullStatSink())
        self._defaults = default_sampling_params(
            frontend.resolved.config.sampling_defaults, args.generation_config, args.override_generation_config
        )
        self._ids = itertools.count()
        self._lock = threading.Lock()
        """Held while requests run: they are stepped by the thread that brought them."""

    def get_tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling defaults (generation_config), over Octavo's."""
        return SamplingParams(**self._defaults)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False, and nothing done, while requests hold blocks."""
        with self._lock:
            return self._core.reset_prefix_cache()

    def stats(self) -> StepStats:
        """Figures of this moment; counters are totals since the start."""
        return self._core.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt; results in the order of the prompts.

        A prompt is a text, a list of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids":
        ids}``. One SamplingParams serves all prompts, a list gives each its own, None takes the
        model's defaults. ``priority``, one a prompt, needs ``scheduling_policy="priority"``: the lower
        runs earlier. Raises RequestError, before anything runs, if any of them is invalid.
        """
        listed = _as_list(prompts)
        params = self._params_for(len(listed), sampling_params)
        priorities = [0] * len(listed) if priority is None else list(priority)
        if len(priorities) != len(listed):
            raise RequestError(f"{len(priorities)} priorities for {len(listed)} prompts", "priority")
        requests = [
            self._inputs.make_request(str(next(self._ids)), prompt, _final_only(one), priority=place)
            for prompt, one, place in zip(listed, params, priorities, strict=True)
        ]
        order = {request.request_id: place for place, (request, _) in enumerate(requests)}
        results: list[RequestOutput | None] = [None] * len(requests)
        with self._lock:
            try:
                for request, text in requests:
                    self._outputs.add_request(request, text)
                    self._core.handle(request)
                for output in self._run(len(requests), use_tqdm):
                    results[order[output.request_id]] = output
            except BaseException:
                self._recover(order)
                raise
        assert all(one is not None for one in results), "a request was lost"
        return cast(list[RequestOutput], results)

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, rendered with the model's chat template.

        ``tools`` are function definitions for the template; a call to one comes back as text.
        """
        if self._tokenizer is None:
            raise RequestError("chat needs a tokenizer; this LLM was made with skip_tokenizer_init", "messages")
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(f"messages must be a list, got {type(messages).__name__}", "messages")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = [
            self._tokenizer.render_chat(
                cast(ChatMessages, conversation),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise RequestError(f"{len(given)} sampling_params for {count} prompts", "sampling_params")
        return given

    def _run(self, count: int, use_tqdm: bool) -> Iterator[RequestOutput]:
        """Steps until all is done; yields finished requests."""
        with tqdm(total=count, desc="Requests", unit="req", disable=not use_tqdm, dynamic_ncols=True) as bar:
            num_tokens = 0
            while self._core.has_work:
                step = self._core.step()
                processed = self._outputs.process(step)
                for abort in processed.aborts:
                    self._core.handle(abort)
                for refusal in processed.refusals.values():
                    raise refusal
                for output in processed.request_outputs:
                    if output.finished:
                        num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
                        elapsed = max(bar.format_dict["elapsed"], 1e-6)
                        bar.set_postfix_str(f"{num_tokens / elapsed:.1f} output tok/s", refresh=False)
                        bar.update()
                        yield output

    def _recover(self, request_ids: Mapping[str, int]) -> None:
        """After an error or an interrupt: nothing of this call stays in the engine, and the next one works."""
        for request_id in request_ids:
            self._outputs.abort(request_id)
        self._core.recover()


def _final_only(params: SamplingParams) -> SamplingParams:
    """Offline results come once, at the end."""
    if not isinstance(params, SamplingParams) or params.output_kind is OutputKind.FINAL_ONLY:
        return params
    return params.clone(output_kind=OutputKind.FINAL_ONLY)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a text or a list, got {type(prompts).__name__}", "prompt")
    if prompts and isinstance(prompts[0], int):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))
