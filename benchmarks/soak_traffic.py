"""Traffic of the worst kind for ``soak.py``: every request has an answer that is known, most clients misbehave."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Answer = dict[int, tuple[str, str | None]]
"""choice -> (text, finish reason)"""

LATEST_LEAVING_S = 0.3
SLOW_READ_S = 0.05
REFUSED = 503
MAX_LISTED = 10


@dataclass
class Tally:
    """What became of the requests of a run."""

    counts: dict[str, int] = field(default_factory=lambda: {"finished": 0, "refused": 0, "left": 0})
    """``finished``, ``refused`` and ``left`` requests."""
    wrong: list[str] = field(default_factory=list)
    """Answers that differ from the known ones."""
    errors: list[str] = field(default_factory=list)
    """Statuses and failures that nobody asked for."""


def make_bodies(count: int, vocab_size: int, max_model_len: int, seed: int) -> list[dict[str, Any]]:
    """Bodies for /v1/completions: greedy or seeded, some with several choices, many that share a beginning."""
    rng = random.Random(seed)
    # Special ids are left out.
    beginnings = [[rng.randrange(3, vocab_size) for _ in range(max_model_len // 4)] for _ in range(3)]
    bodies = []
    for index in range(count):
        shared = rng.choice([[], *beginnings])
        prompt = shared + [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, max_model_len // 4))]
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": rng.randint(1, max_model_len - len(prompt) - 1),
            "ignore_eos": rng.random() < 0.7,
            "n": rng.choice([1, 1, 1, 2, 3]),
            "seed": index,
        }
        sampled = {"temperature": 1.1, "top_p": 0.95}
        body |= sampled if body["n"] > 1 or rng.random() < 0.5 else {"temperature": 0.0}
        if rng.random() < 0.3:
            body["stop"] = [rng.choice(["th", "e", "zz"])]
        if rng.random() < 0.2:
            body["repetition_penalty"] = 1.2
        bodies.append(body)
    return bodies


async def known_answers(session: aiohttp.ClientSession, bodies: list[dict[str, Any]]) -> list[Answer]:
    """The answers of requests that run alone and find nothing in the prefix cache. Raises RuntimeError."""
    answers = []
    for index, body in enumerate(bodies):
        async with session.post("/v1/completions", json=body | {"cache_salt": f"alone {index}"}) as response:
            if response.status != 200:
                raise RuntimeError(f"request {index} alone: {response.status} {await response.text()}")
            answers.append(read_answer(await response.json()))
    return answers


def read_answer(body: dict[str, Any]) -> Answer:
    return {choice["index"]: (choice["text"], choice["finish_reason"]) for choice in body["choices"]}


def read_stream(text: str) -> Answer:
    """Raises ValueError for a stream that has no proper end."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    if not events or events[-1] != "[DONE]":
        raise ValueError(f"the stream ended with {events[-1:]}")
    answer: Answer = {}
    for event in events[:-1]:
        chunk = json.loads(event)
        if "error" in chunk:
            raise ValueError(f"an error event: {chunk['error']}")
        for choice in chunk["choices"]:
            before, reason = answer.get(choice["index"], ("", None))
            if reason is not None:
                raise ValueError(f"choice {choice['index']} went on after its end")
            answer[choice["index"]] = before + choice["text"], choice["finish_reason"]
    return answer


class Traffic:
    """``run`` sends random ones of ``bodies`` for some seconds and compares what comes back with ``answers``."""

    def __init__(
        self, session: aiohttp.ClientSession, bodies: list[dict[str, Any]], answers: list[Answer], seed: int
    ) -> None:
        self._session = session
        self._bodies = bodies
        self._answers = answers
        self._rng = random.Random(seed)
        self.tally = Tally()

    async def run(self, seconds: float, num_clients: int) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + seconds

        async def client() -> None:
            while loop.time() < end_s:
                await self._one(self._rng.randrange(len(self._bodies)))

        await asyncio.gather(*(client() for _ in range(num_clients)))

    async def _one(self, index: int) -> None:
        body = self._bodies[index] | {"priority": self._rng.randint(0, 2)}
        if self._rng.random() < 0.3:
            body["cache_salt"] = self._rng.choice("ab")
        how = self._rng.choices(["whole", "stream", "slow", "leave"], [3, 3, 1, 3])[0]
        body["stream"] = how in ("stream", "slow") or (how == "leave" and self._rng.random() < 0.5)
        try:
            if how == "leave":
                async with asyncio.timeout(self._rng.uniform(0.0, LATEST_LEAVING_S)):
                    await self._send(index, body, slow=False)
            else:
                await self._send(index, body, slow=how == "slow")
        except TimeoutError:
            self.tally.counts["left"] += 1
        except (aiohttp.ClientError, ValueError) as error:
            self._add(self.tally.errors, f"request {index} ({how}): {type(error).__name__} {error}")

    async def _send(self, index: int, body: dict[str, Any], *, slow: bool) -> None:
        async with self._session.post("/v1/completions", json=body) as response:
            if response.status == REFUSED and "Retry-After" in response.headers:
                await response.read()
                self.tally.counts["refused"] += 1
                await asyncio.sleep(0.01)
                return
            if response.status != 200:
                self._add(self.tally.errors, f"request {index}: {response.status} {await response.text()}")
                return
            if not body["stream"]:
                answer = read_answer(await response.json())
            else:
                answer = read_stream(await read_slowly(response) if slow else await response.text())
        self.tally.counts["finished"] += 1
        if answer != self._answers[index]:
            self._add(self.tally.wrong, f"request {index} {body}: {difference(answer, self._answers[index])}")

    def _add(self, problems: list[str], text: str) -> None:
        problems.append(text if len(problems) < MAX_LISTED else "…")


def difference(answer: Answer, known: Answer) -> str:
    changed = [index for index in sorted(answer.keys() | known.keys()) if answer.get(index) != known.get(index)]
    return "; ".join(f"choice {index}: {answer.get(index)!r} is not {known.get(index)!r}" for index in changed)


async def read_slowly(response: aiohttp.ClientResponse) -> str:
    parts = []
    async for part in response.content.iter_any():
        parts.append(part)
        await asyncio.sleep(SLOW_READ_S)
    return b"".join(parts).decode()


def samples(text: str) -> Iterator[tuple[str, float]]:
    """(name without labels and prefix, value) of every sample in Prometheus' text form."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            with suppress(ValueError):
                yield name.partition("{")[0].rpartition(":")[2], float(value)


async def scrape(session: aiohttp.ClientSession) -> Counter[str]:
    """The server's metrics, summed over labels."""
    async with session.get("/metrics") as response:
        response.raise_for_status()
        figures: Counter[str] = Counter()
        for name, value in samples(await response.text()):
            figures[name] += value  # type: ignore[assignment]
        return figures
