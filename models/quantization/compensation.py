"""GPTQ: the error of each rounded column is made up for by the columns after it (Frantar et al. 2022)."""

import numpy as np

from .rounding import IntegerGrid, Rounded

_BLOCK = 32
"""Columns whose errors reach the columns behind them in one product."""
_DAMPING_STEPS = 6


def round_with_compensation(
    weight: np.ndarray, moments: np.ndarray, grid: IntegerGrid, *, damping: float = 0.01
) -> Rounded:
    """f32 ``[out, in]`` as integers whose product with the calibration inputs is close to the weight's.

    ``moments [in, in]`` is the mean of ``x xᵀ`` over inputs x. ``damping`` times the mean of its diagonal is added to
    the diagonal; ten times as much where that leaves it singular. Scales and zero points of a group are chosen when
    its first column is reached, from the weights as they are then. Raises ValueError for moments that are not finite.
    """
    values = np.ascontiguousarray(weight.T, np.float32)  # a column of the weight is a row here
    factor = _inverse_factor(moments, damping)
    values[np.diagonal(moments) == 0] = 0.0  # a column that no input reaches
    in_size, out_size = values.shape
    size = grid.size(in_size)
    codes = np.empty(values.shape, np.uint8)
    scales, zeros = np.empty((2, in_size // size, out_size), np.float32)
    for start in range(0, in_size, _BLOCK):
        stop = min(start + _BLOCK, in_size)
        errors = np.zeros((stop - start, out_size), np.float32)
        for column in range(start, stop):
            group = column // size
            if column % size == 0:
                # The group's later columns may lie behind this block, whose errors have not reached them yet.
                seen = values[column : column + size].copy()
                seen[stop - column :] -= factor[start:stop, stop : max(stop, column + size)].T @ errors
                scales[group], zeros[group] = (np.asarray(found) for found in grid.fit(seen.T))
            scale, zero = scales[group], zeros[group]
            nearest = np.clip(np.rint(values[column] / scale) + zero, 0, grid.top)
            error = (values[column] - (nearest - zero) * scale) / factor[column, column]
            values[column + 1 : stop] -= np.outer(factor[column, column + 1 : stop], error)
            codes[column], errors[column - start] = nearest, error
        values[stop:] -= factor[start:stop, stop:].T @ errors
    return Rounded(*(np.ascontiguousarray(array.T) for array in (codes, scales, zeros.astype(np.uint8))))


def _inverse_factor(moments: np.ndarray, damping: float) -> np.ndarray:
    """The upper Cholesky factor, f32, of the inverse of the damped moments."""
    if not np.isfinite(moments).all():
        raise ValueError("the calibration inputs are not finite")
    damped = moments.astype(np.float64)
    diagonal = np.diagonal(damped).copy()
    diagonal[diagonal == 0] = 1.0
    places = np.arange(len(damped))
    for step in range(_DAMPING_STEPS):
        damped[places, places] = diagonal + damping * 10.0**step * diagonal.mean()
        try:
            # With rows and columns turned round, so that the product of an upper factor and its transpose comes out.
            upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
        except np.linalg.LinAlgError:
            continue
        return _invert_upper(np.ascontiguousarray(upper)).astype(np.float32)
    raise ValueError("the calibration inputs leave the inverse of their moments undefined")


def _invert_upper(upper: np.ndarray) -> np.ndarray:
    """Of an upper triangular matrix, by halves."""
    if len(upper) <= _BLOCK:
        return np.triu(np.linalg.inv(upper))
    half = len(upper) // 2
    inverse = np.zeros_like(upper)
    first, second = _invert_upper(upper[:half, :half]), _invert_upper(upper[half:, half:])
    inverse[:half, :half], inverse[half:, half:] = first, second
    inverse[:half, half:] = -first @ upper[:half, half:] @ second
    return inverse
