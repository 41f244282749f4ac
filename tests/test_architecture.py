"""The house rules that a machine can check, read from the source with ``ast``.

Every rule is a function from one module to a list of complaints. Each is run over the whole
package, and over a bad sample that it must complain about.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("pallas_kernels", "models", "engine", "serving")
"""Lowest first: a layer imports from itself and from lower ones."""
DEVICE_HALF = {
    "calibration",
    "compile_cache",
    "convert",
    "core",
    "core_parts",
    "core_process",
    "device_state",
    "executable_cache",
    "host_pool",
    "launch",
    "model_runner",
    "plan",
    "pool_size",
    "programs",
    "quantize",
    "quantize_layers",
    "step",
    "step_work",
    "tune",
    "warmup",
    "llm",
}
"""Engine modules that may import jax and models, besides ``sampler*``. All others are the host half."""
ACCELERATOR_PACKAGES = {"jax", "jaxlib", "flax", "orbax"}
JAX_FREE_MODELS = {
    "models.config",
    "models.errors",
    "models.loading.errors",
    "models.loading.gguf_file",
    "models.loading.orbax_index",
    "models.loading.resolve",
}
"""Modules of ``models`` without jax, which the host half may read."""
LAZY_IMPORTS = {
    ("__init__.py", "__getattr__"),
    ("models/architectures/__init__.py", "get_architecture"),
    ("models/loading/loader.py", "_load_orbax"),
    ("pallas_kernels/dispatch.py", "gpu_interpreter"),
    ("pallas_kernels/dispatch.py", "load_mosaic"),
    ("serving/api_process.py", "_load"),
    ("serving/cli.py", "_load"),
    ("serving/convert.py", "_load"),
    ("serving/plan.py", "_load"),
    ("serving/quantize.py", "_load"),
    ("serving/tune.py", "_load"),
}
"""(file, function) that may import when called: the lazy registries."""
ENVIRONMENT_READERS = {"serving/cli.py"}
ENVIRONMENT_WRITERS = {"engine/launch.py", "pallas_kernels/aot.py", "serving/supervisor.py"}
"""May set (and unset) a variable that a library has no other option for; may not read one."""
FOREIGN_WARNINGS: tuple[str, ...] = ()
"""``-W`` filters for warnings that other packages raise while they are imported."""

MAX_FUNCTION_LINES, MAX_KERNEL_LINES = 60, 150
MAX_PARAMETERS, MAX_KERNEL_PARAMETERS = 8, 13  # a kernel's parameters are its operands and its static options
MAX_FILE_LINES, MAX_KERNEL_FILE_LINES = 400, 500


@dataclass(frozen=True)
class Module:
    """One source file; ``path`` is relative to the repository root, with forward slashes."""

    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)

    @property
    def name(self) -> str:
        """Dotted name below ``octavo``; empty for the root ``__init__``."""
        return self.path.removesuffix(".py").replace("/", ".").removesuffix("__init__").strip(".")

    @property
    def layer(self) -> str:
        return self.name.split(".")[0] if "." in self.name or self.name in LAYERS else ""

    @property
    def package(self) -> list[str]:
        parts = self.path.removesuffix(".py").split("/")
        return parts[:-1]

    @property
    def in_host_half(self) -> bool:
        stem = self.name.removeprefix("engine.")
        return self.layer == "engine" and stem not in DEVICE_HALF and not stem.startswith("sampler")


Check = Callable[[Module], list[str]]


def package_modules() -> list[Module]:
    files = sorted(ROOT.glob("*.py")) + [f for layer in LAYERS for f in sorted((ROOT / layer).rglob("*.py"))]
    return [Module(f.relative_to(ROOT).as_posix(), f.read_text(encoding="utf-8")) for f in files]


def dotted_name(module: Module) -> str:
    return f"octavo.{module.name}" if module.name else "octavo"


def imports(module: Module) -> Iterator[tuple[int, str, bool]]:
    """(line, name, own) of every import; an own name is below ``octavo``, others are absolute."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, False
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                base = module.package[: len(module.package) - (node.level - 1)] + base
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name]), node.level > 0


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def check_direction(module: Module) -> list[str]:
    """serving -> engine -> models -> pallas_kernels; serving leaves jax to the engine."""
    if not module.layer:
        return []
    found = []
    for line, name, own in imports(module):
        target = name.split(".")[0]
        if own and target in LAYERS and LAYERS.index(target) > LAYERS.index(module.layer):
            found.append(f"{module.path}:{line}: {module.layer} imports {name}")
        if module.layer == "serving" and not own and target in ACCELERATOR_PACKAGES:
            found.append(f"{module.path}:{line}: serving imports {name}")
    return found


