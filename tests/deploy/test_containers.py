"""``deploy/Dockerfile`` and the Compose files, without a container engine: linted, parsed, and checked to fit together.

The image itself is not built here.
"""

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from octavo.serving import cli, flags
from octavo.serving.supervisor import STOP_MARGIN_S

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
BESIDE_PYTHON = str(Path(sys.executable).parent)
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=BESIDE_PYTHON)
COMPOSE = shutil.which("docker-compose")
NO_HADOLINT = "hadolint is not installed: the Dockerfile is not linted"
NO_COMPOSE = "docker-compose is not installed: compose.yaml is not read by it"
PACKAGE_FOLDERS = ("engine", "models", "pallas_kernels", "serving")


def lint(file: Path) -> str:
    return subprocess.run([str(HADOLINT), str(file)], capture_output=True, text=True, timeout=60).stdout


@pytest.mark.skipif(HADOLINT is None, reason=NO_HADOLINT)
def test_hadolint(tmp_path):
    assert lint(DOCKERFILE) == ""
    for old, new, rule in (
        ("--no-install-recommends ", "", "DL3015"),
        ("WORKDIR /data", "WORKDIR data", "DL3000"),
        ("AS base-cpu", "AS base-cuda12", "DL3024"),
        ("USER 10001:10001", "USER root", "DL3002"),
    ):
        bad = tmp_path / "Dockerfile"
        text = DOCKERFILE.read_text()
        assert old in text
        bad.write_text(text.replace(old, new))
        assert rule in lint(bad)


def instructions() -> list[tuple[str, str]]:
    """(name, rest) of each, continued lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def of_last_stage(name: str) -> str:
    values = instructions()
    [*_, last] = [number for number, (one, _) in enumerate(values) if one == "FROM"]
    [value] = [rest for one, rest in values[last:] if one == name]
    return value


def test_the_image():
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", of_last_stage("USER"))
    volume = of_last_stage("VOLUME")
    assert f"HF_HOME={volume}/" in of_last_stage("ENV")
    assert "/health" in of_last_stage("HEALTHCHECK")
    assert "--start-period=" in of_last_stage("HEALTHCHECK")
    entry = yaml.safe_load(of_last_stage("ENTRYPOINT"))
    assert entry[0] == "octavo"
    args = cli.make_parser().parse_args(entry[1:])
    assert args.compile_cache_dir.startswith(f"{volume}/")
    assert of_last_stage("EXPOSE") == str(flags.server_options(args, []).port)


def test_the_image_installs_what_the_scripts_install():
    runs = " ".join(rest for name, rest in instructions() if name == "RUN")
    [model] = re.findall(r"^DEFAULT_MODEL = (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"--no-deps {model}" in runs
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    script = (DEPLOY / "make-serve-venv").read_text()
    bases = set(re.findall(r"AS base-(\w+)", DOCKERFILE.read_text()))
    devices = {name for name in extras if name.startswith("cuda")}
    assert bases == {"cpu", *devices}
    assert all(f"extra={name}" in script for name in devices)


def is_ignored(path: str, patterns: list[str]) -> bool:
    """The last pattern that matches a path or a folder above it decides."""
    ignored = False
    parts = path.split("/")
    prefixes = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    for pattern in patterns:
        body = pattern.removeprefix("!")
        bodies = [body, body.removeprefix("**/")] if body.startswith("**/") else [body]
        names = [*prefixes, *parts] if body.startswith("**/") else prefixes
        if any(fnmatch.fnmatchcase(name, one) for name in names for one in bodies):
            ignored = not pattern.startswith("!")
    return ignored


def test_what_is_copied_is_enough(tmp_path):
    """A wheel made from the files that reach the builder has every package's modules."""
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert is_ignored("tests/conftest.py", patterns)
    assert is_ignored("engine/__pycache__/core.pyc", patterns)
    for file in [*ROOT.glob("*"), *(one for folder in PACKAGE_FOLDERS for one in (ROOT / folder).rglob("*"))]:
        name = file.relative_to(ROOT).as_posix()
        if file.is_file() and not is_ignored(name, patterns):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, tmp_path / name)
    build = "import setuptools.build_meta as backend; print(backend.build_wheel('.'))"
    command = [sys.executable, "-c", build]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    [wheel] = tmp_path.glob("octavo-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    for package in packages:
        folder = package.replace(".", "/").removeprefix("octavo").strip("/")
        modules = {f"octavo/{one.relative_to(ROOT).as_posix()}" for one in (ROOT / folder).glob("*.py")}
        assert modules
        assert modules <= inside


def compose(name: str = "compose.yaml") -> dict:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def test_compose():
    services = compose()["services"]
    servers = [name for name in services if name.startswith("octavo")]
    assert servers == ["octavo-1", "octavo-2", "octavo-3"]
    for name in servers:
        service = services[name]
        # Variables that are not set are empty.
        command = [re.sub(r"\$\{\w+:-(\w*)\}", r"\1", one) for one in service["command"]]
        args = cli.make_parser().parse_args(["serve", *command])
        assert not flags.refused_options(args)
        assert not flags.engine_args(args).model
        grace_s = float(service["stop_grace_period"].removesuffix("s"))
        assert grace_s >= flags.server_options(args, []).shutdown_timeout_s + STOP_MARGIN_S + 5
        assert service["build"]["dockerfile"] == "deploy/Dockerfile"
        assert "data:/data" in service["volumes"]
    assert re.findall(r"server (octavo-\d):8000", (DEPLOY / "nginx.conf").read_text()) == servers
    assert services["nginx"]["depends_on"] == servers
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == [f"{name}:8000" for name in servers]
    for service in services.values():
        for source in [volume.split(":")[0] for volume in service["volumes"]]:
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose()["volumes"]
    gpus = compose("compose.gpu.yaml")["services"]
    devices = [gpus[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for name in servers]
    assert devices == [["0"], ["1"], ["2"]]


@pytest.mark.skipif(COMPOSE is None, reason=NO_COMPOSE)
@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]], ids=["cpu", "gpu"])
def test_compose_reads_it(files):
    options = [part for name in files for part in ("-f", name)]
    command = [str(COMPOSE), *options, "--profile", "replicas", "--profile", "monitoring", "config"]
    result = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    read = yaml.safe_load(result.stdout)
    variant = "cuda12" if len(files) > 1 else "cpu"
    assert read["services"]["octavo-2"]["build"]["args"]["VARIANT"] == variant
    assert "--shutdown-timeout" in read["services"]["octavo-3"]["command"]


def test_grafana_finds_the_dashboard():
    [provider] = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/octavo.yaml").read_text())["providers"]
    folder = provider["options"]["path"]
    assert any(one.split(":")[1].startswith(f"{folder}/") for one in compose()["services"]["grafana"]["volumes"])
