"""What is wrong with data, said with file, row, field and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lm_eval_hyprank.datasets.texts import printable

_SHOWN_FINDINGS = 10

SKIP_OPTION = """--metadata '{"skip_invalid": true}'"""
"""How a run is told to leave out what has findings."""

REMEDIES = {
    "missing": "Add the field to this row",
    "string_type": "Write it as a JSON string",
    "list_type": "Write it as a JSON list of texts",
    "blank": "Fill it in, or take the paper out",
    "nul": "Remove the character",
    "surrogate": "Write the character's full surrogate pair or the character itself",
}
"""What to do about a text that cannot be used, by pydantic's or our error type."""


class DatasetError(ValueError):
    """The data cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with the data.

    Attributes:
        file: The file, relative to the data's folder (the folder itself where that is at fault).
        row: The line in the file, counted from 1; 0 where the whole file is meant.
        sample_id: The paper; empty where it cannot be read.
        field: The field, with its index (from 0) in a list; empty where the whole row is meant.
        problem: What is wrong, as the end of a sentence that begins with the field.
        remedy: What to do about it, a sentence without its full stop.
    """

    file: str
    row: int
    sample_id: str
    field: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        """Returns the finding as one line that any terminal can show."""
        place = f"{self.file}:{self.row}" if self.row else self.file
        words = " ".join(word for word in (place, self.sample_id, self.field) if word)
        return printable(f"{words}: {self.problem}. {self.remedy}.")


def findings_error(
    source: Path | str, findings: Sequence[Finding], *, folder: bool = True, skippable: bool = True
) -> DatasetError:
    """Returns the error that shows the first findings and says how to see or skip them all.

    Args:
        source: Where the data is.
        findings: At least one finding.
        folder: Whether it is a folder that `hyprank validate` reads.
        skippable: Whether what is named can be left out.
    """
    lines = [f"The data in {source} cannot be used: {len(findings)} problem(s) found."]
    lines += [f"  {finding}" for finding in findings[:_SHOWN_FINDINGS]]
    if len(findings) > _SHOWN_FINDINGS:
        lines.append(f"  ... and {len(findings) - _SHOWN_FINDINGS} more.")
    if skippable and any(finding.row for finding in findings):
        validate = f"`hyprank validate {source}` prints all of them; " if folder else ""
        items = "papers" if folder else "items"
        lines.append(f"{validate}`{SKIP_OPTION}` leaves the named {items} out.")
    return DatasetError("\n".join(lines))