def check_relative(module: Module) -> list[str]:
    """Inside the package imports are relative; nothing reaches above its root."""
    found = []
    for line, name, own in imports(module):
        if not own and name.split(".")[0] in {"octavo", *LAYERS}:
            found.append(f"{module.path}:{line}: absolute import of {name}")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.level > len(module.package) + 1:
            found.append(f"{module.path}:{node.lineno}: import from above the package")
    return found


def check_device_line(module: Module) -> list[str]:
    """The engine's host half imports neither jax nor flax nor models."""
    if not module.in_host_half:
        return []
    found = []
    for line, name, own in imports(module):
        if not own and name.split(".")[0] in ACCELERATOR_PACKAGES:
            found.append(f"{module.path}:{line}: host half imports {name}")
        jax_free = any(name == free or name.startswith(free + ".") for free in JAX_FREE_MODELS)
        if own and name.split(".")[0] in {"models", "pallas_kernels"} and not jax_free:
            found.append(f"{module.path}:{line}: host half imports {name}")
        if own and name.startswith("engine."):
            other = name.split(".")[1]
            if other in DEVICE_HALF or other.startswith("sampler"):
                found.append(f"{module.path}:{line}: host half imports the device half's {name}")
    return found


def check_private_jax(module: Module) -> list[str]:
    found = [f"{module.path}:{line}: {name}" for line, name, own in imports(module) if name.startswith("jax._src")]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr == "_src":
            found.append(f"{module.path}:{node.lineno}: use of _src")
    return found


