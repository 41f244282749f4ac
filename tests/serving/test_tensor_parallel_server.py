"""``octavo serve --tensor-parallel-size 2`` as a user runs it, two devices of a CPU in the core's process."""

import json
import signal
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from server_process import REAL, events, server_process
from tiny_model import add_tokenizer, permutation_model

OPTIONS = (
    *("--tensor-parallel-size", "2", "--kv-cache-dtype", "fp8", "--enforce-eager", "--block-size", "4"),
    *("--max-model-len", "32", "--max-num-seqs", "1", "--max-num-batched-tokens", "16"),
    *("--num-gpu-blocks-override", "16"),
)


def model_of_negative_logits(folder: Path) -> Path:
    """Each token is followed by the next one of the vocabulary, in ASCII's order, whatever the KV cache holds. All
    logits are negative, so that a row of zeros would have the largest: 301 tokens do not divide by two."""
    permutation_model(folder, np.roll(np.arange(300), -1))
    tensors = load_file(folder / "model.safetensors")
    for name, lower in (("model.embed_tokens.weight", 0), ("lm_head.weight", 8)):
        tensors[name] = np.pad(tensors[name], ((0, 1), (0, 0))) - np.float32(lower)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 301}))
    return add_tokenizer(folder)


async def test_two_devices_answer_as_the_model_says(tmp_path):
    folder = model_of_negative_logits(tmp_path / "next")
    async with server_process(REAL, folder, *OPTIONS) as server:
        await server.until_ready()
        async with aiohttp.ClientSession(server.url) as http:
            common = {"model": "tiny", "temperature": 0, "max_tokens": 6}
            completion = {**common, "prompt": "xA"}
            chat = {**common, "messages": [{"role": "user", "content": "xA"}]}
            async with http.post("/v1/completions", json={**completion, "logprobs": 2}) as response:
                choice = (await response.json())["choices"][0]
                assert choice["text"] == "BCDEFG"
                assert choice["logprobs"]["token_logprobs"] == pytest.approx([0.0] * 6, abs=1e-3)
            async with http.post("/v1/completions", json={**completion, "stream": True}) as response:
                assert "".join(event["choices"][0]["text"] for event in events(await response.text())) == "BCDEFG"
            async with http.post("/v1/chat/completions", json=chat) as response:
                assert (await response.json())["choices"][0]["message"]["content"] == ";<=>?@"
            async with http.post("/v1/chat/completions", json={**chat, "stream": True}) as response:
                deltas = [event["choices"][0]["delta"] for event in events(await response.text())]
                assert "".join(delta.get("content") or "" for delta in deltas) == ";<=>?@"
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0
        await server.nothing_is_left()
        assert "ERROR" not in server.log
