"""Workloads: what to send. Read from JSON lines, or made at random; shared by every benchmark here."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

DATA_DIR = Path(__file__).resolve().parent / "data"
NAMES = ("single", "batch", "shared_prefix")
"""The workloads that ship in ``data/``."""
WARM_UP_ROUND = -1
"""The round of ``salt`` that is run first and not counted."""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request. ``prompt`` is the text of ``prompt_ids``, or empty where there is none."""

    prompt_ids: list[int]
    max_tokens: int
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class RandomSpec:
    """Sizes of a random workload, in tokens.

    Lengths are uniform in ``[len * (1 - range_ratio), len * (1 + range_ratio)]``; ``prefix_len`` tokens, the same
    for every request, come before the random input. Ids are uniform in ``[0, vocab_size)``.
    """

    input_len: int = 128
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    vocab_size: int = 32000


def read_workload(name: str, limit: int | None = None) -> list[WorkItem]:
    """A shipped workload by name, or any JSON-lines file with ``prompt_ids`` and ``max_tokens`` (``prompt`` optional).

    With ``limit`` the first ``limit`` requests, starting over when the file has fewer. Raises ValueError naming
    file, line and what is wrong with it; FileNotFoundError for an unknown name.
    """
    path = DATA_DIR / f"{name}.jsonl" if name in NAMES else Path(name)
    if not path.is_file():
        raise FileNotFoundError(f"no workload {name!r}: it is neither one of {', '.join(NAMES)} nor a file")
    items = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            items.append(_parse(line, f"{path.name}:{number}"))
    if not items:
        raise ValueError(f"{path.name}: no requests in it")
    if limit is None:
        return items
    return [items[i % len(items)] for i in range(limit)]


def _parse(line: str, where: str) -> WorkItem:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    ids, max_tokens = entry.get("prompt_ids"), entry.get("max_tokens")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{where}: prompt_ids must be a non-empty list of token ids")
    if type(max_tokens) is not int or max_tokens < 1:
        raise ValueError(f"{where}: max_tokens must be a positive integer, got {max_tokens!r}")
    return WorkItem(ids, max_tokens, entry.get("prompt", ""))


def random_workload(spec: RandomSpec, num_prompts: int, seed: int) -> list[WorkItem]:
    """``num_prompts`` requests of random ids, the same for the same seed. Raises ValueError naming a bad size."""
    if num_prompts < 1:
        raise ValueError(f"num_prompts must be positive, got {num_prompts}")
    if not 0.0 <= spec.range_ratio < 1.0:
        raise ValueError(f"range_ratio must be in [0, 1), got {spec.range_ratio}")
    for name in ("input_len", "output_len", "vocab_size"):
        if getattr(spec, name) < 1:
            raise ValueError(f"{name} must be positive, got {getattr(spec, name)}")
    if spec.prefix_len < 0:
        raise ValueError(f"prefix_len must not be negative, got {spec.prefix_len}")
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, spec.vocab_size, spec.prefix_len).tolist()
    inputs = _lengths(rng, spec.input_len, spec.range_ratio, num_prompts)
    outputs = _lengths(rng, spec.output_len, spec.range_ratio, num_prompts)
    return [
        WorkItem(prefix + rng.integers(0, spec.vocab_size, i).tolist(), o) for i, o in zip(inputs, outputs, strict=True)
    ]


def _lengths(rng: np.random.Generator, mean: int, ratio: float, count: int) -> list[int]:
    low, high = max(1, round(mean * (1 - ratio))), max(1, round(mean * (1 + ratio)))
    return rng.integers(low, high + 1, count).tolist()


def salt(items: list[WorkItem], round_index: int) -> list[WorkItem]:
    """The same work with another first token in every prompt, so that no other round is in the prefix cache.

    Every prompt of a round gets the same first token, taken from the workload's own ids: prefixes shared within the
    round stay shared. Round 0 is the workload as it is; ``WARM_UP_ROUND`` is for a run that is not counted. Raises
    ValueError when the workload has too few different tokens for so many rounds.
    """
    if round_index == 0:
        return items
    used = {item.prompt_ids[0] for item in items}
    pool = sorted({token_id for item in items for token_id in item.prompt_ids} - used)
    if not WARM_UP_ROUND <= round_index < len(pool):
        raise ValueError(f"round {round_index}: this workload has different tokens for {max(len(pool) - 1, 0)} rounds")
    first = pool[-1] if round_index == WARM_UP_ROUND else pool[round_index - 1]
    return [replace(item, prompt_ids=[first, *item.prompt_ids[1:]]) for item in items]
