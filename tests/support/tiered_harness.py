"""Not a test file: the scheduler harness with a host tier, over a device that really keeps what is copied to it."""

import random
from collections import Counter

import numpy as np
from scheduler_harness import VOCAB, Device, Harness, expected_tokens

from octavo.engine.host_tier import HostTier
from octavo.engine.kv_cache_manager import KVCacheManager
from octavo.engine.messages import AbortRequest


class TieredDevice(Device):
    """Carries out chunk copies before the step, in their order. Its chunks hold token ids, like its pool."""

    def __init__(self, num_chunks, chunk_size, *args):
        super().__init__(*args)
        self.chunks = np.full((num_chunks, chunk_size, self.block_size), -1)
        self.num_copies = 0
        self.num_computed = Counter()
        """Tokens computed, by request."""
        self.fault: AssertionError | None = None
        """What was wrong with a step; the core takes it for a broken device and tries again."""

    def run(self, plan):
        for row in plan.rows:
            self.num_computed[row.request.request_id] += row.num_tokens
        try:
            return self.run_in_order(plan)
        except AssertionError as error:
            self.fault = error
            raise

    def run_in_order(self, plan):
        self.copy(plan.chunk_copies)
        return super().run(plan)

    def copy(self, copies):
        for copy in copies:
            assert copy.blocks, "a copy of nothing"
            assert len(copy.blocks) <= self.chunks.shape[1]
            for block, place in copy.blocks:
                assert block != 0, "a copy from or to the null block"
                if copy.to_host:
                    self.chunks[copy.chunk, place] = self.pool[block]
                else:
                    self.pool[block] = self.chunks[copy.chunk, place]
            self.num_copies += 1


class RecordingManager(KVCacheManager):
    """Remembers which token ids each key stands for."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.content = {}

    def _key(self, request, index):
        key = super()._key(request, index)
        self.content[key] = request.token_ids[index * self.block_size : (index + 1) * self.block_size]
        return key


class TieredHarness(Harness):
    """``num_chunks`` 0: no host tier. After each step both tiers hold what their keys promise."""

    device_class = TieredDevice

    def __init__(self, num_chunks=4, chunk_size=2, num_blocks=16, block_size=4, max_num_seqs=4, budget=16, **options):
        sizes = (num_blocks, block_size, max_num_seqs, budget)
        super().__init__(*sizes, **options)
        self.host = HostTier(num_chunks, chunk_size) if num_chunks else None
        self.kv = RecordingManager(num_blocks, block_size, host_tier=self.host)
        self.scheduler.kv = self.kv
        max_model_len = options.get("max_model_len", 40)
        self.device = self.device_class(max(num_chunks, 1), chunk_size, *sizes, max_model_len)
        self.runner.device = self.device

    def step(self):
        try:
            plan = super().step()
        finally:
            if self.device.fault is not None:
                raise self.device.fault
        self.check_content()
        return plan

    def check_content(self):
        assert not self.kv._chunk_copies, "copies that no step has taken along"
        for key, block in self.kv.pool._cached.items():
            assert self.device.pool[block.block_id].tolist() == self.kv.content[key], f"{block} holds something else"
        for key, place in self.host._places.items() if self.host is not None else ():
            found = self.device.chunks[place.chunk, place.place].tolist()
            assert found == self.kv.content[key], f"{place} holds something else"


def random_traffic(seed, harness, turns=40):
    """Conversations that grow, others that come and go, aborts, salts, choices. Every answer must be the right one."""
    rng = random.Random(seed)
    sent, aborted, now = {}, set(), 0
    histories = [[rng.randrange(9)] for _ in range(4)]
    while now < turns or harness.scheduler.has_work:
        if now < turns and rng.random() < 0.5:
            prompt = rng.choice(histories)
            prompt += [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
            if len(prompt) > 26:
                del prompt[1:]
            n, max_tokens = rng.choice([1, 1, 1, 2, 3]), rng.randrange(1, 12)
            options = {"prompt_logprobs": rng.choice([None, None, None, 2]), "salt": rng.choice([None, None, "x"])}
            stops = frozenset(rng.sample(range(VOCAB), 100)) if rng.random() < 0.3 else frozenset()
            name = f"r{now}"
            harness.add(name, list(prompt), n=n, max_tokens=max_tokens, stops=stops, **options)
            sent[name] = (list(prompt), n, max_tokens, stops)
        if sent and rng.random() < 0.1:
            index = rng.choice([None, 0, 1])
            outputs = harness.scheduler.abort(AbortRequest(request_id=rng.choice(list(sent)), index=index))
            aborted |= {(output.request_id, output.index) for output in outputs}
            harness.take(outputs)
        if rng.random() < 0.02:
            harness.core.reset_prefix_cache()
        if harness.scheduler.has_work:
            harness.step()
        now += 1
        assert now < 3000
    assert harness.kv.pool.num_free == harness.kv.pool.num_usable
    for name, (prompt, n, max_tokens, stops) in sent.items():
        for choice in range(n):
            expected = expected_tokens(prompt, max_tokens, choice, stops=stops)
            found = harness.outputs.get((name, choice), [])
            assert found == expected[: len(found)]
            assert len(found) == len(expected) or (name, choice) in aborted
