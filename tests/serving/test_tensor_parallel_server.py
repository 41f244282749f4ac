"""``octavo serve --tensor-parallel-size 2`` as a user runs it, two devices of a CPU in the core's process."""

import signal

import aiohttp
import numpy as np
from server_process import REAL, events, server_process
from tiny_model import add_tokenizer, permutation_model

OPTIONS = (
    *("--tensor-parallel-size", "2", "--kv-cache-dtype", "fp8", "--enforce-eager", "--block-size", "4"),
    *("--max-model-len", "32", "--max-num-seqs", "1", "--max-num-batched-tokens", "16"),
    *("--num-gpu-blocks-override", "16"),
)


async def test_two_devices_answer_as_the_model_says(tmp_path):
    """Each token is followed by the next one of the vocabulary, in ASCII's order; the answer does not depend on the
    KV cache, whose type is another one that devices share."""
    folder = add_tokenizer(permutation_model(tmp_path / "next", np.roll(np.arange(300), -1)))
    async with server_process(REAL, folder, *OPTIONS) as server:
        await server.until_ready()
        async with aiohttp.ClientSession(server.url) as http:
            common = {"model": "tiny", "temperature": 0, "max_tokens": 6}
            completion = {**common, "prompt": "xA"}
            chat = {**common, "messages": [{"role": "user", "content": "xA"}]}
            async with http.post("/v1/completions", json=completion) as response:
                assert (await response.json())["choices"][0]["text"] == "BCDEFG"
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
