"""The wheel is complete, works from a clone in an oddly named folder, and public text is portable."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_FOLDERS = ("engine", "models", "pallas_kernels", "serving")
DATA_SUFFIXES = {".json", ".jinja", ".html", ".txt", ".txtpb"}
"""Files of these kinds inside the package are needed at run time."""
CLONE_NAME = "a-b.1"
"""No valid Python identifier: nothing may depend on the checkout's name."""
MACHINE_PATHS = re.compile(r"(?<![\w.~$}])/(?:work|root|home|Users|opt/wheels|tmp/[a-z]+\d+)/|\.\./shared\b")


def tracked_files() -> list[Path]:
    """Files that a commit of the working tree would hold, relative to the root."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = [Path(os.fsdecode(name)) for name in listing.stdout.split(b"\0") if name]
    return [name for name in names if (ROOT / name).is_file()]


def expected_in_wheel() -> set[str]:
    found = {"octavo/__init__.py", "octavo/__main__.py", "octavo/py.typed"}
    for name in tracked_files():
        if name.parts[0] in PACKAGE_FOLDERS and (name.suffix == ".py" or name.suffix in DATA_SUFFIXES):
            found.add(f"octavo/{name.as_posix()}")
    return found


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone") / CLONE_NAME
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"
    run(sys.executable, "-c", build, folder, cwd=clone)
    (wheel,) = folder.glob("octavo-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that holds what the wheel installs."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_holds_exactly_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    missing, unexpected = expected_in_wheel() - names, names - expected_in_wheel()
    assert not missing, f"not in the wheel; see packages and package-data in pyproject.toml: {sorted(missing)}"
    assert not unexpected, f"in the wheel by accident: {sorted(unexpected)}"


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "octavo = octavo.serving.cli:main" in archive.read(entry_points).decode()
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    version = importlib.util.spec_from_file_location("octavo_root", ROOT / "__init__.py")
    assert version is not None
    assert version.loader is not None
    module = importlib.util.module_from_spec(version)
    version.loader.exec_module(module)
    assert f"\nVersion: {module.__version__}\n" in text
    assert "\nRequires-Python: >=3.11\n" in text


def test_every_folder_with_code_is_a_listed_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {name.parent for name in tracked_files() if name.suffix == ".py" and name.parts[0] in PACKAGE_FOLDERS}
    expected = {"octavo"} | {".".join(("octavo", *folder.parts)) for folder in folders}
    assert set(listed) == expected
    without_init = [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").is_file()]
    assert not without_init


def test_installed_package_works_anywhere(installed: Path, tmp_path: Path) -> None:
    script = """
import octavo, sys
from octavo import RequestError, SamplingParams
import octavo.engine.messages
assert SamplingParams(temperature=0.0).greedy
assert "jax" not in sys.modules
print(octavo.__file__)
"""
    result = run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(installed))
    assert Path(result.stdout.strip()).is_relative_to(installed)


def test_tests_run_in_an_oddly_named_clone(clone: Path, installed: Path) -> None:
    """pytest must neither import the root's ``__init__`` as a test package nor prefer the checkout to the install."""
    result = run(
        *(sys.executable, "-m", "pytest", "tests/test_architecture.py", "-k", "finds_the_fault or package_was_found"),
        cwd=clone,
        PYTHONPATH=str(installed),
    )
    assert re.search(r"^\d+ passed", result.stdout, re.MULTILINE), result.stdout


def machine_paths(text: str) -> list[str]:
    return [line for line in text.splitlines() if MACHINE_PATHS.search(line)]


def test_public_text_names_no_machine_path() -> None:
    found = []
    for name in tracked_files():
        if name.suffix in {".md", ".toml", ".py", ".sh", ""} and name != Path("tests/test_packaging.py"):
            found += [f"{name}: {line}" for line in machine_paths((ROOT / name).read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["see /root/octavo", "P=/home/me/bin/python", "cp ../shared/x .", "(/tmp/env3/x)"])
def test_machine_paths_are_seen(text: str) -> None:
    assert machine_paths(text)


@pytest.mark.parametrize("text", ["http://localhost:8000/home/x", "~/.cache/octavo", "/v1/work", "shared_prefix"])
def test_other_paths_are_not(text: str) -> None:
    assert not machine_paths(text)
