"""The one error of loading a model's files."""

from collections.abc import Iterable
from pathlib import Path


class LoadError(ValueError):
    """A model's files are missing, damaged or not of this model.

    The message names the file, the tensor, what was expected and what was found, as far as they apply; each is also
    an attribute (None where it does not apply).
    """

    def __init__(
        self,
        message: str,
        *,
        file: Path | str | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        self.file, self.tensor, self.expected, self.found = file, tensor, expected, found
        sides = [f"{side} {value}" for side, value in (("expected", expected), ("found", found)) if value is not None]
        text = f"{message}: {', '.join(sides)}" if sides else message
        if tensor is not None:
            text = f"tensor {tensor!r}: {text}"
        if file is not None:
            text = f"{file}: {text}"
        super().__init__(text)


def name_list(names: Iterable[str], limit: int = 8) -> str:
    """The first names in order, and how many more there are."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:limit])
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"
