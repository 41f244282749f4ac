"""Integers of a few bits inside words of 32: NumPy, on the host, while a checkpoint is loaded. No jax here."""

import numpy as np

WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""AutoAWQ's GEMM layout: column k of eight is in this nibble of the word."""


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """i8 ``[rows, n]`` of 4 or 8 bits, signed → i32 ``[rows, n * bits / 32]``, first code lowest, two's complement.

    u8, counted from 0, is packed as it is: ``unpack`` undoes that.
    """
    stored: np.ndarray = np.ascontiguousarray(codes).view(np.uint8)
    if bits == 4:
        pairs = stored.reshape(len(stored), -1, 2)
        stored = pairs[..., 0] & 15 | pairs[..., 1] << 4
    return stored.view("<i4")


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """i32 ``[rows, words]`` → u8 ``[rows, words * 32 / bits]``, counted from 0, first code lowest.

    Codes of 2, 4 and 8 bits fill words evenly; those of 3 run on from one word into the next, 32 in 3 words.
    """
    stored = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return stored
    if bits in (2, 4):
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return (stored[..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(len(stored), -1)
    digits = np.unpackbits(stored, axis=-1, bitorder="little").reshape(len(stored), -1, bits)
    return np.packbits(digits, axis=-1, bitorder="little")[..., 0]


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """AutoAWQ's i32 ``[rows, words]`` → u8 ``[rows, words * 8]`` in the order of columns."""
    nibbles = unpack(words, 4).reshape(len(words), -1, 8)
    return nibbles[..., list(AWQ_ORDER)].reshape(len(words), -1)


def pack_awq(codes: np.ndarray) -> np.ndarray:
    """u8 ``[rows, n]`` of 4 bits, counted from 0 → AutoAWQ's i32 ``[rows, n / 8]``: undone by ``unpack_awq``."""
    columns = codes.reshape(len(codes), -1, 8)
    return pack(columns[..., np.argsort(AWQ_ORDER)].reshape(codes.shape), 4)
