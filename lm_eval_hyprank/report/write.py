"""Writes a report's files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval_hyprank.report.definitions import definitions_markdown
from lm_eval_hyprank.report.export import exports
from lm_eval_hyprank.report.figures import figures, render
from lm_eval_hyprank.report.found import ReportError
from lm_eval_hyprank.report.page import write_page
from lm_eval_hyprank.report.tables import latex, markdown, tables, to_csv

FOLDERS = ("tables", "figures", "export")
"""What a report folder has beside its files; made anew each time."""


def prepare(folder: Path) -> None:
    """Makes the folder, before anything takes its time.

    Raises:
        ReportError: It cannot be made, or holds files that are no report.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = any(folder.iterdir()) and not _is_report(folder / "report.json")
    except OSError as error:
        raise ReportError(f"{folder}: {error.strerror}; choose another -o") from None
    if others:
        raise ReportError(
            f"{folder} holds files that are no report (its report.json is missing, broken or "
            "another program's); choose an empty folder for -o, or empty this one"
        )


def _is_report(path: Path) -> bool:
    """Whether a file is what `write_report` writes: other programs have a `report.json` too."""
    if not path.is_file():
        return False
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"schema_version", "paper_set"} <= found.keys()


def write_report(report: Mapping[str, Any], folder: Path) -> None:
    """Writes `report.json`, `report.md`, `index.html`, tables, figures and exports.

    The same report gives the same bytes. A report that the folder holds is replaced.

    Args:
        report: The report.
        folder: A folder that `prepare` has let pass.
    """
    for name in FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    _write(folder / "report.json", as_json(report) + "\n")
    made = tables(report)
    for table in made:
        _write(folder / "tables" / f"{table.name}.csv", to_csv(table))
        _write(folder / "tables" / f"{table.name}.tex", latex(table))
    drawn = figures(report)
    pictures: dict[str, str] = {}
    for name, (title, figure) in drawn.items():
        svg = render(figure, "svg")
        pictures[title] = svg.decode("utf-8")
        _write(folder / "figures" / f"{name}.svg", pictures[title])
        (folder / "figures" / f"{name}.png").write_bytes(render(figure, "png"))
    images = [f"![{title}](figures/{name}.svg)\n" for name, (title, _) in drawn.items()]
    parts = ["# Hypothesis ranking\n", markdown(made), definitions_markdown(report)]
    text = "\n".join([*parts, "## Figures\n", *images])
    _write(folder / "report.md", text)
    for name, text in exports(report).items():
        _write(folder / "export" / name, text)
    write_page(report, folder / "index.html", pictures)


def as_json(value: Any) -> str:
    """A report as JSON with a line for each key, and for each entry of a list.

    So a paper or a system is a line, and two reports can be compared line by line.
    """
    if isinstance(value, Mapping) and value:
        keys = (f"{_dump(key)}: {as_json(part)}" for key, part in value.items())
        return "{\n" + ",\n".join(keys) + "\n}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(map(_dump, value)) + "\n]"
    return _dump(value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A file name in the report may hold what UTF-8 cannot; line ends are the same everywhere.
    path.write_bytes(text.encode("utf-8", errors="backslashreplace"))
