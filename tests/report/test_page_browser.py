"""The page in a real browser: a Chromium of the system or of `playwright install chromium`."""

from __future__ import annotations

import copy
import csv
import io
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Download, Locator, Page, expect, sync_playwright

import lm_eval_hyprank
from lm_eval_hyprank.report.build import build_report
from lm_eval_hyprank.report.intervals import Settings
from lm_eval_hyprank.report.page import write_page
from lm_eval_hyprank.report.runs import read_runs
from tests.report import run_folder
from tests.report.report_example import CANDIDATES, HOSTILE, report_example

pytestmark = pytest.mark.slow

Report = dict[str, Any]
Open = Callable[..., Page]

# Both use the same ids, and their own styles.
FIGURES = {
    color: f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="240"><style>circle'
    f'{{fill:{color}}}</style><defs><clipPath id="c"><rect width="300" height="240"/></clipPath>'
    f'</defs><circle clip-path="url(#c)" cx="120" cy="120" r="90" style="stroke:black"/></svg>'
    for color in ("teal", "orange")
}
PHONE = {"width": 390, "height": 844}
SCHEMA = json.loads(
    (Path(lm_eval_hyprank.__file__).parent / "report" / "report.schema.json").read_text(
        encoding="utf-8"
    )
)
JUDGED = ["fake_1", "gold", "model_1", "model_2", "model_3"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        named = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
        found = [*filter(None, named), playwright.chromium.executable_path]
        program = next((path for path in found if os.path.exists(path)), None)
        if program is None:
            pytest.skip(
                "no Chromium; `apt-get install chromium` or `playwright install chromium` gets one"
            )
        # A sandbox needs rights that root in a container has not; the page is our own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Writes and opens a report's page; in the end nothing may have gone wrong on it."""
    faults: list[str] = []
    contexts = []

    def open_page(report: Report | None = None, **options: Any) -> Page:
        path = tmp_path / "index.html"
        write_page(report_example() if report is None else report, path, FIGURES)
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)  # for a loaded machine; a step takes a moment
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda request: (
                None
                if request.url == path.as_uri() or request.url.startswith(("data:", "blob:"))
                else faults.append(f"request: {request.url}")
            ),
        )
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        for page in context.pages:
            assert page.evaluate("window.hacked") is None
        context.close()
    assert faults == []


def rows(page: Page, table: str) -> Locator:
    return page.locator(f"#{table} tbody tr:not(.below)")


def column(page: Page, table: str, label: str) -> list[str]:
    """The texts of a column, without what stands in small type."""
    return page.evaluate(
        """([table, label]) => {
          const all = document.getElementById(table);
          const index = [...all.tHead.rows[0].cells].findIndex(
            (cell) => cell.textContent.trim() === label);
          return [...all.tBodies[0].rows].filter((row) => !row.classList.contains("below"))
            .map((row) => {
              const cell = row.cells[index].cloneNode(true);
              cell.querySelectorAll("small").forEach((small) => small.remove());
              return cell.textContent.trim();
            });
        }""",
        [table, label],
    )


def numbers(texts: list[str]) -> list[float]:
    """The numbers among them; a dash stands where there is none."""
    return [float(text.split("\u202f")[0].replace("−", "-")) for text in texts if text != "–"]


def head(page: Page, table: str, name: str) -> Locator:
    return page.locator(f"#{table} thead th", has=page.get_by_role("button", name=name, exact=True))


def sideways(page: Page) -> int:
    """How many pixels the page can be scrolled sideways."""
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def test_sorts_by_mouse_and_keyboard(open_page: Open) -> None:
    page = open_page()
    assert head(page, "leaderboard-table", "Hit@1").get_attribute("aria-sort") == "descending"
    values = numbers(column(page, "leaderboard-table", "Hit@1"))
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 3

    mrr = head(page, "leaderboard-table", "MRR")
    mrr.get_by_role("button").click()
    assert mrr.get_attribute("aria-sort") == "descending"
    assert page.locator("#leaderboard-table [aria-sort]").count() == 1
    values = numbers(column(page, "leaderboard-table", "MRR"))
    assert values == sorted(values, reverse=True)

    page.keyboard.press("Enter")  # the head keeps the focus
    assert mrr.get_attribute("aria-sort") == "ascending"
    assert numbers(column(page, "leaderboard-table", "MRR")) == values[::-1]
    expect(page.locator("#leaderboard-status")).to_have_text(
        "Sorted by MRR, ascending. 12 systems."
    )


