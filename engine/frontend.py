"""The text half of an engine: which model it is and how its text becomes ids. No device in it, and no jax."""

from dataclasses import dataclass

from ..models.loading.resolve import ResolvedModel
from .config import EngineConfig
from .find_model import find_model
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Frontend:
    """What is known of a model without loading its weights. ``tokenizer`` None: token ids only."""

    resolved: ResolvedModel
    tokenizer: Tokenizer | None

    @property
    def vocab_size(self) -> int | None:
        """Of the tokenizer; a model's logits may be wider."""
        return None if self.tokenizer is None else self.tokenizer.vocab_size


def open_model(config: EngineConfig, *, skip_tokenizer: bool = False, chat_template: str | None = None) -> Frontend:
    """Finds the model's files and loads its tokenizer. Raises ConfigError."""
    options = config.model
    resolved = find_model(options)
    if skip_tokenizer:
        return Frontend(resolved, None)
    tokenizer = Tokenizer.load(
        str(resolved.path),
        options.tokenizer,
        # The model's own tokenizer is among its files already; another repository has revisions of its own.
        revision=options.revision if options.tokenizer == options.model else None,
        download_dir=options.download_dir,
        chat_template=chat_template,
    )
    return Frontend(resolved, tokenizer)
