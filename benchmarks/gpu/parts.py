"""Which parts there are, in order of worth, and how a part reports. Imports neither jax nor torch."""

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Part:
    """One part of the check."""

    name: str
    module: str
    """Below ``gpu``."""
    limit_s: float
    """Its share of the whole check's time; what earlier parts left over is added."""
    arguments: tuple[str, ...] = ()
    """For the module's ``run``."""
    needs: tuple[str, ...] = ()
    """Packages without which the part is skipped: the rivals'."""
    in_smoke: bool = True
    """Whether --smoke runs it unasked: not if at tiny sizes it is another part once more."""


PARTS = (
    Part("ceilings", "ceilings", 25),
    Part("correctness", "correctness", 65),
    Part("decode_attention", "attention", 45, ("decode",)),
    Part("mixed_attention", "attention", 35, ("mixed",)),
    Part("quantized_matmul", "quantized_matmul", 30),
    Part("grouped_matmul", "grouped_matmul", 35),
    Part("decode_step_llama_3_8b", "decode_step", 45, ("llama-3-8b",)),
    Part("decode_step_qwen2_5_7b", "decode_step", 40, ("qwen2.5-7b",), in_smoke=False),
    Part("throughput", "throughput", 60),
    Part("torch_attention", "torch_attention", 20, (), ("torch",)),
    Part("transformers_generate", "transformers_generate", 20, (), ("torch", "transformers")),
)
"""Seven minutes in all."""


@dataclass(frozen=True)
class Options:
    """What the parts are told."""

    smoke: bool = False
    """Tiny sizes, on whatever device there is: shows that the code runs, measures nothing."""
    attention_backend: str = "auto"
    """For the parts that run the engine."""
    arguments: tuple[str, ...] = ()


class SkipPart(Exception):
    """The part cannot run here, and that is no fault: a rival is not installed."""


@dataclass
class Report:
    """What a part has found so far, rewritten to ``path`` after each figure: one that is stopped keeps what it has."""

    path: Path
    device: dict[str, Any] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)
    skipped: str | None = None

    @property
    def failed(self) -> bool:
        return any("error" in figure for figure in self.figures)

    def add(self, name: str, **values: Any) -> None:
        """One figure. A value under "error" makes the part a failed one."""
        self.figures.append({"name": name, **values})
        self.write()

    def skip_figure(self, name: str, reason: str, **values: Any) -> None:
        """A figure that cannot be had here, which is no fault."""
        self.add(name, **values, skipped=reason)

    @contextmanager
    def guard(self, name: str, **values: Any) -> Iterator[None]:
        """An exception inside becomes the figure's error; the part goes on with the next figure."""
        try:
            yield
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.add(name, **values, error=short(error))

    def write(self) -> None:
        document = {"device": self.device, "figures": self.figures, "skipped": self.skipped}
        write_json(self.path, document)


def short(error: BaseException, limit: int = 600) -> str:
    """Type and message, cut to ``limit`` characters."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= limit else text[:limit] + " ..."


def write_json(path: Path, document: Any) -> None:
    """Whole or not at all: somebody may read it at any time."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
