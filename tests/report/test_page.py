from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lm_eval_hyprank
from lm_eval_hyprank.datasets import demo
from lm_eval_hyprank.datasets.validation import check_folder
from lm_eval_hyprank.report.page import write_page
from tests.report.report_example import HOSTILE, report_example

Report = dict[str, Any]

SVG = '<svg xmlns="http://www.w3.org/2000/svg"><circle id="a" r="9"/><!-- {} --></svg>'
SHORTEST = "no model|example_energy|shortest"


class Page(HTMLParser):
    """The elements of a page in order, and the text of each kind of element."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in self.raw:
            self.raw[tag].append("")
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.raw:
            self.inside.remove(tag)

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.raw[self.inside[-1]][-1] += data
        else:
            self.text += data

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    @property
    def data(self) -> Report:
        loaded: Report = json.loads(self.raw["script"][0])["report"]
        return loaded

    def says(self, sentence: str) -> bool:
        return sentence in " ".join(self.text.replace("\u202f", " ").split())


@pytest.fixture
def report() -> Report:
    return report_example()


def page_of(report: Report, folder: Path, figures: dict[str, str] | None = None) -> Page:
    write_page(report, folder / "index.html", figures or {})
    return Page((folder / "index.html").read_text(encoding="utf-8"))


def system(report: Report, identifier: str) -> Report:
    return next(each for each in report["systems"] if each["id"] == identifier)


@pytest.mark.parametrize("text", [True, False])
def test_the_example_is_a_report(text: bool) -> None:
    schema = Path(lm_eval_hyprank.__file__).parent / "report" / "report.schema.json"
    jsonschema.validate(report_example(text=text), json.loads(schema.read_text(encoding="utf-8")))


def test_nothing_comes_from_elsewhere(report: Report, tmp_path: Path) -> None:
    page = page_of(report, tmp_path, {"One": SVG, "Two": SVG})
    for tag, attributes in page.elements:
        assert tag not in {"iframe", "object", "embed", "base", "audio", "video", "source"}
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name != "style", tag
            if name in {"src", "href", "srcset", "action", "poster", "data"}:
                assert (value or "").startswith(("#", "data:")), (tag, value)
    written = "".join(page.raw["style"] + page.raw["script"][1:])
    assert not re.search(r"@import|url\(|fetch\(|XMLHttp|WebSocket|innerHTML|eval\(", written)
    addresses = set(re.findall(r"https?://[^\s\"'`]+", written))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace


def test_the_policy_allows_this_style_and_script_alone(report: Report, tmp_path: Path) -> None:
    page = page_of(report, tmp_path)
    policy = next(
        attributes["content"] or ""
        for tag, attributes in page.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("default-src") == "'none'"
    for rule, text in (("script-src", page.raw["script"][1]), ("style-src", page.raw["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules.pop(rule) == f"'sha256-{digest}'"
    assert rules == {"img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}


def test_the_data_are_the_report(report: Report, tmp_path: Path) -> None:
    assert page_of(report, tmp_path).data == report


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_the_data_never_becomes_markup(text: str, report: Report, tmp_path: Path) -> None:
    def filled(text: str) -> Page:
        changed = copy.deepcopy(report)
        for paper in changed["papers"]:
            paper |= {"title": text, "context": text, "doi": text}
            paper["candidates"][0]["text"] = text
        for each in changed["systems"]:
            each |= {"model": text, "task": text, "paradigm": text}
        changed["paper_set"]["tasks"] = [text]
        changed["files"]["superseded"] = [{"file": text, "why": text}]
        changed["notes"] = [text]
        changed["version"] = text
        return page_of(changed, tmp_path, {text: SVG})

    page = filled(text)
    assert page.tags == filled("harmless").tags
    assert page.data["papers"][0]["title"] == text
    assert page.says(" ".join(text.split()))


@settings(max_examples=25, deadline=None)
@given(text=st.text(st.characters(exclude_categories=[])))
def test_any_text_survives(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    report = report_example(papers=1, systems=5)
    report["papers"][0]["title"] = text
    report["papers"][0]["candidates"][0]["text"] = text
    page = page_of(report, tmp_path_factory.mktemp("page"))
    assert page.tags[-2:] == ["script", "script"]
    assert page.data["papers"][0]["title"] == text
    assert page.data["papers"][0]["candidates"][0]["text"] == text


def test_a_file_name_that_is_no_unicode_is_shown(report: Report, tmp_path: Path) -> None:
    report["files"]["read"] = [{"file": "run-\udcff.json"}]
    assert page_of(report, tmp_path).says(r"run-\udcff.json")


def test_without_text_the_page_holds_none(tmp_path: Path) -> None:
    report = report_example()
    bare = report_example(text=False)
    bare_page = page_of(bare, tmp_path)
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    texts = [candidate["text"] for paper in report["papers"] for candidate in paper["candidates"]]
    texts += [paper[key] for paper in report["papers"] for key in ("title", "context")]
    assert not any(text in html or json.dumps(text)[1:-1] in html for text in texts)
    assert not bare_page.says(NOTICE)


NOTICE = "Holds text of the data set."


@pytest.mark.parametrize("task", ["researchbench_energy", "my_ranking", "hyprank_demo_energy"])
def test_the_notice_of_the_licence_goes_by_the_texts_and_not_the_tasks_name(
    task: str, tmp_path: Path
) -> None:
    report = report_example(papers=12)
    report["paper_set"]["tasks"] = [task]
    for each in report["systems"]:
        each["task"] = task
    assert page_of(report, tmp_path).says(NOTICE)
    demos, _ = check_folder(demo.FOLDER)
    for paper, own in zip(report["papers"], demos, strict=True):
        texts = [own.gold, *own.fakes, *own.models]
        for candidate, text in zip(paper["candidates"], texts, strict=True):
            candidate["text"] = text
    assert not page_of(report, tmp_path).says(NOTICE)
    report["papers"][3]["candidates"][2]["text"] += " And more."
    assert page_of(report, tmp_path).says(NOTICE)


@pytest.mark.parametrize("key", ["title", "context"])
def test_refuses_text_in_a_report_said_to_hold_none(key: str, tmp_path: Path) -> None:
    report = report_example(text=False)
    report["papers"][5][key] = "A text."
    with pytest.raises(ValueError, match=f"no text, but its papers have: {key};"):
        write_page(report, tmp_path / "index.html", {})
    assert not (tmp_path / "index.html").exists()


def test_refuses_a_candidates_text_in_a_report_said_to_hold_none(tmp_path: Path) -> None:
    report = report_example(text=False)
    report["papers"][5]["candidates"][3]["text"] = "A text."
    with pytest.raises(ValueError, match="its papers have: text;"):
        write_page(report, tmp_path / "index.html", {})


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_refuses_what_is_no_number(number: float, report: Report, tmp_path: Path) -> None:
    candidate = report["papers"][0]["candidates"][0]
    candidate["scores"][0] = number
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_page(report, tmp_path / "index.html", {})


def test_equal_reports_give_equal_bytes(report: Report, tmp_path: Path) -> None:
    one, two = tmp_path / "one.html", tmp_path / "two.html"
    two.write_text("an older page, which is replaced")
    write_page(report, one, {"A": SVG})
    write_page(report_example(), two, {"A": SVG})
    assert one.read_bytes() == two.read_bytes()


def test_figures_keep_their_order_and_titles(report: Report, tmp_path: Path) -> None:
    page = page_of(report, tmp_path, {"Second & last": SVG.format(2), "First": SVG.format(1)})
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    assert [image["alt"] for image in images] == ["Second & last", "First"]
    prefix = "data:image/svg+xml;base64,"
    decoded = [
        base64.b64decode((image["src"] or "").removeprefix(prefix)).decode() for image in images
    ]
    assert decoded == [SVG.format(2), SVG.format(1)]
    assert "figures" not in {
        attributes.get("id") for _, attributes in page_of(report, tmp_path).elements
    }


NOT_CLEAR = "The best system is not clearly ahead of the length of the text."


@pytest.mark.parametrize(
    ("value", "p_holm", "verdict"),
    [
        (0.95, None, "No model’s ranking beats the length of the text."),
        # Whatever the intervals: a paired test sees more, and one paper has no test.
        (0.60, 0.05, NOT_CLEAR),
        (0.60, 0.001, "The best system is ahead of the length of the text."),
        (0.10, 0.2, NOT_CLEAR),
        (0.10, None, NOT_CLEAR),
    ],
)
def test_the_audit_says_how_length_alone_compares(
    value: float, p_holm: float | None, verdict: str, report: Report, tmp_path: Path
) -> None:
    high = value + 0.05
    system(report, SHORTEST)["metrics"]["hit@1"] = {"value": value, "low": 0.0125, "high": high}
    best = next(
        one["id"]
        for one in report["systems"]
        if (one["model"], one["scorer"]) == ("acme/Lark-3B", "nll_sum") and "control" not in one
    )
    report["comparisons"] = [
        {"a": best, "b": SHORTEST, "p_holm": p_holm},
        {"a": SHORTEST, "b": report["systems"][0]["id"], "p_holm": 0.001},
    ][p_holm is None :]
    page = page_of(report, tmp_path)
    assert page.says(verdict)
    # As the script rounds; to the even digit it would be 1.2.
    assert page.says(f"Shortest first no model {100 * value:.1f} % [1.3, {100 * high:.1f}]")
    assert page.says(f"finds the gold in {100 * value:.1f} % of the papers")
    # A control reaches more here, but is no scorer that could be quoted.
    assert page.says("acme/Lark-3B with nll_sum, the best of 9 systems, in 79.2 %")
    assert page.says("chance is 6.25 %")
    assert page.says("length alone it is 55.4 %, where chance is 23 %")


def test_the_audit_leaves_out_a_judge_of_pairs(report: Report, tmp_path: Path) -> None:
    judge = report["systems"][-1]
    judge["metrics"]["hit@1"] = {"value": 1.0}
    judge["kind"] = "pairwise"
    assert page_of(report, tmp_path).says("acme/Lark-3B with nll_sum, the best of 8 systems")


def test_the_audit_shows_the_corrected_value_of_the_system_it_quotes(
    report: Report, tmp_path: Path
) -> None:
    count = report["best"]["of"]
    said = f"for being picked as the best of {count} over 24 papers 75.2 %"
    assert page_of(report, tmp_path).says(said)
    report["best"]["system"] = report["systems"][0]["id"]
    assert not page_of(report, tmp_path).says("for being picked as the best")


def test_the_audit_counts_invalid_papers_as_misses(report: Report, tmp_path: Path) -> None:
    """Else a system that ranks two papers would be the best, and its hits there the headline."""
    few = report["systems"][0]
    few |= {"papers": 2, "invalid": 22, "compared": {"value": 2 / 24}}
    few["metrics"]["hit@1"] = {"value": 1.0}
    page = page_of(report, tmp_path)
    assert page.says("acme/Lark-3B with nll_sum, the best of 9 systems, in 79.2 %")
    few["compared"] = {"value": 0.875, "low": 0.7, "high": 1.0}
    name = f"{few['model']} {few['scorer']} best of 9; 22 invalid papers are misses 87.5 %"
    page = page_of(report, tmp_path)
    assert page.says(name)
    assert page.says("the best of 9 systems, in 87.5 %")
    system(report, SHORTEST)["compared"] = {"value": 0.9}
    page = page_of(report, tmp_path)
    assert page.says("No model’s ranking beats the length of the text.")
    assert page.says("finds the gold in 90.0 % of the papers")


def test_the_notes_explain_the_names_on_the_page_and_no_others(
    report: Report, tmp_path: Path
) -> None:
    page = page_of(report, tmp_path)
    assert page.says("raw_sum: Raw sum, the sum of raw over the tokens")
    assert page.says("hit@k: share of papers with the gold among the first k")
    assert not page.says("pmi:")
    assert not page.says("both_wrong:")
    report["systems"][0]["scorer"] = "dc_pmi"
    report["systems"][1]["metrics"]["both_wrong"] = {"value": 0.5}
    page = page_of(report, tmp_path)
    assert page.says("dc_pmi: DC-PMI, nll_sum after the whole prompt")
    assert page.says("both_wrong: share of pairs")


def test_the_audit_marks_an_interval_that_says_nothing(report: Report, tmp_path: Path) -> None:
    hit = {"value": 0.0, "low": 0.0, "high": 0.0, "degenerate": True}
    system(report, SHORTEST)["metrics"]["hit@1"] = hit
    assert page_of(report, tmp_path).says("Shortest first no model 0.0 % no spread")


def test_the_audit_without_candidates_of_like_length(report: Report, tmp_path: Path) -> None:
    for each in report["systems"]:
        if "matched" in each:
            each["matched"] = {"papers": 0, "left_out": 24}
    page = page_of(report, tmp_path)
    assert page.says("chance is 6.25 %.")
    assert not page.says("left out; length")


def test_a_diagnostic_is_never_the_best_system(report: Report, tmp_path: Path) -> None:
    best = max(report["systems"][:8], key=lambda each: each["metrics"]["hit@1"]["value"])
    name = f"{best['model']} with {best['scorer']}, the best of"
    assert page_of(report, tmp_path).says(name)
    best["diagnostic"] = True
    assert not page_of(report, tmp_path).says(name)


def test_items_without_doi_or_groups(report: Report, tmp_path: Path) -> None:
    report["paper_set"] |= {"dois": 0, "disciplines": {"": 24}}
    page = page_of(report, tmp_path)
    assert page.says("over 24 items. Each")
    assert page.says("resamples of items, seed 0.")
    assert not page.says("DOIs")
    (section,) = [a for _, a in page.elements if a.get("id") == "disciplines"]
    assert "hidden" in section


def test_no_audit_without_its_systems(report: Report, tmp_path: Path) -> None:
    del system(report, SHORTEST)["metrics"]["hit@1"]
    page = page_of(report, tmp_path)
    assert "audit" not in {attributes.get("id") for _, attributes in page.elements}


def test_no_chance_where_papers_differ_in_their_candidates(report: Report, tmp_path: Path) -> None:
    del report["paper_set"]["candidates"]
    page = page_of(report, tmp_path)
    assert json.loads(page.raw["script"][0])["chance"] == {}
    assert page.says("among its candidates, over 24 papers")
    assert not page.says("chance is 6.25 %")


def test_names_what_was_not_used(report: Report, tmp_path: Path) -> None:
    page = page_of(report, tmp_path)
    assert page.says("Not used: another run of the same was read lark/results_2025.json older")
    assert page.says("results_old.json holds no task of this kind")
    assert page.says("1 in 10 replies could not be read.")