def test_what_has_no_number_comes_last_either_way(open_page: Open) -> None:
    page = open_page()
    button = head(page, "leaderboard-table", "Matched Hit@1").get_by_role("button")
    for _ in range(2):
        button.click()
        texts = column(page, "leaderboard-table", "Matched Hit@1")
        assert texts[-1] == "–"
        assert texts.count("–") == 1


def test_another_metric(open_page: Open) -> None:
    report = report_example()
    page = open_page(report)
    page.get_by_label("Metric").first.select_option("mrr")
    values = numbers(column(page, "leaderboard-table", "MRR"))
    expected = sorted((each["metrics"]["mrr"]["value"] for each in report["systems"]), reverse=True)
    assert values == pytest.approx(expected, abs=5e-4)
    assert "Hit@1" in page.locator("#leaderboard-table thead").inner_text()
    best = max(report["systems"], key=lambda each: each["metrics"]["mrr"]["value"])
    low, high = (best["metrics"]["mrr"][end] for end in ("low", "high"))
    expect(rows(page, "leaderboard-table").first).to_contain_text(f"[{low:.3f}, {high:.3f}]")

    # What only a judge has can be chosen, and is no column otherwise.
    name = "Win rate terminal"
    assert name not in page.locator("#leaderboard-table thead").inner_text()
    page.get_by_label("Metric").first.select_option(label=name)
    assert column(page, "leaderboard-table", name).count("–") == 11


def test_filters_and_an_empty_selection(open_page: Open) -> None:
    page = open_page()
    systems = rows(page, "leaderboard-table")
    expect(systems).to_have_count(12)
    assert page.locator("#leaderboard-table tr.baseline").count() == 3
    page.get_by_label("Controls and baselines").uncheck()
    expect(systems).to_have_count(9)
    page.get_by_label("Paradigm").select_option("Raw")
    expect(systems).to_have_count(4)
    page.locator("#model").select_option("acme/Lark-3B")
    expect(systems).to_have_count(2)
    expect(rows(page, "discipline-table")).to_have_count(2)
    page.get_by_label("Search", exact=True).fill("raw_SUM lark")
    expect(systems).to_have_count(1)
    expect(page.locator("#leaderboard-status")).to_have_text("1 of 12 systems.")
    page.get_by_label("Search", exact=True).fill("nothing")
    expect(systems).to_have_text("No system matches the filters.")
    expect(rows(page, "discipline-table")).to_have_text("No system matches the filters.")
    page.get_by_role("button", name="Clear").click()
    expect(systems).to_have_count(12)


def test_disciplines_have_gaps_where_there_is_no_number(open_page: Open) -> None:
    page = open_page()
    cells = page.locator("#discipline-table tbody tr", has_text="judge").locator("td")
    expect(cells.first).to_have_text("–")
    expect(cells.nth(1)).to_contain_text("[0.0, ")
    page.locator("#discipline-metric").select_option("hit@5")
    expect(rows(page, "discipline-table").first).to_contain_text("100.0")


