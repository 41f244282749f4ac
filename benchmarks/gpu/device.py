"""The device that JAX runs on, and the package where it is not installed."""

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def ensure_octavo(root: Path = ROOT) -> None:
    """Makes ``import octavo`` work from a bare copy of the repository, whose root is the package."""
    if importlib.util.find_spec("octavo") is not None:
        return
    spec = importlib.util.spec_from_file_location(
        "octavo", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["octavo"] = module
    spec.loader.exec_module(module)


def jax_device() -> dict[str, Any]:
    """Platform, kind, driver and versions, as JAX sees them; starts the backend."""
    import jax

    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit")
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
        "multiprocessors": getattr(device, "core_count", None),
        "memory_limit_bytes": memory,
        "backend": device.client.platform_version,
        "driver": driver_version() if device.platform == "gpu" else None,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
    }


def torch_device() -> dict[str, Any]:
    """The same of torch, for the parts that run rivals."""
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "platform": "gpu" if on_gpu else "cpu",
        "kind": torch.cuda.get_device_name() if on_gpu else "cpu",
        "driver": driver_version() if on_gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def driver_version() -> str | None:
    """NVIDIA's driver, from nvidia-smi; None where that does not tell."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.split("\n")[0].strip() or None
