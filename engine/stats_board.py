"""The core's latest figures in a small file that other processes map: reading them asks nothing of the core.

So a scrape never waits for a step, every API process sees the same counters, and a core that has hung is noticed
although it answers nobody.
"""

import mmap
import struct
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from .messages import StepStats

BOARD_NAME = "stats"
_SIZE = 4096
_HEAD = struct.Struct("<II")
"""Length and CRC-32 of what follows: a reader that comes amid a write sees that they do not match."""
_TRIES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreFigures:
    """What the board says."""

    stats: StepStats = field(default_factory=StepStats)
    progress_time_s: float = 0.0
    """``time.monotonic()``, which all processes of a machine share: the end of the last step or, without work, of the
    last look for some. 0 until the core serves."""

    def stalled_s(self) -> float:
        """Seconds since the core has done anything; 0 before it serves."""
        return time.monotonic() - self.progress_time_s if self.progress_time_s else 0.0


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(CoreFigures)


def create_board(folder: str | Path) -> None:
    """Makes an empty board in ``folder``."""
    (Path(folder) / BOARD_NAME).write_bytes(bytes(_SIZE))


class StatsBoard:
    """One process's view of the board in ``folder``. Only the core writes."""

    def __init__(self, folder: str | Path) -> None:
        with (Path(folder) / BOARD_NAME).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._last = CoreFigures()

    def write(self, figures: CoreFigures) -> None:
        payload = _ENCODER.encode(figures)
        self._map[: _HEAD.size + len(payload)] = _HEAD.pack(len(payload), zlib.crc32(payload)) + payload

    def read(self) -> CoreFigures:
        """The latest figures; those of a core that has not written yet are zero."""
        for _ in range(_TRIES):
            length, checksum = _HEAD.unpack_from(self._map)
            if length == 0:
                break
            payload = self._map[_HEAD.size : min(_HEAD.size + length, _SIZE)]
            if zlib.crc32(payload) == checksum:
                self._last = _DECODER.decode(payload)
                break
        return self._last

    def close(self) -> None:
        self._map.close()
