"""The dashboard's queries, with its variables filled in, and what a Prometheus answers to them. No dependencies."""

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).with_name("dashboard.json")


@dataclass(frozen=True)
class Query:
    expression: str
    legend: str
    """With ``{{label}}`` for the value of a label."""

    def name(self, labels: Mapping[str, str]) -> str:
        text = self.legend
        for label, value in labels.items():
            text = text.replace("{{" + label + "}}", value)
        return text


@dataclass(frozen=True)
class Panel:
    title: str
    kind: str
    """stat, timeseries or heatmap."""
    unit: str
    queries: tuple[Query, ...]


def read_panels(rate_interval: str, file: Path = DASHBOARD) -> Iterator[Panel]:
    """Every panel of the dashboard, for all models and servers; ``rate_interval`` is a duration such as 30s."""
    for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
        if panel["type"] == "row":
            continue
        queries = [Query(fill(one["expr"], rate_interval), one["legendFormat"]) for one in panel["targets"]]
        yield Panel(panel["title"], panel["type"], panel["fieldConfig"]["defaults"]["unit"], tuple(queries))


def fill(expression: str, rate_interval: str) -> str:
    """The query that Grafana sends. Raises ValueError for a variable that is not known here."""
    for name, value in (("$__rate_interval", rate_interval), ("$model_name", ".*"), ("$instance", ".*")):
        expression = expression.replace(name, value)
    if "$" in expression:
        raise ValueError(f"unknown variable in {expression}")
    return expression


def ask(prometheus: str, path: str, **parameters: str) -> Any:
    """The ``data`` of an answer of Prometheus' HTTP API. Raises OSError, with what it says, for errors."""
    url = f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)["data"]


def query_range(prometheus: str, query: Query, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
    """Series as {"metric": labels, "values": [[time in s, text], ...]}."""
    times = {"start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": f"{step_s:.3f}"}
    return ask(prometheus, "query_range", query=query.expression, **times)["result"]
