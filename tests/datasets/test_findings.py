from __future__ import annotations

from pathlib import Path

from lm_eval_hyprank.datasets.findings import DatasetError, Finding, findings_error
from lm_eval_hyprank.datasets.validation import RANKING_FILE


def test_error_shows_ten_findings_and_the_way_on() -> None:
    findings = [
        Finding(RANKING_FILE, row, f"Math/{row}", "doi", "is a number", "Fix it")
        for row in range(1, 14)
    ]
    error = findings_error(Path("DIR"), findings)
    assert isinstance(error, DatasetError)
    lines = str(error).splitlines()
    assert "13 problem(s)" in lines[0]
    assert lines[1] == f"  {RANKING_FILE}:1 Math/1 doi: is a number. Fix it."
    assert lines[10].startswith(f"  {RANKING_FILE}:10 Math/10 ")
    assert lines[11].strip() == "... and 3 more."
    assert "`hyprank validate DIR`" in lines[12]
    assert """--metadata '{"skip_invalid": true}'""" in lines[12]
    assert len(lines) == 13


def test_error_of_ten_findings_hides_none() -> None:
    findings = [Finding(RANKING_FILE, row, "", "", "is bad", "Fix it") for row in range(1, 11)]
    assert "more" not in str(findings_error(Path("DIR"), findings))