def test_opens_a_paper_by_keyboard_alone(open_page: Open) -> None:
    report = report_example()
    page = open_page(report)
    papers = page.locator("#paper")
    while not papers.evaluate("(element) => element === document.activeElement"):
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    paper = report["papers"][2]
    expect(page.locator("#paper-title")).to_have_text(paper["title"])
    expect(page.locator("#paper-facts")).to_contain_text(paper["paper_id"])
    expect(rows(page, "candidate-table")).to_have_count(16)
    gold = page.locator("#candidate-table tr.gold").first
    expect(gold.locator("th")).to_have_text("★ gold")

    page.locator("#systems-shown summary").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#systems-shown summary")).to_have_text("Systems shown (12 of 12)")

    own = next(each for each in paper["candidates"] if each["id"] == "gold")
    cells = gold.locator("td").all_inner_texts()
    for place, cell in enumerate(cells[: len(report["systems"])]):
        rank, *score = cell.split()
        assert float(rank) == own["ranks"][place]
        if score:
            shown = float(score[0].replace("−", "-"))
            assert shown == pytest.approx(own["scores"][place], abs=0.6)

    button = page.locator("#candidate-table .system-head button").nth(4)
    button.focus()
    page.keyboard.press("Space")
    order = sorted(paper["candidates"], key=lambda each: each["ranks"][4])
    names = [each["id"].replace("_", " ").replace("gold", "★ gold") for each in order]
    expect(rows(page, "candidate-table").locator("th")).to_have_text(names)


def test_a_system_with_few_valid_papers_is_not_among_the_leading(open_page: Open) -> None:
    report = report_example()
    few = report["systems"][0] | {"model": "acme/Few", "compared": {"value": 0.0}}
    few["metrics"] = few["metrics"] | {"hit@1": {"value": 1.0}}
    report["systems"][0] = few
    page = open_page(report)
    expect(rows(page, "leaderboard-table").first).to_contain_text("acme/Few")
    assert "acme/Few" not in page.locator("#candidate-table thead").inner_text()


def test_finds_and_orders_papers(open_page: Open) -> None:
    report = report_example()
    page = open_page(report)
    options = page.locator("#paper option")
    expect(options).to_have_count(24)
    page.get_by_label("Order").select_option("worst")
    means = [float(text.split("\u2002")[0]) for text in options.all_inner_texts()]
    assert means == sorted(means, reverse=True)
    assert means[0] > means[-1]
    page.locator("#paper-discipline").select_option("Biology")
    expect(options).to_have_count(4)
    page.get_by_label("Search papers").fill(report["papers"][7]["paper_id"])
    expect(options).to_have_count(1)
    expect(page.locator("#paper-title")).to_have_text(report["papers"][7]["title"])
    page.get_by_label("Search papers").fill("nowhere")
    expect(options).to_have_count(0)
    page.get_by_label("Search papers").fill("")
    page.locator("#paper-discipline").select_option("")
    page.get_by_label("Order").select_option("data")
    page.locator("#paper").select_option("0")
    page.get_by_role("button", name="Next").click()
    expect(page.locator("#paper-title")).to_have_text(report["papers"][1]["title"])
    page.get_by_role("button", name="Previous").click()
    expect(page.locator("#paper-title")).to_have_text(report["papers"][0]["title"])


def test_papers_without_a_discipline_are_a_choice_of_their_own(open_page: Open) -> None:
    report = report_example()
    for paper in report["papers"][:3]:
        paper["discipline"] = ""
    counts = Counter(paper["discipline"] for paper in report["papers"])
    report["paper_set"]["disciplines"] = dict(sorted(counts.items()))
    page = open_page(report)
    options = page.locator("#paper option")
    page.locator("#paper-discipline").select_option(label="(none given)")
    expect(options).to_have_count(3)
    page.locator("#paper-discipline").select_option(label="all")
    expect(options).to_have_count(24)
    expect(page.locator("#discipline-table thead")).to_contain_text("(none given) (3)")


def test_markup_in_the_data_stays_text(open_page: Open) -> None:
    report = report_example()
    page = open_page(report)
    expect(page.locator("#leaderboard-table")).to_contain_text(HOSTILE[1])
    for number, text in enumerate(HOSTILE):
        page.locator("#paper").select_option(str(number))
        expect(page.locator("#candidate-table")).to_contain_text(text)
        expect(page.locator("#paper-context")).to_contain_text(text)
    page.locator("#paper").select_option("3")
    expect(page.locator("#paper-title")).to_have_text(HOSTILE[0])
    assert page.locator("main img").count() == len(FIGURES)


