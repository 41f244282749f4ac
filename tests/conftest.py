"""What every test run shares: the CPU, no network, and one compile cache for all processes.

The variables are set before anything imports jax, so that child processes inherit them.
"""

import os
from pathlib import Path

CACHE_FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "jax"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE_FOLDER))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
# XLA's threads on a CPU, which are else as many as cores. Interpreted, the three warpgroups of the mixed attention
# kernel and the program that calls it hold one each while they wait for each other: two would wait for ever.
os.environ.setdefault("NPROC", "6")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
