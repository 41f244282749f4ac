"""What the figures mean: shares of the measured ceilings, and the table."""

from collections.abc import Mapping
from typing import Any

COLUMNS = ("part", "figure", "by", "result", "of the ceiling")


def ceilings(parts: Mapping[str, Any]) -> dict[str, float]:
    """bytes_per_s and flops_per_s as measured in this run; without those that were not."""
    figures = {figure["name"]: figure for figure in parts.get("ceilings", {}).get("figures", [])}
    found = {}
    copies = [figures[name]["terabytes_per_s"] for name in ("copy", "elementwise") if _measured(figures, name)]
    if copies:
        found["bytes_per_s"] = max(copies) * 1e12
    if _measured(figures, "matmul"):
        found["flops_per_s"] = figures["matmul"]["teraflops_per_s"] * 1e12
    return found


def _measured(figures: Mapping[str, Any], name: str) -> bool:
    return name in figures and "error" not in figures[name]


def add_fractions(parts: dict[str, Any]) -> None:
    """Puts ``floor_microseconds`` and ``fraction_of_ceiling`` into every figure that has bytes, flops and a time.

    The floor is the longer of bytes over the copy bandwidth and flops over the matmul rate of this run. A rival's
    figure takes the bytes and flops of ours of the same name.
    """
    rates = ceilings(parts)
    if len(rates) < 2:
        return
    figures = [figure for part in parts.values() for figure in part.get("figures", [])]
    work = {figure["name"]: figure for figure in figures if "flops" in figure and "bytes" in figure}
    for figure in figures:
        if "microseconds" not in figure or figure["name"] not in work:
            continue
        own = work[figure["name"]]
        floor = max(own["bytes"] / rates["bytes_per_s"], own["flops"] / rates["flops_per_s"]) * 1e6
        figure["floor_microseconds"] = floor
        figure["fraction_of_ceiling"] = floor / figure["microseconds"]


def format_table(document: Mapping[str, Any]) -> str:
    """The table at the end, under a line that says on what it was measured."""
    lines = [_heading(document)]
    rows = [COLUMNS]
    for name, part in document["parts"].items():
        if part["status"] != "ok":
            rows.append((name, part["status"].upper(), "", part.get("reason") or "", ""))
        for figure in part["figures"]:
            fraction = figure.get("fraction_of_ceiling")
            share = "" if fraction is None else f"{fraction:.0%}"
            rows.append((name, figure["name"], figure.get("implementation", ""), _result(figure), share))
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 2)]
    result_width = min(60, max(len(row[3]) for row in rows))
    for part, figure, by, whole_result, share in rows:
        result = whole_result if len(whole_result) <= result_width else whole_result[: result_width - 3] + "..."
        cells = [cell.ljust(width) for cell, width in zip((part, figure, by), widths, strict=True)]
        lines.append("  ".join([*cells, result.ljust(result_width), share]).rstrip())
    lines.append(f"{document['seconds']:.0f} s in all")
    return "\n".join(lines)


def _heading(document: Mapping[str, Any]) -> str:
    device = document["device"]
    if device is None:
        return "no part got as far as its device"
    if device["platform"] != "gpu":
        return f"NOT A GPU: tried on {device['platform']} at tiny sizes; no figure below says anything about a GPU"
    versions = f"driver {device.get('driver')}, JAX {device.get('jax')}, Python {device.get('python')}"
    heading = f"{device['kind']}, {versions}"
    return f"SMOKE RUN at tiny sizes, nothing below is a measurement: {heading}" if document["smoke"] else heading


def _result(figure: Mapping[str, Any]) -> str:
    if "error" in figure:
        return f"FAILED: {figure['error'].splitlines()[0]}"
    if "skipped" in figure:
        return f"skipped: {figure['skipped'].splitlines()[0]}"
    for key, form in (
        ("terabytes_per_s", "{:.2f} TB/s"),
        ("teraflops_per_s", "{:.0f} TFLOP/s"),
        ("output_tokens_per_s", "{:,.0f} tokens/s"),
        ("worst_error", "worst error {:.1e}"),
    ):
        if key in figure:
            text = form.format(figure[key])
            return text + " (a sample)" if figure.get("is_sample") else text
    if "tokens_per_s" in figure:
        return f"{figure['microseconds'] / 1e3:.2f} ms, {figure['tokens_per_s']:,.0f} tokens/s"
    if "microseconds" in figure:
        return f"{figure['microseconds']:,.1f} us"
    return f"{figure['seconds']:.1f} s" if "seconds" in figure else ""
