"""How many blocks a decision of the scheduler takes or has to leave: for what runs, and for what was promised."""

from collections.abc import Sequence

from .kv_cache_manager import KVCacheManager
from .request import Request

MAX_PREEMPTIONS = 3
"""A request that was preempted this often runs to its end once it is admitted again."""


def must_preempt(kv: KVCacheManager, running: Sequence[Request], budget: int) -> bool:
    """The free blocks do not suffice for the next step of all that run, ``budget`` tokens in all."""
    if kv.pool.num_free >= len(running) + budget // kv.block_size:
        return False  # each row needs one block at most besides the full ones of the budget
    needed = 0
    for request in running:
        count = min(request.num_new_tokens, budget)
        budget -= count
        needed += max(0, kv.blocks_for(request.num_computed_tokens + count) - len(request.blocks))
    return needed > kv.pool.num_free


def headroom(kv: KVCacheManager, running: Sequence[Request], request: Request, num_tokens: int) -> int:
    """Blocks to leave free when ``request`` is admitted with ``num_tokens`` of its tokens.

    Those for the rest of its prompt, and after a preemption one per running request. Without it a long prompt starts
    into a full pool only to be thrown out again, and a preempted request comes back one step later to be preempted
    again.
    """
    rest = kv.blocks_for(request.num_tokens) - kv.blocks_for(num_tokens)
    if running and request.admissions > 0:
        rest += len(running)
    return rest if running else 0


def keeps_promises(kv: KVCacheManager, running: Sequence[Request], request: Request) -> bool:
    """Whether ``request`` may be admitted without a request that was preempted often enough being preempted again.

    Those that come after such a request in ``queue_key`` are no danger to it: they would be preempted first. It and
    those before it must all have room up to their longest possible ends.
    """
    promised = [one.queue_key for one in (*running, request) if one.timing.num_preemptions >= MAX_PREEMPTIONS]
    if not promised or request.queue_key > max(promised):
        return True
    owed = 0
    for one in (*running, request):
        if one.queue_key <= max(promised):
            owed += kv.blocks_for(one.max_total_tokens) - len(one.blocks)
    return owed <= kv.pool.num_free
