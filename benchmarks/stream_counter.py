"""A client that reads many streams at once and only counts: plain sockets and epoll, nothing is parsed.

    python benchmarks/stream_counter.py --port 8000 --streams 256 --body '{...}' --marker '~' --tokens 512 \\
        --pid PID --tally FILE

Each token's text must hold ``--marker`` once, which nothing else in a frame does. Prints one line of JSON.
"""

import argparse
import json
import mmap
import os
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

FRAME_END = b"\n\n"
DONE = b"data: [DONE]\n\n"
READ_BYTES = 1 << 16
PATIENCE_S = 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used so far, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class Tally:
    """Tokens counted so far, in a file that other processes map as well."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)

    @staticmethod
    def create(path: Path) -> "Tally":
        path.write_bytes(bytes(8))
        return Tally(path)

    @property
    def tokens(self) -> int:
        return struct.unpack_from("q", self._memory)[0]

    @tokens.setter
    def tokens(self, value: int) -> None:
        struct.pack_into("q", self._memory, 0, value)


@dataclass
class Sample:
    """All counts at one moment."""

    time_s: float
    cpu_s: float
    tokens: int
    frames: int


class Counter:
    """Streams ``tokens`` tokens over each of ``streams`` connections."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._marker = args.marker.encode()
        self._tally = Tally(args.tally)
        self._epoll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self.tokens = self.frames = self.done = 0
        self.frame = b""
        """The first one with a token."""

    def connect(self) -> None:
        body = self._args.body.encode()
        head = f"POST {self._args.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        for _ in range(self._args.streams):
            sock = socket.create_connection(("127.0.0.1", self._args.port))
            sock.sendall(request)
            self._sockets[sock.fileno()] = sock
            self._epoll.register(sock, select.EPOLLIN)

    def read(self) -> None:
        """One round over the connections that have something."""
        events = self._epoll.poll(PATIENCE_S)
        if not events:
            raise TimeoutError(f"nothing arrived for {PATIENCE_S:g} s; {self.tokens} tokens so far")
        for number, _ in events:
            data = self._sockets[number].recv(READ_BYTES)
            if not data:
                raise ConnectionError("a stream was closed")
            self.tokens += data.count(self._marker)
            self.frames += data.count(FRAME_END)
            if DONE in data:
                self.done += 1
                self.frames -= 1
            elif not self.frame and self._marker in data:
                self.frame = self._frame_with_marker(data)
        self._tally.tokens = self.tokens

    def _frame_with_marker(self, data: bytes) -> bytes:
        place = data.index(self._marker)
        return data[data.rindex(b"data: ", 0, place) : data.index(FRAME_END, place) + len(FRAME_END)]

    def sample(self) -> Sample:
        return Sample(time.perf_counter(), cpu_s(self._args.pid), self.tokens, self.frames)

    def run(self) -> dict[str, float | str]:
        """Figures between the first and the last tenth of all tokens, when every stream runs."""
        self.connect()
        total = self._args.streams * self._args.tokens
        while self.tokens < total // 10:
            self.read()
        start = self.sample()
        while self.tokens < total - total // 10:
            self.read()
        end = self.sample()
        while self.done < self._args.streams:
            self.read()
        if self.tokens != total:
            raise RuntimeError(f"{self.tokens} tokens arrived where {total} were asked for")
        seconds, tokens = end.time_s - start.time_s, end.tokens - start.tokens
        frames = end.frames - start.frames
        return {
            "tokens_per_s": tokens / seconds,
            "frames_per_s": frames / seconds,
            "merged_share": 1 - frames / tokens,
            "cpu_s_per_1000_tokens": (end.cpu_s - start.cpu_s) / tokens * 1000,
            "cpu_share": (end.cpu_s - start.cpu_s) / seconds,
            "frame": self.frame.decode(),
        }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--body", required=True, help="the request, as JSON")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, required=True, help="that each stream will bring")
    parser.add_argument("--marker", required=True, help="text that is in every token once and nowhere else")
    parser.add_argument("--pid", type=int, required=True, help="process whose CPU time is read")
    parser.add_argument("--tally", type=Path, required=True, help="file of 8 bytes to keep the number of tokens in")
    print(json.dumps(Counter(parser.parse_args(argv)).run()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
