"""Figures from measured times: percentiles, summaries, and tables of them."""

import math
from collections.abc import Mapping, Sequence


def percentile(values: Sequence[float], p: float) -> float:
    """The ``p``-th percentile, linear between neighbours. Raises ValueError without values or for p outside 0..100."""
    if not values:
        raise ValueError("percentile of no values")
    if not 0 <= p <= 100:
        raise ValueError(f"p must be in [0, 100], got {p}")
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def mean(values: Sequence[float]) -> float:
    """Raises ValueError without values."""
    if not values:
        raise ValueError("mean of no values")
    return math.fsum(values) / len(values)


def standard_deviation(values: Sequence[float]) -> float:
    """Of the values themselves, not of a population estimated from them."""
    centre = mean(values)
    return math.sqrt(mean([(value - centre) ** 2 for value in values]))


def percentile_name(p: float) -> str:
    """``99.0`` -> ``p99``, ``99.9`` -> ``p99.9``."""
    return f"p{p:g}"


def summarise_ms(name: str, values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """``{mean,median,std,pNN}_{name}_ms`` of times given in seconds; empty without values."""
    if not values_s:
        return {}
    ms = [value * 1e3 for value in values_s]
    figures = {"mean": mean(ms), "median": percentile(ms, 50), "std": standard_deviation(ms)}
    figures |= {percentile_name(p): percentile(ms, p) for p in percentiles}
    return {f"{statistic}_{name}_ms": value for statistic, value in figures.items()}


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median: how far repeats lie apart, as a share. Raises ValueError without values."""
    return (max(values) - min(values)) / percentile(values, 50)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned text columns: the first to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def number(value: float | None, digits: int = 1) -> str:
    """For a table: ``-`` where there is nothing."""
    return "-" if value is None else f"{value:,.{digits}f}"


def median_of(rows: Sequence[Mapping[str, float]], key: str) -> float:
    """The median of ``key`` over repeated runs."""
    return percentile([row[key] for row in rows], 50)
