"""A report as one HTML file that needs nothing else: no server, no network, no build step."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lm_eval_hyprank.datasets import demo
from lm_eval_hyprank.datasets.researchbench import labelled_candidates
from lm_eval_hyprank.datasets.validation import check_folder
from lm_eval_hyprank.metrics import rank_metrics
from lm_eval_hyprank.ranking import chance_rank
from lm_eval_hyprank.report.comparisons import ALPHA
from lm_eval_hyprank.report.definitions import definitions

Report = Mapping[str, Any]

_TEXT_KEYS = ("title", "context", "text")

# Whatever a report holds, the page can neither fetch nor send, and runs this script alone. The
# figures are data: images, documents of their own, so their element ids cannot clash.
_POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def write_page(report: Report, path: Path, figures: Mapping[str, str]) -> None:
    """Writes a report as one self-contained HTML file; equal input gives equal bytes.

    Args:
        report: The report in the shape of ``report.json``. A key that may be absent there may be
            absent here: the page then leaves out what rests on it.
        path: The file to write; an existing one is replaced.
        figures: Figures by title, in the order to show them: each the text of an SVG file.

    Raises:
        ValueError: The report holds NaN or infinity, or texts although its settings say it has
            none.
    """
    if not report["settings"]["text"]:
        _refuse_text(report)
    environment = Environment(
        loader=PackageLoader("lm_eval_hyprank.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # `tojson` escapes <, >, &, ' and all beyond ASCII, so that no text can end its element.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {
        "percent": _percent,
        "hundredfold": _hundredfold,
        "chance": _percent_of_chance,
    }
    style = _source(environment, "page.css")
    script = _source(environment, "page.js")
    chance = _chance(report)
    html = environment.get_template("page.html.jinja").render(
        report=report,
        audit=_audit(report, chance),
        figures=[(title, _data_url(svg)) for title, svg in figures.items()],
        data={"report": report, "chance": chance},
        definitions=definitions(report),
        licensed=_holds_others_text(report),
        style=style,
        script=script,
        policy=_POLICY.format(style=_sha256(style), script=_sha256(script)),
    )
    # A file name in the report may hold what UTF-8 cannot.
    path.write_bytes(html.encode("utf-8", errors="backslashreplace"))


def _source(environment: Environment, name: str) -> str:
    """Reads a file beside the template as it is: its braces are not Jinja's."""
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _sha256(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()


def _data_url(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _percent(value: float) -> str:
    return f"{_hundredfold(value)}\u202f%"


def _hundredfold(value: float) -> Decimal:
    """With one digit, rounded as the page's script does: Python's own way makes 81.25 81.2."""
    return Decimal(100 * value).quantize(Decimal("0.1"), ROUND_HALF_UP)


def _percent_of_chance(value: float) -> str:
    """One in sixteen is 6.25 %, known exactly."""
    return f"{100 * value:.3g}\u202f%"


def _chance(report: Report) -> dict[str, float]:
    """What a scorer that says nothing reaches, the gold tied with all others, by metric.

    Empty where the papers have different numbers of candidates, and so no one chance.
    """
    candidates = report["paper_set"].get("candidates")
    return {} if candidates is None else rank_metrics(chance_rank(candidates))


def _audit(report: Report, chance: Mapping[str, float]) -> dict[str, Any] | None:
    """Picks what the length audit sets side by side: shortest first and the best system.

    Returns:
        Both systems and their Hit@1, an invalid paper being a miss; chance (None where it is not
        known), the selection-corrected Hit@1 where the report has one for this system, and which
        of three things holds (``verdict``); None where the report lacks either system.
    """
    measured = [each for each in report["systems"] if "hit@1" in each.get("metrics", {})]
    shortest = next((system for system in measured if system["scorer"] == "shortest"), None)
    # A pairwise judge sees the gold in every question, which is another task.
    others = [
        each
        for each in measured
        if each["kind"] not in ("trivial", "pairwise")
        and not (each.get("control") or each.get("diagnostic"))
    ]
    if shortest is None or not others:
        return None
    best = max(others, key=lambda system: float(_hit(system)["value"]))
    if _hit(shortest)["value"] >= _hit(best)["value"]:
        verdict = "length wins"
    elif _told_apart(report, best["id"], shortest["id"]):
        verdict = "system wins"
    else:
        verdict = "not clear"
    quoted = report.get("best", {})
    return {
        "shortest": shortest,
        "best": best,
        "shortest_hit": _hit(shortest),
        "best_hit": _hit(best),
        "systems": len(others),
        "chance": chance.get("hit@1"),
        "corrected": quoted.get("corrected") if quoted.get("system") == best["id"] else None,
        "verdict": verdict,
    }


def _hit(system: Report) -> Mapping[str, Any]:
    """Hit@1 as systems are compared by it: else one with a few valid papers could be the best."""
    hit: Mapping[str, Any] = system.get("compared") or system["metrics"]["hit@1"]
    return hit


def _told_apart(report: Report, better: str, worse: str) -> bool:
    """Whether the paired test, corrected for the number of pairs, puts one system ahead."""
    return any(
        (pair["a"], pair["b"]) == (better, worse) and pair["p_holm"] < ALPHA
        for pair in report["comparisons"]
    )


def _holds_others_text(report: Report) -> bool:
    """Whether candidates are in the report that are not the demo's, which come with this package.

    The texts themselves tell, for a task can have any name.
    """
    if not report["settings"]["text"]:
        return False
    papers, _ = check_folder(demo.FOLDER)
    own = {text for paper in papers for text in labelled_candidates(paper).values()}
    return any(
        candidate["text"] not in own
        for paper in report["papers"]
        for candidate in paper["candidates"]
    )


def _refuse_text(report: Report) -> None:
    def objects() -> Iterator[Report]:
        for paper in report["papers"]:
            yield paper
            yield from paper["candidates"]

    found = sorted({key for each in objects() for key in _TEXT_KEYS if key in each})
    if found:
        raise ValueError(
            f"the report's settings say it holds no text, but its papers have: {', '.join(found)}; "
            "write it again without text"
        )
