"""One picture of all panels of the dashboard, from the data of a running Prometheus. Needs matplotlib.

    python deploy/grafana/draw_panels.py --prometheus http://localhost:9090 --minutes 5 docs/dashboard.png

It draws what Grafana would ask for, not how Grafana looks.
"""

import argparse
import io
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import dates, ticker
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from panel_data import Panel, query_range, read_panels
from PIL import Image

COLUMNS = 4
NUM_POINTS = 150
NUM_COLOURS = 64
UNITS = {"s": "s", "percentunit": "%", "reqps": "1/s", "bytes": "MiB", "short": ""}
FACTORS = {"percentunit": 100.0, "bytes": 1 / 2**20}


def draw(axes: Axes, panel: Panel, prometheus: str, start_s: float, end_s: float) -> None:
    """One panel. Raises ValueError when a query has no data."""
    factor = FACTORS.get(panel.unit, 1.0)
    rows: list[tuple[str, list[float], list[float]]] = []
    for query in panel.queries:
        series = query_range(prometheus, query, start_s, end_s, (end_s - start_s) / NUM_POINTS)
        if not series:
            raise ValueError(f"no data for {panel.title}: {query.expression}")
        for one in series:
            times = [float(at) for at, _ in one["values"]]
            values = [float(value) * factor for _, value in one["values"]]
            rows.append((query.name(one["metric"]), times, values))
    if panel.kind == "heatmap":
        draw_heatmap(axes, rows)
    else:
        for name, times, values in rows:
            axes.plot([at / 86400 for at in times], values, label=name, linewidth=1.1)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=6, loc="best", ncols=2, framealpha=0.5)
    unit = UNITS[panel.unit]
    axes.set_title(panel.title + (f" [{unit}]" if unit else ""), fontsize=8.5)
    axes.set_xlim(start_s / 86400, end_s / 86400)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(4))
    axes.xaxis.set_major_formatter(dates.DateFormatter("%H:%M:%S"))
    axes.tick_params(labelsize=6)
    axes.grid(alpha=0.25)


def draw_heatmap(axes: Axes, rows: list[tuple[str, list[float], list[float]]]) -> None:
    """Cumulative buckets by time: each cell is what fell between two bounds."""
    rows = sorted(rows, key=lambda row: float(row[0]))
    columns = sorted({at for _, times, _ in rows for at in times})
    cells, below = [], dict.fromkeys(columns, 0.0)
    for _, times, values in rows:
        here = {**below, **dict(zip(times, values, strict=True))}
        cells.append([max(0.0, here[at] - below[at]) for at in columns])
        below = here
    axes.pcolormesh([at / 86400 for at in columns], range(len(rows)), cells, cmap="Blues", shading="nearest")
    axes.set_yticks(range(len(rows)), [f"≤ {float(name):g}" for name, _, _ in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://localhost:9090")
    parser.add_argument("--minutes", type=float, default=30.0, help="how far back")
    parser.add_argument("--rate-interval", default="20s")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    end_s = time.time()
    panels = list(read_panels(args.rate_interval))
    num_rows = -(-len(panels) // COLUMNS)
    figure, axes = plt.subplots(num_rows, COLUMNS, figsize=(COLUMNS * 3.6, num_rows * 2.1), layout="constrained")
    for place, panel in zip(axes.flat, panels, strict=False):
        draw(place, panel, args.prometheus, end_s - 60 * args.minutes, end_s)
    for place in list(axes.flat)[len(panels) :]:
        place.set_axis_off()
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=90)
    Image.open(drawn).quantize(NUM_COLOURS).save(args.output, optimize=True)


if __name__ == "__main__":
    main()
