"""Where tests keep compiled programs: one folder for all, so that each is compiled once."""

from pathlib import Path

CACHE_FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "jax"
