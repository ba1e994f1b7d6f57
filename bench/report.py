"""A benchmark's table: shown, and kept in bench/results/ as JSON and Markdown with the machine's description."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
_stderr = Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """One line of progress on stderr."""
    _stderr.print(text, markup=False, soft_wrap=True)


def default_path(machine: dict[str, Any], benchmark: str) -> Path:
    """`results/<date>-<cpu>-<benchmark>.json`."""
    cpu = re.sub(r"\((?:r|tm)\)", "", machine["cpu"].lower())
    cpu = re.sub(r"[^a-z0-9]+", "-", cpu).strip("-")
    return RESULTS / f"{machine['time'][:10]}-{cpu}-{benchmark}.json"


def machine_line(machine: dict[str, Any]) -> str:
    """Processor, cores, memory, system and versions in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cpu']} ({machine['simd']}), {machine['cores_usable']} cores, "
        f"{machine['memory_bytes'] / (1 << 30):.1f} GiB, {machine['system']}, Python {machine['python']}, {versions}; "
        f"cores busy before: {machine['busy_percent_before']:.0f} %"
    )


def publish(
    path: Path, data: dict[str, Any], title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: str = ""
) -> None:
    """Shows the table; writes `data` to `path` and the table beside it as .md. `data["machine"]` is host.describe()."""
    table = Table(title=title)
    for column, name in enumerate(header):
        table.add_column(name, justify="left" if column == 0 else "right", no_wrap=column == 0)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    lines = [f"# {title}", "", machine_line(data["machine"]), "", *([notes, ""] if notes else [])]
    lines += [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    if notes:
        print(notes)
    note(f"written: {path} and {path.with_suffix('.md').name}")
