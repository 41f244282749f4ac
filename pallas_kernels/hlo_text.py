"""Reading XLA's text dumps: the instructions of a compiled program and its launches."""

import math
import re
from dataclasses import dataclass

_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "opt-barrier"}
)
"""Instructions that launch nothing."""
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(?P<name>\S+) = (?P<type>.*?) (?P<opcode>[a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+[0-9]+[a-z0-9]*)\[([0-9,]*)\]")
_THUNK = re.compile(r"\s*\d+: (?P<kind>k\w+)")
_BRANCHES = ("true_branch:", "false_branch:", "branch_")


@dataclass(frozen=True)
class Instruction:
    """One instruction of an optimised program."""

    name: str
    opcode: str
    num_bytes: int
    """Of the result; of all parts where it is a tuple."""
    op_name: str
    """Path of the JAX code that it comes from; empty where XLA made it up."""


def entry_instructions(hlo: str) -> list[Instruction]:
    """The instructions of the entry computation in the order they run, without those that launch nothing."""
    _, found, entry = hlo.partition("\nENTRY ")
    if not found:
        raise ValueError("the text holds no entry computation")
    instructions = []
    for line in entry.partition("\n}")[0].splitlines()[1:]:
        match = _INSTRUCTION.match(line)
        if match is None or match["opcode"] in _FREE or match["opcode"].endswith("-done"):
            continue
        op_name = re.search(r'op_name="([^"]*)"', line)
        num_bytes = sum(_array_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(match["type"]))
        instructions.append(Instruction(match["name"], match["opcode"], num_bytes, op_name[1] if op_name else ""))
    return instructions


def _array_bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(int(size) for size in dims.split(",") if size) * bits // 8


def straight_line_thunks(thunks: str) -> list[str]:
    """Kinds of the thunks that a run passes in any case: a loop's body once, the branches of conditionals not."""
    kinds: list[str] = []
    branches_at: int | None = None
    for line in thunks.splitlines():
        indent, thunk = len(line) - len(line.lstrip()), _THUNK.match(line)
        if branches_at is not None and thunk and indent < branches_at:
            branches_at = None
        if branches_at is None and line.strip().startswith(_BRANCHES):
            branches_at = indent
        if branches_at is None and thunk:
            kinds.append(thunk["kind"])
    return kinds
