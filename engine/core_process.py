"""The core as a process: ``python -m octavo.engine.core_process``, started by ``core_child``, never by hand.

Nothing in here imports a tokenizer: text is made by the processes around it.
"""

import sys

from .core_server import run_core
from .launch import launch_core

if __name__ == "__main__":
    run_core(launch_core, sys.stdin.fileno())
