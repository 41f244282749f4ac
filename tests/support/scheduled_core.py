"""``octavo`` whose core has the real scheduler and no device: ``python scheduled_core.py serve ...``.

Queues, blocks, preemptions and refusals are the real ones; the tokens come from the rule of ``scheduler_harness``.
"""

import sys

import scheduler_harness

from octavo.engine import core_child
from octavo.engine.core import EngineCore
from octavo.engine.core_parts import make_scheduler
from octavo.engine.core_server import run_core
from octavo.serving.cli import main

SCHEDULED = [sys.executable, __file__]
"""The command, for ``server_process``."""
CONTEXT_LEN = 256


def launch(config, resolved, tokenizer_size):
    scheduler_harness.VOCAB = resolved.config.vocab_size
    config = config.resolve(
        platform="cpu",
        context_len=CONTEXT_LEN,
        model_path=str(resolved.path),
        model_name="scheduled",
        vocab_size=resolved.config.vocab_size,
        eos_token_ids=frozenset(),
    ).with_pool(config.cache.num_blocks or 1000)
    device = scheduler_harness.Device(
        config.num_blocks,
        config.block_size,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_model_len,
    )
    runner = scheduler_harness.FakeRunner(device)
    return EngineCore(make_scheduler(config), runner, async_scheduling=False), config


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        core_child.core_command = lambda: SCHEDULED
        sys.exit(main())
    run_core(launch, sys.stdin.fileno())
