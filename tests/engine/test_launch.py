"""The launcher's dealings with a device's memory, without a GPU."""

import logging
import subprocess
import sys
from types import SimpleNamespace

from octavo.engine import launch

QUESTION = """
import jax
from octavo.engine.launch import backend_is_up
number = jax.config.jax_num_cpu_devices
assert not backend_is_up() and not backend_is_up()
assert jax.config.jax_num_cpu_devices == number
assert jax.devices()
assert backend_is_up()
assert jax.config.jax_num_cpu_devices == number
"""


def device(**stats):
    return SimpleNamespace(memory_stats=lambda: stats or None)


def test_a_backend_that_was_up_is_known():
    subprocess.run([sys.executable, "-c", QUESTION], check=True, timeout=60)


def test_the_share_in_force_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        launch._warn_of_share_in_force(device(bytes_limit=3 * 2**30))
    assert "gpu_memory_utilization has no effect" in caplog.text
    assert "3.00 GiB" in caplog.text
