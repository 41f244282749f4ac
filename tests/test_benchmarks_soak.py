"""The soak: a short one must pass, and each kind of fault that it is there for must make it fail."""

import importlib
import sys
from pathlib import Path

import pytest
from conftest_paths import CACHE_FOLDER
from real_server import serve
from scheduled_core import SCHEDULED
from tiny_model import add_tokenizer, tiny_model

from octavo.engine import kv_cache_manager
from octavo.engine.kv_cache_manager import KVCacheManager

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
soak = importlib.import_module("soak")
soak_traffic = importlib.import_module("soak_traffic")

MIB = 1 << 20
END = 'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n'
SMALL = ("--num-gpu-blocks-override", "20", "--max-model-len", "64", "--scheduling-policy", "priority")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("soak") / "model"))


def good_report():
    report = soak.Report(exit_code=0)
    report.tally.counts["finished"] = 5
    report.gauges = dict.fromkeys(soak.GAUGES, 0.0)
    report.counters = {"num_preemptions_total": 3.0}
    report.memory = {"core": [10 * MIB] * 40}
    return report


def test_nothing_is_wrong_with_a_good_report():
    assert soak.problems(good_report(), MIB) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda report: report.tally.wrong.append("x"), "wrong answer: x"),
        (lambda report: report.tally.errors.append("x"), "failure: x"),
        (lambda report: report.gauges.update(kv_cache_usage_perc=0.05), "kv_cache_usage_perc is 0.05, not 0"),
        (lambda report: report.gauges.update(num_requests_waiting=1), "num_requests_waiting is 1, not 0"),
        (lambda report: report.gauges.pop("num_requests_running"), "no figure num_requests_running"),
        (lambda report: report.tally.counts.update(finished=0), "no request finished"),
        (lambda report: report.counters.clear(), "no request was preempted: this was no pressure"),
        (lambda report: report.memory.update(core=list(range(0, 80 * MIB, MIB))), "memory of core grew by 40.0 MiB"),
        (lambda report: report.counters.update(compiles_after_ready_total=2), "2 programs were compiled while serving"),
        (lambda report: report.log.append("Traceback"), "log: Traceback"),
        (lambda report: setattr(report, "exit_code", 1), "the server ended with status 1"),
        (lambda report: report.left_behind.append("core.sock"), "left behind: core.sock"),
    ],
)
def test_each_fault_is_named(spoil, message):
    report = good_report()
    spoil(report)
    assert soak.problems(report, MIB) == [message]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('data: {"choices": []}\n\n', "the stream ended with"),
        ("", "the stream ended with"),
        ('data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n', "an error event"),
        (
            'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n' * 2 + "data: [DONE]\n\n",
            "went on",
        ),
    ],
)
def test_streams_that_are_not_whole(text, message):
    with pytest.raises(ValueError, match=message):
        soak_traffic.read_stream(text)


def test_a_short_soak_of_the_real_server(folder):
    """All processes, both cache tiers, preemptions. Its memory is not judged: a few seconds say nothing about it."""
    options = ["--compile-cache-dir", str(CACHE_FOLDER / "engine")]
    report = soak.soak(folder, seconds=6.0, clients=16, seed=1, options=options)
    assert soak.problems(report, 1 << 40) == []
    assert report.tally.counts["left"] > 0
    assert len(report.memory) == 3


def test_a_short_soak_of_two_api_processes(folder):
    """Over the real scheduler without a device: many more requests in the same time."""
    # The device of this scheduler has no host memory.
    options = ["--api-server-count", "2", "--swap-space", "0"]
    report = soak.soak(folder, seconds=4.0, clients=32, seed=2, options=options, program=SCHEDULED)
    assert soak.problems(report, 1 << 40) == []
    assert min(report.tally.counts.values()) > 0
    assert len(report.memory) == 4


async def test_faults_of_the_cache_are_found(folder, monkeypatch):
    """A leaked block, and a cache that mixes prompts up; without either the same traffic leaves nothing to find."""
    monkeypatch.setattr(soak, "IDLE_S", 0.2)
    async with serve(folder, *SMALL) as server:

        async def soaked() -> list[str]:
            url = f"http://127.0.0.1:{server.server.bound_port}"
            report = await soak.run_soak(url, {}, seconds=1.0, clients=12, num_bodies=12)
            return soak.problems(report, MIB)

        assert await soaked() == []
        free, leaked = KVCacheManager.free, []

        def leak_once(self, request):
            if not leaked and request.blocks:
                leaked.append(request.blocks.pop(0))
            free(self, request)

        with monkeypatch.context() as mutation:
            mutation.setattr(KVCacheManager, "free", leak_once)
            assert await soaked() == [f"kv_cache_usage_perc is {1 / 19:g}, not 0"]
        server.core.scheduler.kv.pool.release(leaked)

        key = kv_cache_manager.block_key
        with monkeypatch.context() as mutation:
            mutation.setattr(kv_cache_manager, "block_key", lambda parent, ids, salt: key(b"", ids[:1], None))
            assert any(problem.startswith("wrong answer: request") for problem in await soaked())