def test_figures_with_the_same_ids_are_all_drawn(open_page: Open) -> None:
    page = open_page()
    page.wait_for_function("[...document.images].every((image) => image.complete)")
    widths = page.evaluate("[...document.images].map((image) => image.naturalWidth)")
    assert widths == [640, 640]


@pytest.mark.parametrize("width", [320, 390, 768])
def test_no_page_is_wider_than_its_screen(width: int, open_page: Open) -> None:
    report = report_example()
    report["files"]["read"].append({"file": "long/" * 60})
    report["systems"][0]["model"] = "x" * 200
    page = open_page(report, viewport={"width": width, "height": 844})
    page.locator("#systems-shown summary").click()
    page.locator("[data-choose=all]").click()
    page.locator("#paper-context summary").click()
    page.get_by_label("Whole texts").check()
    assert sideways(page) == 0
    for region in page.locator(".scroll").all():
        if region.evaluate("(element) => element.scrollWidth > element.clientWidth"):
            assert region.get_attribute("tabindex") == "0"
            assert region.get_attribute("role") == "region"
    text = page.locator("#candidate-table .below div").first
    assert text.evaluate("(element) => element.getBoundingClientRect().right") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, {"width": 1280, "height": 900}])
def test_nothing_that_axe_calls_serious(
    scheme: str, viewport: dict[str, int], open_page: Open
) -> None:
    page = open_page(viewport=viewport, color_scheme=scheme)
    page.locator("#systems-shown summary").click()
    page.locator("#paper-context summary").click()
    found = Axe().run(page).response
    assert found["violations"] == []


def test_dark_mode_is_dark(open_page: Open) -> None:
    brightness = {}
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        for what, name in (("body", "backgroundColor"), ("h1", "color"), (".scroll", "color")):
            color = page.locator(what).first.evaluate(f"(one) => getComputedStyle(one).{name}")
            channels = color.removeprefix("rgb(").removesuffix(")").split(",")
            brightness[scheme, what] = sum(map(int, channels)) / 3
    assert brightness["light", "body"] > 200 > 60 > brightness["dark", "body"]
    assert brightness["dark", "h1"] > 200 > 60 > brightness["light", "h1"]
    assert brightness["dark", ".scroll"] > 200


def test_print_shows_whole_tables_and_no_controls(open_page: Open) -> None:
    page = open_page(color_scheme="dark")
    expect(page.locator("#filters")).to_be_visible()
    page.emulate_media(media="print")
    for hidden in ("nav", "#filters", "#picker", "#download-csv"):
        expect(page.locator(hidden)).to_be_hidden()
    style = "(element) => [getComputedStyle(element).overflowX, getComputedStyle(element).color]"
    assert page.locator(".scroll").first.evaluate(style) == ["visible", "rgb(27, 29, 33)"]
    expect(page.locator("#candidate-table")).to_be_visible()


def test_motion_only_for_those_who_want_it(open_page: Open) -> None:
    behavior = "getComputedStyle(document.documentElement).scrollBehavior"
    assert open_page(reduced_motion="reduce").evaluate(behavior) == "auto"
    assert open_page(reduced_motion="no-preference").evaluate(behavior) == "smooth"


def test_skip_link_comes_first_and_is_seen(open_page: Open) -> None:
    page = open_page()
    page.keyboard.press("Tab")
    link = page.get_by_role("link", name="Skip to the leaderboard")
    expect(link).to_be_focused()
    assert link.bounding_box()["y"] >= 0
    page.keyboard.press("Enter")
    expect(page.locator("#leaderboard")).to_be_focused()