def check_environment(module: Module) -> list[str]:
    """Only the command line reads environment variables."""
    if module.path in ENVIRONMENT_READERS:
        return []
    names = {"environ", "environb", "getenv", "putenv"}
    found = [
        f"{module.path}:{line}: {name}"
        for line, name, own in imports(module)
        if not own and name.split(".")[0] == "os" and name.split(".")[-1] in names
    ]
    written = set()
    if module.path in ENVIRONMENT_WRITERS:
        targets = [
            t for node in ast.walk(module.tree) if isinstance(node, ast.Assign | ast.Delete) for t in node.targets
        ]
        written = {id(target.value) for target in targets if isinstance(target, ast.Subscript)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in names and id(node) not in written:
            found.append(f"{module.path}:{node.lineno}: os.{node.attr}")
    return found


def check_lazy_imports(module: Module) -> list[str]:
    """No import inside a function, by statement or by call, except in the lazy registries."""
    found = []
    for function in functions(module):
        if (module.path, function.name) in LAZY_IMPORTS:
            continue
        for node in ast.walk(function):
            called = node.func if isinstance(node, ast.Call) else None
            name = getattr(called, "attr", getattr(called, "id", ""))
            if isinstance(node, ast.Import | ast.ImportFrom) or name in {"import_module", "__import__"}:
                found.append(f"{module.path}:{node.lineno}: import inside {function.name}")
    return found


def check_sizes(module: Module) -> list[str]:
    in_kernels = module.layer == "pallas_kernels"
    limit = MAX_KERNEL_FILE_LINES if in_kernels else MAX_FILE_LINES
    lines = len(module.source.splitlines())
    found = [f"{module.path}: {lines} lines, at most {limit}"] if lines > limit else []
    is_kernel = in_kernels and Path(module.path).name.startswith("mosaic")
    function_limit = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
    for node in functions(module):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > function_limit:
            found.append(f"{module.path}:{node.lineno}: {node.name} has {length} lines, at most {function_limit}")
    return found


def check_parameters(module: Module) -> list[str]:
    limit = MAX_KERNEL_PARAMETERS if module.layer == "pallas_kernels" else MAX_PARAMETERS
    found = []
    for node in functions(module):
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
        count = len(names) - (names[:1] in (["self"], ["cls"])) + len(node.args.kwonlyargs)
        if count > limit:
            found.append(f"{module.path}:{node.lineno}: {node.name} has {count} parameters, at most {limit}")
    return found


CHECKS: tuple[Check, ...] = (
    check_direction,
    check_relative,
    check_device_line,
    check_private_jax,
    check_environment,
    check_lazy_imports,
    check_sizes,
    check_parameters,
)

BAD_SAMPLES: list[tuple[Check, str, str]] = [
    (check_direction, "models/decoder.py", "from ..engine.scheduler import Scheduler"),
    (check_direction, "models/decoder.py", "from .. import serving"),
    (check_direction, "models/layers/norm.py", "from ...engine import config"),
    (check_direction, "pallas_kernels/op/mosaic.py", "from ...models.kv_cache import KVCacheSpec"),
    (check_direction, "engine/core.py", "def f():\n    from ..serving.app import make_app"),
    (check_direction, "serving/app.py", "import jax.numpy as jnp"),
    (check_relative, "engine/scheduler.py", "from octavo.engine.request import Request"),
    (check_relative, "engine/scheduler.py", "import octavo"),
    (check_relative, "engine/scheduler.py", "from engine.request import Request"),
    (check_relative, "engine/scheduler.py", "from ...elsewhere import thing"),
    (check_device_line, "engine/scheduler.py", "import jax"),
    (check_device_line, "engine/input_batch.py", "from flax import nnx"),
    (check_device_line, "engine/block_pool.py", "from ..models.kv_cache import KVCacheSpec"),
    (check_device_line, "engine/scheduler.py", "from .model_runner import ModelRunner"),
    (check_device_line, "engine/scheduler.py", "from . import sampler_topk"),
    (check_private_jax, "models/decoder.py", "from jax._src.core import Tracer"),
    (check_private_jax, "models/decoder.py", "from jax import _src"),
    (check_private_jax, "models/decoder.py", "import jax\njax._src.core"),
    (check_environment, "engine/core.py", "import os\nx = os.environ['HOME']"),
    (check_environment, "engine/core.py", "import os\nx = os.getenv('HOME')"),
    (check_environment, "engine/core.py", "from os import environ"),
    (check_environment, "engine/core.py", "import os\nos.environ['A'] = 'b'"),
    (check_environment, "engine/launch.py", "import os\nos.environ['A'] = os.environ['B']"),
    (check_lazy_imports, "engine/core.py", "def f():\n    import json"),
    (check_lazy_imports, "engine/core.py", "class C:\n    def f(self):\n        from . import step"),
    (check_lazy_imports, "engine/core.py", "import importlib\ndef f():\n    importlib.import_module('json')"),
    (check_sizes, "engine/core.py", "x = 1\n" * (MAX_FILE_LINES + 1)),
    (check_sizes, "pallas_kernels/op/xla.py", "x = 1\n" * (MAX_KERNEL_FILE_LINES + 1)),
    (check_sizes, "engine/core.py", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (check_sizes, "pallas_kernels/op/mosaic.py", "def f():\n" + "    x = 1\n" * MAX_KERNEL_LINES),
    (check_parameters, "engine/core.py", "def f(a, b, c, d, e, *, f, g, h, i): ..."),
    (check_parameters, "engine/core.py", "class C:\n    def f(self, a, b, c, d, e, f, g, h, i): ..."),
    (check_parameters, "pallas_kernels/op/xla.py", "def f(a, b, c, d, e, f, g, h, i, j, k, l, m, n): ..."),
]

GOOD_SAMPLES: list[tuple[str, str]] = [
    ("serving/app.py", "from ..engine.async_llm import AsyncLLM\nfrom .protocol import chat"),
    ("engine/core.py", "import os\nimport jax\nfrom ..models import decoder\nx = os.cpu_count()"),
    ("engine/sampler_topk.py", "import jax\nfrom .sampler import sample"),
    (
        "engine/scheduler.py",
        "import numpy as np\nfrom .request import Request\nfrom ..models.config import ModelConfig",
    ),
    ("models/layers/norm.py", "import jax\nfrom ...pallas_kernels.dispatch import Implementation"),
    ("pallas_kernels/op/mosaic.py", "def f(a, b, c, d, e, f, g, h, i, j):\n" + "    x = 1\n" * (MAX_KERNEL_LINES - 1)),
    (
        "engine/core.py",
        "class C:\n def f(self, a, b, c, d, e, f, g, h):\n" + "  x = 1\n" * (MAX_FUNCTION_LINES - 1),
    ),
    ("engine/launch.py", "import os\nos.environ['A'] = 'b'"),
    ("__init__.py", "import importlib\ndef __getattr__(name):\n    return importlib.import_module(name)"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package_keeps_the_rule(check: Check) -> None:
    found = [complaint for module in package_modules() for complaint in check(module)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("check", "path", "source"), BAD_SAMPLES)
def test_rule_finds_the_fault(check: Check, path: str, source: str) -> None:
    assert check(Module(path, source))


@pytest.mark.parametrize(("path", "source"), GOOD_SAMPLES)
def test_rules_accept_good_code(path: str, source: str) -> None:
    assert [complaint for check in CHECKS for complaint in check(Module(path, source))] == []


def test_every_check_has_a_bad_sample() -> None:
    assert {check for check, _, _ in BAD_SAMPLES} == set(CHECKS)


def test_the_package_was_found() -> None:
    names = {module.name for module in package_modules()}
    assert {"", "__main__", "engine.messages", "models.kv_cache", "serving", "pallas_kernels"} <= names


IMPORT_ALONE = """
import importlib, sys, traceback
failed = []
for name in sys.argv[1:]:
    for loaded in [m for m in sys.modules if m == "octavo" or m.startswith("octavo.")]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except BaseException:
        failed.append(name + "\\n" + traceback.format_exc(limit=-3))
print("\\n".join(failed))
sys.exit(bool(failed))
"""
"""Imports each module as if it were the first of the package, in one process."""

NO_JAX = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
sys.exit(any(package in sys.modules for package in ("jax", "jaxlib", "flax")))
"""


def run_python(script: str, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT / "tests")


def test_every_module_imports_alone_without_warnings() -> None:
    options = ["-W", "error"] + [part for text in FOREIGN_WARNINGS for part in ("-W", text)]
    names = [dotted_name(module) for module in package_modules() if module.name != "__main__"]
    result = run_python(IMPORT_ALONE, *names, options=tuple(options))
    assert result.returncode == 0, result.stdout + result.stderr


def test_importing_alone_finds_a_warning_and_an_error() -> None:
    warn = 'import warnings; warnings.warn("old", DeprecationWarning)\n'
    assert run_python(warn, options=("-W", "error")).returncode != 0
    assert run_python(IMPORT_ALONE, "octavo", "octavo.no_such_module").returncode == 1


def test_host_half_and_serving_never_load_jax() -> None:
    """One process imports all of them; only on failure each is tried alone, to name the culprits."""
    modules = [m for m in package_modules() if m.in_host_half or m.layer == "serving" or not m.layer]
    names = [dotted_name(module) for module in modules]
    if run_python(NO_JAX, *names).returncode == 0:
        return
    results = {name: run_python(NO_JAX, name) for name in names}
    culprits = [f"{name}: {result.stderr[-500:]}" for name, result in results.items() if result.returncode != 0]
    pytest.fail("these load jax, or do not import:\n" + "\n".join(culprits))


def test_loading_jax_is_seen() -> None:
    assert run_python(NO_JAX, "octavo.models.kv_cache").returncode == 1
