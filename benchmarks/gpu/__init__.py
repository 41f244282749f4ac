"""The parts of ``gpu_check.py``; each is a module with ``run(report, options)`` and runs in a process of its own."""