def test_focus_is_visible(open_page: Open) -> None:
    page = open_page()
    for _ in range(40):
        page.keyboard.press("Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
        assert outline == "3px", page.evaluate("document.activeElement.outerHTML.slice(0, 80)")


def downloaded(page: Page, name: str) -> Download:
    with page.expect_download() as waiting:
        page.get_by_role("button", name=name).click()
    return waiting.value


def test_downloads_the_report(open_page: Open) -> None:
    report = report_example()
    file = downloaded(open_page(report), "report.json")
    assert file.suggested_filename == "report.json"
    assert json.loads(Path(file.path()).read_text(encoding="utf-8")) == report


def test_downloads_the_leaderboard(open_page: Open) -> None:
    report = report_example()
    report["systems"][1]["model"] = '=HYPERLINK("x"), "quoted"'
    file = downloaded(open_page(report), "Leaderboard as CSV")
    assert file.suggested_filename == "leaderboard.csv"
    text = Path(file.path()).read_bytes().decode("utf-8")
    lines = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [line["scorer"] for line in lines] == [each["scorer"] for each in report["systems"]]
    assert lines[1]["model"] == '\'=HYPERLINK("x"), "quoted"'
    assert lines[-1]["model"] == HOSTILE[1]
    for line, each in zip(lines, report["systems"], strict=True):
        for metric, measured in each["metrics"].items():
            assert float(line[metric]) == measured["value"]
            assert float(line[f"{metric}_high"]) == measured["high"]
    assert lines[-1]["matched_hit@1"] == ""


def test_without_text_it_shows_ids_lengths_and_ranks(open_page: Open) -> None:
    report = report_example(text=False)
    page = open_page(report)
    expect(page.locator("#paper-title")).to_have_text(report["papers"][0]["paper_id"])
    expect(page.locator("#paper-context")).to_be_hidden()
    expect(page.get_by_label("Whole texts")).to_have_count(0)
    expect(page.locator("#candidate-table tbody tr")).to_have_count(16)
    bytes_shown = sorted(map(int, column(page, "candidate-table", "Bytes")))
    assert bytes_shown == sorted(each["bytes"] for each in report["papers"][0]["candidates"])


def bare(report: Report) -> Report:
    """As little as a report may hold."""
    report = copy.deepcopy(report)
    for system in report["systems"]:
        for key in ("tier", "rank_histogram", "length_correlation", "matched", "disciplines"):
            system.pop(key, None)
        for measured in system["metrics"].values():
            measured.pop("low"), measured.pop("high")
    del report["systems"][0]["metrics"]  # none could be computed
    report["systems"][1]["metrics"]["hit@1"] |= {"low": 0.0, "high": 0.0, "degenerate": True}
    del report["systems"][2]["metrics"]["hit@1"]
    del report["best"]
    report["notes"] = []
    report["files"] = {"read": [], "superseded": [], "left_out": []}
    del report["paper_set"]["candidates"]
    for paper in report["papers"]:
        for candidate in paper["candidates"]:
            candidate.pop("tokens", None)
    return report


def test_what_is_absent_is_a_dash_or_left_out(open_page: Open) -> None:
    report = bare(report_example())
    jsonschema.validate(report, SCHEMA)
    page = open_page(report)
    names = page.locator("#leaderboard-table thead").inner_text()
    assert not any(name in names for name in ("Tier", "Matched", "Length", "Ranks"))
    assert column(page, "leaderboard-table", "Hit@1").count("–") == 2
    expect(page.locator("#leaderboard-table")).to_contain_text("no spread")
    expect(page.locator("#leaderboard-table")).not_to_contain_text("NaN")
    expect(page.locator("#leaderboard-table")).not_to_contain_text("undefined")
    assert set(column(page, "candidate-table", "Tokens")) == {"–"}


def test_a_report_that_was_really_built(open_page: Open, tmp_path: Path) -> None:
    for model in ("acme/Lark-1B", "acme/Lark-3B"):
        run_folder.write_energy(tmp_path / "runs" / model, model)
    run_folder.write_energy(
        tmp_path / "runs" / "control",
        task="researchbench_no_context",
        metadata={"control": "no_context", "control_of": run_folder.TASK},
    )
    run_folder.write_judge(
        tmp_path / "runs" / "judge", lambda doc: None if "Law" in doc["paper_id"] else JUDGED
    )
    run_folder.write_psc(tmp_path / "runs" / "psc", lambda doc, order: JUDGED)
    run_folder.write_pairwise(tmp_path / "runs" / "pairs", lambda doc, other, first: first)
    report = build_report(read_runs([tmp_path / "runs"]), Settings(resamples=50))
    kinds = {system["kind"] for system in report["systems"]}
    assert kinds == {"energy", "trivial", "judge", "judge_psc", "pairwise"}
    page = open_page(report)
    expect(rows(page, "leaderboard-table")).to_have_count(len(report["systems"]))
    expect(page.locator("#leaderboard-table .tag", has_text="no context").first).to_be_visible()
    # A pairwise judge has metrics, but no ranks of the candidates.
    page.locator("#systems-shown summary").click()
    page.locator("[data-choose=all]").click()
    shown = page.locator("#candidate-table .system-head")
    expect(shown).to_have_count(len(report["systems"]) - 1)
    assert len(set(shown.all_inner_texts())) == len(report["systems"]) - 1
    for table in ("leaderboard-table", "discipline-table", "candidate-table"):
        expect(page.locator(f"#{table}")).not_to_contain_text(re.compile("NaN|undefined|null"))
    for option in page.locator("#metric option").all_inner_texts():
        page.locator("#metric").select_option(label=option)
        assert numbers(column(page, "leaderboard-table", option))
    file = downloaded(page, "report.json")
    assert json.loads(Path(file.path()).read_text(encoding="utf-8")) == report


def test_papers_without_a_title_are_named(open_page: Open) -> None:
    report = report_example()
    report["paper_set"]["candidates"] = 5
    report["systems"][0]["diagnostic"] = True
    for number, paper in enumerate(report["papers"]):
        paper |= {"title": "", "discipline": "", "context": "What is\nthe capital? " + "x" * 60}
        paper["paper_id"] = str(number) if number else "first"
    page = open_page(report)
    begin = f"What is the capital? {'x' * 39}…"
    expect(page.locator("#paper-title")).to_have_text(f"first: {begin}")
    page.get_by_role("button", name="Next").click()
    expect(page.locator("#paper-title")).to_have_text(f"item 1: {begin}")
    expect(page.locator("#paper-facts")).to_have_text(re.compile("^doi "))
    options = page.locator("#metric option").all_inner_texts()
    assert "Hit@3" in options
    assert "Hit@5" not in options
    expect(page.locator("#leaderboard-table .tag", has_text="diagnostic")).to_have_count(1)


def test_one_system_alone(open_page: Open) -> None:
    report = report_example(papers=1, systems=5)
    report["systems"] = report["systems"][:1]
    for candidate in report["papers"][0]["candidates"]:
        for key in ("scores", "ranks"):
            candidate[key] = candidate[key][:1]
    page = open_page(report)
    expect(rows(page, "leaderboard-table")).to_have_count(1)
    expect(rows(page, "candidate-table")).to_have_count(16)


def test_a_report_of_nothing(open_page: Open) -> None:
    report = report_example() | {"systems": [], "papers": []}
    report["paper_set"] |= {"papers": 0, "disciplines": {}}
    page = open_page(report)
    expect(rows(page, "leaderboard-table")).to_have_text("No system matches the filters.")
    expect(page.locator("#papers")).to_be_hidden()


def test_the_whole_benchmark_with_thirty_systems(open_page: Open) -> None:
    report = report_example(papers=1323, systems=30, text=False)
    page = open_page(report, viewport=PHONE)
    head(page, "leaderboard-table", "MRR").get_by_role("button").click()
    values = numbers(column(page, "leaderboard-table", "MRR"))
    assert values == sorted(values, reverse=True)
    assert len(values) == 30
    page.get_by_label("Search papers").fill("1001322")
    expect(page.locator("#paper-title")).to_have_text(report["papers"][1322]["paper_id"])
    expect(rows(page, "candidate-table")).to_have_count(len(CANDIDATES))
    assert sideways(page) == 0
