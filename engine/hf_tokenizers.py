"""transformers' tokenizer classes, without its advice to install PyTorch (Octavo reads models itself)."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _DropAdvice(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("PyTorch was not found")


logging.getLogger("transformers").addFilter(_DropAdvice())

# The advice is given while transformers is imported, so the filter has to be there first.
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402

__all__ = ["AutoTokenizer", "PreTrainedTokenizerFast", "only_errors"]


@contextmanager
def only_errors() -> Iterator[None]:
    """While it lasts, transformers logs errors only."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
