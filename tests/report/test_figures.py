"""Figures: the same bytes each time, whatever the surroundings, and honest about gaps."""

import copy
import re

import matplotlib
import pytest

from lm_eval_hyprank.report.build import build_report
from lm_eval_hyprank.report.figures import COLOURS, figures, render
from lm_eval_hyprank.report.intervals import Settings
from lm_eval_hyprank.report.runs import read_runs
from tests.report.conftest import shuffled
from tests.report.run_folder import write_judge, write_pairwise

NAMES = ["hits", "disciplines", "ranks", "positions", "length", "agreement"]


@pytest.fixture(scope="module")
def drawn(report):
    return figures(report)


def texts(figure):
    return {text.get_text() for text in figure.findobj(matplotlib.text.Text)}


def test_all_figures_are_drawn(drawn):
    assert list(drawn) == NAMES
    assert len({title for title, _ in drawn.values()}) == len(NAMES)


def test_the_same_report_gives_the_same_bytes_whatever_the_users_style(report):
    first = {name: render(figure, "svg") for name, (_, figure) in figures(report).items()}
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.hashsalt": "x"}):
        again = {name: render(figure, "svg") for name, (_, figure) in figures(report).items()}
    assert first == again


def test_files_hold_no_date_and_no_version(drawn):
    for _, figure in drawn.values():
        svg = render(figure, "svg").decode()
        assert not re.search(r"<dc:date>|20\d\d-\d\d-\d\d|Matplotlib v", svg)
        assert b"Matplotlib" not in render(figure, "png")


def test_hits_are_drawn_at_their_values_with_their_intervals(drawn, report):
    axes = drawn["hits"][1].axes[0]
    containers = {container.get_label(): container for container in axes.containers}
    assert set(containers) == {"NLL", "Raw", "NLL sum", "PMI per token", "DC-PMI"}
    values = {
        one["model"]: one["metrics"]["hit@1"]
        for one in report["systems"]
        if one["scorer"] == "nll" and "control" not in one
    }
    points, _, (bars,) = containers["NLL"].lines
    assert list(points.get_ydata()) == [cell["value"] for cell in values.values()]
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    for end, cell in zip(ends, values.values(), strict=True):
        assert end == pytest.approx([cell["low"], cell["high"]])


def test_first_choices_are_drawn_as_shares_by_place(drawn, report):
    (axes,) = drawn["positions"][1].axes
    judges = [one["positions"] for one in report["systems"] if "positions" in one]
    assert len(axes.lines) == len(judges) == 2
    for line, own in zip(axes.lines, judges, strict=True):
        counts = [row["first_choices"] for row in own]
        assert list(line.get_xdata()) == list(range(1, 17))
        assert list(line.get_ydata()) == [count / sum(counts) for count in counts]


def test_a_judge_without_a_readable_reply_is_not_drawn(report):
    silent = copy.deepcopy(report)
    for one in silent["systems"]:
        for row in one.get("positions", []):
            row["first_choices"] = 0
    assert "positions" not in figures(silent)


def test_judges_length_and_chance_are_lines(drawn):
    labels = drawn["hits"][1].axes[0].get_legend_handles_labels()[1]
    assert {"Judge (gpt-x)", "Judge, several orders (gpt-x)", "Shortest first", "Chance"} <= set(
        labels
    )


def test_a_value_that_is_absent_is_a_dash(report):
    gap = copy.deepcopy(report)
    for row in gap["pooled"]:
        row["disciplines"].pop("Law")
    shown = texts(figures(gap)["disciplines"][1])
    assert "–" in shown
    assert "nan" not in " ".join(shown).lower()


def test_names_are_shown_as_they_are(report):
    hostile = copy.deepcopy(report)
    for one in hostile["systems"]:
        one["model"] = one["model"].replace("Lark-1B", r"$\frac{a$ <b> \alpha_{")
    figure = figures(hostile)["hits"][1]
    assert r"$\frac{a$ <b> \alpha_{" in texts(figure)
    assert b"<b>" not in render(figure, "svg")


def test_only_judges_have_no_score_figures(report):
    judges = copy.deepcopy(report)
    judges["systems"] = [
        one for one in judges["systems"] if one["kind"] in ("judge", "judge_psc", "pairwise")
    ]
    judges["pooled"] = judges["agreement"] = []
    found = figures(judges)
    assert list(found) == ["disciplines", "positions"]
    render(found["disciplines"][1], "png")


def test_many_points_are_a_picture_within_the_svg(report):
    few = render(figures(report)["length"][1], "svg")
    many = copy.deepcopy(report)
    many["papers"] = many["papers"] * 60
    assert b"<image" not in few
    assert b"<image" in render(figures(many)["length"][1], "svg")


def test_more_models_than_colours_can_still_be_told_apart(report):
    crowd = copy.deepcopy(report)
    one = next(each for each in crowd["systems"] if each["scorer"] == "nll")
    crowd["systems"] = [
        {**one, "id": f"m{n}|t|nll", "model": f"m{n}", "task": "t"} for n in range(9)
    ]
    crowd["agreement"] = []
    axes = figures(crowd)["ranks"][1].axes[0]
    looks = [
        (line.get_color(), line.get_linestyle(), line.get_marker())
        for line in axes.lines
        if line.get_label() != "Chance"
    ]
    assert len(set(looks)) == 9 > len(COLOURS)


def test_ranks_have_a_line_of_chance_where_there_is_one(report):
    varied = copy.deepcopy(report)
    del varied["paper_set"]["candidates"]
    varied["paper_set"]["candidates_range"] = [2, 16]
    for some, count in ((report, 1), (varied, 0)):
        figure = figures(some)["ranks"][1]
        lines = [line for line in figure.axes[0].lines if line.get_label() == "Chance"]
        assert len(lines) == count
        assert ("Chance" in texts(figure)) is bool(count)


def test_agreeing_judges_have_the_name_of_their_task(tmp_path):
    for judge in ("one", "two"):
        write_judge(tmp_path, shuffled, judge)
        write_pairwise(tmp_path, lambda doc, other, first: first, judge)
    shown = texts(
        figures(build_report(read_runs([tmp_path]), Settings(resamples=50)))["agreement"][1]
    )
    assert "Judge\nKendall's τ" in shown
