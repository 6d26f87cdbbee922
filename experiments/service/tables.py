"""Writes the tables of results.csv into README.md: `python experiments/service/tables.py`.

README.md has them between two comments. Its other text stays.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
RESULTS, README = HERE / "results.csv", HERE / "README.md"
BEGIN, END = "<!-- tables of results.csv, written by tables.py -->", "<!-- end of the tables -->"
METRICS = {
    "qps": ("QPS", ",.1f"),
    "mean_ms": ("mean, ms", ",.1f"),
    "tp50_ms": ("TP50, ms", ",.1f"),
    "tp99_ms": ("TP99, ms", ",.1f"),
    "cpu_percent": ("CPU, %", ",.0f"),
    "gpu_percent": ("GPU, %", ",.0f"),
    "rss_mb": ("memory, MB", ",.0f"),
}
"""Columns: the title of a metric, and the format of its values."""
ORIGIN = ("repeats", "commit", "date")
ARMS = ("plain-eager", "plain", "graph-cpu", "graph-gpu")
"""The arms in the order of the rows. A graph's QPS are compared with those of each earlier arm, a column each."""
WORKLOAD = re.compile(r"(?P<served>.+); (?P<photographs>\d+x\d+); clients=(?P<clients>\d+)")

Row = Mapping[str, str]
Values = dict[str, float]


def tables(rows: Iterable[Row]) -> str:
    """Return one Markdown table for each served model and machine, after a line that says where it was measured."""
    groups: dict[tuple[str, str], list[tuple[re.Match[str], Row]]] = {}
    for row in rows:
        if match := WORKLOAD.fullmatch(row["workload"]):
            groups.setdefault((match["served"], row["machine"]), []).append((match, row))
    return "\n\n".join("\n".join(_table(*origin, members)) for origin, members in groups.items())


def _table(served: str, machine: str, members: Sequence[tuple[re.Match[str], Row]]) -> Iterator[str]:
    places: dict[tuple[str, int], dict[str, Values]] = {}
    for match, row in members:
        arms = places.setdefault((match["photographs"], int(match["clients"])), {})
        arms.setdefault(row["arm"], {})[row["metric"]] = float(row["value"])
    measured = {row["metric"] for _, row in members}
    metrics = [metric for metric in METRICS if metric in measured]
    present = [arm for arm in ARMS if any(arm in arms for arms in places.values())]
    bases = present[:-1]
    origin = {name: " and ".join(dict.fromkeys(row[name] for _, row in members)) for name in ORIGIN}
    yield f"**{served}**: {machine}. Rounds: {origin['repeats']}; commit {origin['commit']}, {origin['date']}."
    yield ""
    titles = ["photographs", "clients", "arm", *(METRICS[metric][0] for metric in metrics)]
    titles += [f"times {base}" for base in bases]
    yield _line(titles)
    yield _line(["---"] * len(titles))
    for (photographs, clients), arms in sorted(places.items(), key=lambda item: (len(item[0][0]), *item[0])):
        for arm in (arm for arm in present if arm in arms):
            values = arms[arm]
            cells = [format(values[metric], METRICS[metric][1]) if metric in values else "-" for metric in metrics]
            yield _line([photographs, str(clients), arm, *cells, *(_gain(arm, base, arms) for base in bases)])


def _gain(arm: str, base: str, arms: dict[str, Values]) -> str:
    """Return how many times the QPS of `base` a graph answers, or a dash where there is nothing to compare."""
    if not arm.startswith("graph") or base not in arms or ARMS.index(base) >= ARMS.index(arm):
        return "-"
    return f"{arms[arm]['qps'] / arms[base]['qps']:.2f}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def between(text: str) -> tuple[str, str, str]:
    """Split README's text into what stands before the tables, the tables, and what follows.

    Raises:
        ValueError: the two comments are not there once each, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"{README} must have {BEGIN!r} and then {END!r}, once each")
    return before + BEGIN, inside, END + after


def main() -> None:
    with RESULTS.open(newline="", encoding="utf-8") as file:
        text = tables(csv.DictReader(file))
    before, _, after = between(README.read_text(encoding="utf-8"))
    README.write_text(f"{before}\n\n{text}\n\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
