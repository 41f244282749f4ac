"""The page of known faults names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "faults.md"


def missing_tests(page: str, tests: Path) -> list[str]:
    """Names like ``engine/test_x.py::test_y`` in backticks without such a function."""
    functions: dict[str, set[str]] = {}
    missing = []
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", page):
        if file not in functions:
            path = tests / file
            tree = ast.parse(path.read_text(encoding="utf-8") if path.exists() else "")
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
            functions[file] = {node.name for node in tree.body if isinstance(node, kinds)}
        if name not in functions[file]:
            missing.append(f"{file}::{name}")
    return missing


def test_every_named_test_exists():
    assert missing_tests(PAGE.read_text(encoding="utf-8"), ROOT / "tests") == []


def test_every_fault_has_a_test():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(rows) > 30
    assert [row for row in rows if "::test_" not in row and not row.startswith("| fault |")] == []


def test_a_missing_test_is_seen(tmp_path):
    (tmp_path / "test_a.py").write_text("def test_one():\n    pass\n")
    page = "`test_a.py::test_one` `test_a.py::test_two` `test_b.py::test_one`"
    assert missing_tests(page, tmp_path) == ["test_a.py::test_two", "test_b.py::test_one"]
