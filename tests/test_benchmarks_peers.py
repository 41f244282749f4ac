"""Peers side by side: whose turn it is, the table, the adapters' protocol, and the export of the default model."""

import importlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
export = importlib.import_module("export_default_model")
peer_setup = importlib.import_module("peer_setup")
peers = importlib.import_module("peers")
workloads = importlib.import_module("workloads")

FAKE_ADAPTER = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS / "peer_adapters")!r})
from protocol import Measured, claim_stdout, serve

stream = claim_stdout()
print("noise from the engine")

def run(items):
    print("more noise")
    if items[0].prompt_ids[0] % 2 and len(items) > 1:
        return Measured(1.0, [[1]] * len(items), [])
    return Measured(2.0, [[9] * item.max_tokens for item in items], [0.25])

serve(stream, {{"engine": "fake"}}, run)
"""


class Scripted:
    """An adapter that answers from a list and notes when it was asked."""

    def __init__(self, name: str, log: list[tuple[str, str, int]], walls_s: list[float], fails: str = "") -> None:
        self.name, self.log, self.walls_s, self.fails = name, log, list(walls_s), fails

    def run(self, workload: str, round_index: int, timeout_s: float) -> dict[str, Any]:
        self.log.append((self.name, workload, round_index))
        if workload == self.fails:
            raise RuntimeError(f"{self.name} cannot do {workload}")
        wall_s = 99.0 if round_index < 0 else self.walls_s[round_index]
        first = [1] * 8 if self.name != "other" else [1] * 7 + [2]
        return {
            "wall_s": wall_s,
            "output_tokens": 120,
            "ttft_p50_s": 0.5,
            "ttft_p99_s": None,
            "output_ids": [[1] * 8, first],
        }


def test_engines_take_turns_and_the_warm_up_does_not_count() -> None:
    log: list[tuple[str, str, int]] = []
    adapters = [Scripted("a", log, [1.0, 2.0]), Scripted("b", log, [4.0, 4.0])]
    results = peers.take_turns(adapters, ["single", "batch"], 2, 1.0, 0.0)
    per_round = [(name, workload) for workload in ("single", "batch") for name in ("a", "b")]
    assert log == [(name, workload, r) for r in (workloads.WARM_UP_ROUND, 0, 1) for name, workload in per_round]
    assert results.throughputs("single", "a") == [120.0, 60.0]
    assert results.throughputs("batch", "b") == [30.0, 30.0]


def test_a_failed_workload_is_not_asked_for_again_and_the_rest_goes_on() -> None:
    log: list[tuple[str, str, int]] = []
    adapters = [Scripted("a", log, [1.0] * 3), Scripted("b", log, [1.0] * 3, fails="batch")]
    results = peers.take_turns(adapters, ["single", "batch"], 3, 1.0, 0.0)
    assert log.count(("b", "batch", workloads.WARM_UP_ROUND)) == 1
    assert sum(name == "b" and workload == "batch" for name, workload, _ in log) == 1
    assert results.failures == {("batch", "b"): "b cannot do batch"}
    assert len(results.throughputs("single", "b")) == 3
    row = peers.report(results, ["a", "b"], ["single", "batch"]).splitlines()[-1].split()
    assert row == ["batch", "b", *["failed"] * 6]


def test_the_table_divides_our_median_by_theirs() -> None:
    log: list[tuple[str, str, int]] = []
    adapters = [Scripted("us", log, [1.0, 2.0, 1.5]), Scripted("other", log, [3.0, 3.0, 3.0])]
    results = peers.take_turns(adapters, ["single"], 3, 1.0, 0.0)
    rows = [line.split() for line in peers.report(results, ["us", "other"], ["single"]).splitlines()[2:]]
    assert rows[0] == ["single", "us", "80.0", "75%", "1.00", "500", "-", "100%"]
    assert rows[1] == ["single", "other", "40.0", "0%", "2.00", "500", "-", "50%"]


def test_the_protocol_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peer_adapters").mkdir()
    (tmp_path / "peer_adapters" / "peer_fake.py").write_text(FAKE_ADAPTER)
    monkeypatch.setattr(peers, "HERE", tmp_path)
    adapter = peers.Adapter("fake", Path(sys.executable), [])
    try:
        assert adapter.wait_ready() == {"engine": "fake"}
        answer = adapter.run("single", 0, 30.0)
        assert (answer["wall_s"], answer["output_tokens"], answer["ttft_p50_s"]) == (2.0, 128, 0.25)
        assert answer["output_ids"] == [[9] * 128]
        with pytest.raises(RuntimeError, match=r"fake on batch: RuntimeError: made 1 tokens where \d+"):
            adapter.run("batch", 0, 30.0)
        with pytest.raises(RuntimeError, match="FileNotFoundError"):
            adapter.run("nonsense", 0, 30.0)
        assert adapter.run("single", 1, 30.0)["output_tokens"] == 128
    finally:
        adapter.stop()
        Path(adapter.log.name).unlink()
    assert adapter.process.returncode == 0


def test_a_dead_adapter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peer_adapters").mkdir()
    (tmp_path / "peer_adapters" / "peer_fake.py").write_text("raise SystemExit(3)\n")
    monkeypatch.setattr(peers, "HERE", tmp_path)
    adapter = peers.Adapter("fake", Path(sys.executable), [])
    try:
        with pytest.raises(RuntimeError, match="fake died"):
            adapter.wait_ready()
        with pytest.raises(RuntimeError, match="fake"):
            adapter.run("single", 0, 5.0)
    finally:
        adapter.stop()
        Path(adapter.log.name).unlink()


def test_every_peer_has_an_adapter_and_needs_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    for peer in peers.PEERS:
        assert (BENCHMARKS / "peer_adapters" / f"peer_{peer}.py").is_file()
    with pytest.raises(SystemExit):
        peers.parse_arguments(["--envs", "x", "--model", "m", "--peers", "octavo", "openvino"])
    assert "--gguf is needed by: openvino" in capsys.readouterr().err


def test_requirements_of_a_wheel_without_extras_and_what_is_left_out(tmp_path: Path) -> None:
    wheel = tmp_path / "thing-1-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", "Name: thing"]
    wanted = ['numpy<3,>=2; python_version > "3.9"', "torch-like>=1", "plain"]
    dropped = ["torch==2.13.0+cpu", "torchaudio; sys_platform == 'linux'", "pandas; extra == 'bench'"]
    lines += [f"Requires-Dist: {requirement}" for requirement in [*wanted, *dropped[:2], 'pandas; extra == "bench"']]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing-1.dist-info/METADATA", "\n".join(lines) + "\n\nText.\n")
    assert peer_setup.plain_requirements(wheel, peer_setup.VLLM_UNUSED) == wanted


TINY = {"heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 32, "ffn": 64}
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh0123", "ab"]


def permute_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF's order: within a head, row i and row i + H/2 next to each other."""
    head_dim = weight.shape[0] // num_heads
    order = [
        h * head_dim + half * head_dim // 2 + i
        for h in range(num_heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    q, kv = TINY["heads"] * TINY["head_dim"], TINY["kv_heads"] * TINY["head_dim"]
    shapes = {
        "token_embd": (len(TOKENS), TINY["hidden"]),
        "output_norm": (TINY["hidden"],),
        "blk.0.attn_norm": (TINY["hidden"],),
        "blk.0.ffn_norm": (TINY["hidden"],),
        "blk.0.attn_q": (q, TINY["hidden"]),
        "blk.0.attn_k": (kv, TINY["hidden"]),
        "blk.0.attn_v": (kv, TINY["hidden"]),
        "blk.0.attn_output": (TINY["hidden"], q),
        "blk.0.ffn_gate": (TINY["ffn"], TINY["hidden"]),
        "blk.0.ffn_up": (TINY["ffn"], TINY["hidden"]),
        "blk.0.ffn_down": (TINY["hidden"], TINY["ffn"]),
    }
    weights = {f"{name}.weight": rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(TINY["hidden"])
    writer.add_feed_forward_length(TINY["ffn"])
    writer.add_head_count(TINY["heads"])
    writer.add_head_count_kv(TINY["kv_heads"])
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(TINY["head_dim"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, weight in weights.items():
        writer.add_tensor(name, weight, raw_dtype=None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights


def test_the_export_keeps_every_weight(tiny_gguf: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    path, weights = tiny_gguf
    export.write_hf_folder(gguf.GGUFReader(path), tmp_path / "hf")
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    assert len(saved) == len(weights)
    np.testing.assert_array_equal(saved["model.layers.0.mlp.down_proj.weight"], weights["blk.0.ffn_down.weight"])
    for kind, heads in (("q", TINY["heads"]), ("k", TINY["kv_heads"])):
        exported, source = saved[f"model.layers.0.self_attn.{kind}_proj.weight"], weights[f"blk.0.attn_{kind}.weight"]
        np.testing.assert_array_equal(permute_rows(exported, heads), source)
        assert not np.array_equal(exported, source)
    np.testing.assert_array_equal(saved["model.layers.0.self_attn.v_proj.weight"], weights["blk.0.attn_v.weight"])


def test_the_export_s_config_and_tokenizer(tiny_gguf: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    reader = gguf.GGUFReader(tiny_gguf[0])
    config = export.hf_config(export.read_metadata(reader), tied=True)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
    assert (config["rms_norm_eps"], config["rope_theta"], config["vocab_size"]) == (1e-5, 100000.0, len(TOKENS))
    export.write_hf_folder(reader, tmp_path / "hf")
    tokenizer = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert tokenizer.encode("abc<|im_end|>12").tokens == ["ab", "c", "<|im_end|>", "1", "2"]


def test_the_float16_gguf(tiny_gguf: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    path, weights = tiny_gguf
    source = gguf.GGUFReader(path)
    export.write_gguf_f16(source, tmp_path / "f16.gguf")
    copy = gguf.GGUFReader(tmp_path / "f16.gguf")
    before, after = export.read_metadata(source), export.read_metadata(copy)
    assert after.pop("general.file_type") == gguf.LlamaFileType.MOSTLY_F16
    del before["general.file_type"]
    assert after == before
    by_name = {tensor.name: tensor for tensor in copy.tensors}
    assert set(by_name) == set(weights)
    for name, weight in weights.items():
        assert by_name[name].data.dtype == (np.float16 if weight.ndim > 1 else np.float32)
        np.testing.assert_array_equal(by_name[name].data, weight.astype(by_name[name].data.dtype))


def test_unknown_tensors_and_tokenizers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"blk\.0\.attn_q\.bias"):
        export.hf_name("blk.0.attn_q.bias")
    with pytest.raises(ValueError, match="qwen2"):
        export.build_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"})
