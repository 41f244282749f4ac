"""The documentation names what exists: modules, rules and links."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGE_FOLDERS = ("engine", "models", "pallas_kernels", "serving")
RULE_CITATION = re.compile(r"\b[Rr]ules?\s+((?:R\d+[\s,]*(?:and\s+)?)+)")


def missing_modules(page: str, modules: list[str]) -> list[str]:
    return [name for name in modules if f"`{name}" not in page and f"/{name}`" not in page]


def dead_names(page: str, root: Path) -> list[str]:
    """File and folder names in backticks that exist neither at the root nor in ``engine/``."""
    names = re.findall(r"`([\w./-]+(?:\.py|/))`", page)
    return [name for name in names if not (root / name).exists() and not (root / "engine" / name).exists()]


def cited_rules(text: str) -> set[str]:
    return {rule for group in RULE_CITATION.findall(text) for rule in re.findall(r"R\d+", group)}


def dead_links(page: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return [target for target in targets if not (page.parent / target).exists()]


def test_architecture_page_names_every_engine_module() -> None:
    modules = [file.name for file in sorted((ROOT / "engine").glob("*.py")) if file.name != "__init__.py"]
    assert not missing_modules((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), modules)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    assert not dead_names(page.read_text(encoding="utf-8"), ROOT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead_links(page)


def test_every_rule_cited_in_code_is_written_down() -> None:
    written = set(re.findall(r"\*\*(R\d+)\*\*", (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")))
    files = [file for folder in (*PACKAGE_FOLDERS, "tests") for file in sorted((ROOT / folder).rglob("*.py"))]
    cited = {file: cited_rules(file.read_text(encoding="utf-8")) for file in files if file != Path(__file__).resolve()}
    unknown = {str(file.relative_to(ROOT)): rules - written for file, rules in cited.items() if rules - written}
    assert not unknown
    assert any(cited.values())


def test_the_checks_find_faults(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("[a](b.md) and [c](page.md)", encoding="utf-8")
    assert dead_links(tmp_path / "page.md") == ["b.md"]
    assert missing_modules("`core.py` and `engine/llm.py`", ["core.py", "llm.py", "step.py"]) == ["step.py"]
    assert dead_names("`gone.py`, `gone/`, `page.md`", tmp_path) == ["gone.py", "gone/"]
    assert cited_rules("(rule R99) and rules R1, R2 and R3, not R5") == {"R99", "R1", "R2", "R3"}
