"""Measured kernel sizes: found by device, operation and facts, or not at all."""

import json

import pytest

from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.paged_attention.config import MosaicTuningConfig
from octavo.pallas_kernels.tuning import current_gpu, find_tuned, forced, use_folder, user_files, write_tuned

ENTRIES = [
    {"when": {"head_dim": 128, "block_size": 64}, "config": {"tile_kv": 128}},
    {"when": {"head_dim": 128}, "config": {"tile_kv": 64}},
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "nvidia-h200").mkdir()
    (tmp_path / "nvidia-h200" / "paged_attention.json").write_text(json.dumps(ENTRIES), encoding="utf-8")
    return tmp_path


def test_the_first_entry_that_fits_counts(folder):
    def find(operation="paged_attention", device="NVIDIA H200", **facts):
        return find_tuned(operation, device, facts, folder)

    assert find(head_dim=128, block_size=64) == {"tile_kv": 128}
    assert find(head_dim=128, block_size=16) == {"tile_kv": 64}
    assert find(head_dim=64, block_size=64) is None
    assert find(device="NVIDIA H100", head_dim=128) is None
    assert find(operation="other", head_dim=128) is None


@pytest.mark.parametrize("content", ['{"head_dim": 128}', '[{"when": {}}]', '["x"]'])
def test_a_malformed_file_is_named(folder, content):
    path = folder / "nvidia-h200" / "paged_attention.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"paged_attention\.json: "):
        find_tuned("paged_attention", "NVIDIA H200", {}, folder)


def test_a_cpu_is_no_gpu():
    assert current_gpu() is None


def test_fields_are_those_of_the_config():
    fields = {"tile_kv": 64, "stages": 3, "min_keys_per_item": 256, "target_thread_blocks": 132}
    assert MosaicTuningConfig(**fields).stages == 3


def test_a_written_entry_is_found_first_and_replaces_its_like(folder):
    def write(config, **when):
        return write_tuned("paged_attention", "NVIDIA H200", when, config, folder)

    write({"tile_kv": 256}, head_dim=128)
    write({"tile_kv": 64}, head_dim=64)
    assert write({"tile_kv": 512}, head_dim=128, block_size=64).name == "paged_attention.json"
    facts = {"head_dim": 128, "block_size": 64}
    assert find_tuned("paged_attention", "NVIDIA H200", facts, folder) == {"tile_kv": 512}
    facts["block_size"] = 16
    assert find_tuned("paged_attention", "NVIDIA H200", facts, folder) == {"tile_kv": 256}
    entries = json.loads((folder / "nvidia-h200" / "paged_attention.json").read_text(encoding="utf-8"))
    assert len(entries) == 3


def test_the_users_folder_goes_before_the_packages_own(folder, tmp_path, monkeypatch):
    own = tmp_path / "own"
    monkeypatch.setattr(tuning, "FOLDER", own)
    write_tuned("paged_attention", "NVIDIA H200", {"head_dim": 128}, {"tile_kv": 320}, own)
    write_tuned("paged_attention", "NVIDIA H200", {"head_dim": 256}, {"tile_kv": 192}, own)

    def find(head_dim):
        return find_tuned("paged_attention", "NVIDIA H200", {"head_dim": head_dim})

    assert find(128) == {"tile_kv": 320}
    use_folder(folder)
    try:
        assert find(128) == {"tile_kv": 64}
        assert find(256) == {"tile_kv": 192}
        before = user_files()
        assert [name for name, _ in before] == ["nvidia-h200/paged_attention.json"]
        write_tuned("paged_attention", "NVIDIA H200", {"head_dim": 64}, {"tile_kv": 448}, folder)
        assert user_files() != before
        with forced("paged_attention", {"tile_kv": 1}):
            assert find(128) == {"tile_kv": 1}
        assert find(128) == {"tile_kv": 64}
    finally:
        use_folder(None)
    assert user_files() == ()
    assert find(128) == {"tile_kv": 320}
