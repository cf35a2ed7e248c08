"""Tables in three formats: the same numbers, and nothing that breaks out of its cell."""

import copy
import csv
import io
import re

import matplotlib
import pytest

from lm_eval_hyprank.report.build import build_report
from lm_eval_hyprank.report.figures import figures
from lm_eval_hyprank.report.intervals import Settings
from lm_eval_hyprank.report.runs import read_runs
from lm_eval_hyprank.report.tables import (
    Table,
    latex,
    markdown,
    tables,
    to_csv,
)
from lm_eval_hyprank.report.write import write_report
from tests.report.run_folder import (
    IDS,
    TASK,
    documents,
    nan_for,
    scores_of,
    write_energy,
    write_judge,
)

HOSTILE = r"a|b`c` <img src=x> [x](http://e.org) $1_2$ 50% & {#^~\ *b*" + "\nnext"


@pytest.fixture(scope="module")
def made(report):
    return {table.name: table for table in tables(report)}


def cells(line):
    """Cells of a Markdown row, escaped bars inside left alone."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def system(report, name):
    return next(one for one in report["systems"] if one["id"] == name)


def test_every_table_is_there(made):
    assert list(made) == [
        *("overall", "disciplines", "gold_beats", "judges", "positions", "comparisons", "length"),
        *("energy", "controls"),
    ]


def test_the_overall_table_has_the_shape_of_the_papers(made, report):
    table = made["overall"]
    hits = ["Hit@1", "Hit@2", "Hit@3", "Hit@5"]
    assert table.header == ["Model", "Papers", "Tier", *hits, "MRR", "Win rate"]
    sections = list(dict.fromkeys(section for section, _ in table.rows))
    assert sections[:2] == ["NLL", "Raw"]
    nll = [row for section, row in table.rows if section == "NLL"]
    assert [row[0] for row in nll] == ["Lark-1B", "Lark-3B", "All models"]
    assert nll[0][3] == system(report, "Lark-1B|researchbench_energy|nll")["metrics"]["hit@1"]


def test_numbers_are_shown_with_their_interval(made):
    line = next(
        line for line in markdown([made["overall"]]).splitlines() if line.startswith("| Lark-1B")
    )
    cell = made["overall"].rows[0][1][3]
    assert cells(line)[3] == f"{cell['value']:.3f} [{cell['low']:.3f}, {cell['high']:.3f}]"


def test_a_judge_has_no_mrr_and_both_win_rates(made, report):
    (row,) = [row for section, row in made["overall"].rows if section == "Judge"]
    assert row[-2] is None
    header = made["judges"].header
    rows = {section: dict(zip(header, row, strict=True)) for section, row in made["judges"].rows}
    judge = system(report, "gpt-x|researchbench_judge|judge")
    own = rows["Judge"]
    assert own["Readable replies"]["value"] == 7 / 8
    assert own["Win rate, half"] == judge["metrics"]["win_rate"]
    assert own["Win rate, terminal"] == judge["metrics"]["win_rate_terminal"]
    assert own["Win rate, half"]["value"] > own["Win rate, terminal"]["value"]
    assert own["Hit@1 of readable"] == judge["metrics_valid"]["hit@1"]
    assert rows["Judge, pairwise"]["Both orders right"]["value"] == 1.0
    assert rows["Judge, pairwise"]["Papers"] == 8, "with verdicts, though none has a rank"
    text = markdown([made["overall"]])
    assert "no MRR" in text


def test_a_judges_choices_stand_by_the_place_shown(made, report):
    rows = [row for section, row in made["positions"].rows if section == "Judge (gpt-x)"]
    positions = system(report, "gpt-x|researchbench_judge|judge")["positions"]
    assert [row[:3] for row in rows] == [
        [str(place), own["first_choices"], own["gold_shown"]]
        for place, own in enumerate(positions, start=1)
    ]
    # Where the gold was never shown there is no share of hits.
    assert [row[3] is None for row in rows] == [own["gold_shown"] == 0 for own in positions]
    assert "Judge, pairwise (gpt-x)" not in {section for section, _ in made["positions"].rows}


def test_what_cannot_be_computed_is_a_dash(made):
    line = next(
        line
        for line in markdown([made["overall"]]).splitlines()
        if line.startswith("| gpt-x") and cells(line)[3] == "–"
    )
    assert cells(line)[3:] == ["–"] * 6  # the pairwise judge with unread verdicts
    text = to_csv(made["overall"])
    assert "nan" not in text.lower()
    assert "None" not in text


def test_an_interval_without_width_is_marked_and_explained(report):
    flat = copy.deepcopy(report)
    flat["systems"][0]["metrics"]["hit@1"] = {
        **{"value": 0.0, "low": 0.0, "high": 0.0},
        "degenerate": True,
    }
    text = markdown(tables(flat))
    assert "| 0.000 † |" in text
    assert "† All papers, or all resamples, have the same value" in text


def test_the_best_without_spread_is_marked_and_explained(report):
    flat = copy.deepcopy(report)
    flat["best"]["corrected"] = {"value": 0.0, "low": 0.0, "high": 0.0}
    text = markdown([tables(flat)[0]])
    assert "the best it is 0.000 †." in text
    assert "† All papers" in text
    assert "[0.000, 0.000]" not in text


def test_small_items_without_doi_or_groups(tmp_path):
    docs = documents(6)
    for number, doc in enumerate(docs):
        keep = [i for i, name in enumerate(doc["candidate_ids"]) if name in IDS[:3]]
        for key in ("candidates", "candidate_ids"):
            doc[key] = [doc[key][i] for i in keep]
        doc |= {"gold": doc["candidate_ids"].index("gold"), "paper_id": str(number)}
        doc |= {"doi": "", "title": "", "discipline": ""}

    def scores(doc):
        gold = [float(i != doc["gold"]) for i in range(3)]
        return {
            "nll": scores_of("x", doc)["nll"],
            "logz": gold,
            "shortest": [float(len(text)) for text in doc["candidates"]],
            "chance": [0.0] * 3,
        }

    reads = {"nll": "nll", "logz": "logz", "shortest": "num_bytes", "chance": ""}
    write_energy(tmp_path, docs=docs, scores=scores, scorers=reads, task="capitals")
    made = build_report(read_runs([tmp_path]), Settings(resamples=50))
    by_scorer = {one["scorer"]: one for one in made["systems"]}
    assert by_scorer["logz"]["diagnostic"]
    assert made["best"]["system"] == by_scorer["nll"]["id"]
    chance = by_scorer["chance"]
    assert "tier" not in chance
    assert chance["id"] not in {pair[side] for pair in made["comparisons"] for side in "ab"}
    found = {table.name: table for table in tables(made)}
    assert "disciplines" not in found
    assert "over 6 items (percentile bootstrap over items" in found["overall"].caption
    assert found["overall"].header[1:] == ["Items", "Tier", "Hit@1", "Hit@2", "MRR", "Win rate"]
    assert "Log-partition, diagnostic" in {section for section, _ in found["overall"].rows}
    shown = [set(row[:2]) for _, row in found["comparisons"].rows]
    assert {"Lark-1B, NLL", "Lark-1B, Log-partition"} in shown
    assert {"no model, Shortest first", "Lark-1B, Log-partition"} not in shown
    text = markdown(list(found.values()))
    assert "| 0.333 † |" in text
    assert "DOI" not in text
    drawn = figures(made)
    assert "Chance" not in [axes.get_title(loc="left") for axes in drawn["ranks"][1].axes]


def test_the_best_of_many_stands_beside_its_correction(made, report):
    text = markdown([made["overall"]])
    best = report["best"]
    assert f"The best of {best['of']} cells" in text
    assert "over 8 papers; corrected" in text
    assert f"{best['corrected']['value']:.3f}" in text


def test_discipline_columns_pool_models_and_set_the_best_in_bold(made):
    table = made["disciplines"]
    assert table.header[2:4] == ["Hit@1 NLL", "Hit@1 Raw"]
    for table_row, line in zip(
        table.rows,
        [
            line
            for line in markdown([table]).splitlines()
            if re.match(r"\| (Bio|Law|Math|Phy)", line)
        ],
        strict=True,
    ):
        for columns in table.bold:
            values = [table_row[1][i] and table_row[1][i]["value"] for i in columns]
            known = [value for value in values if value is not None]
            for i, value in zip(columns, values, strict=True):
                best = value is not None and value == max(known) > min(known)
                assert cells(line)[i].startswith("**") == best


def test_gold_beats_is_in_per_cent(made, report):
    line = next(line for line in markdown([made["gold_beats"]]).splitlines() if "| Lark-1B" in line)
    value = system(report, "Lark-1B|researchbench_energy|nll")["gold_beats"]["all"]["value"]
    assert cells(line)[1].startswith(f"{100 * value:.1f} % [")


def test_fake_and_model_candidates_are_explained_where_there_are_both(made, report):
    assert "language models wrote" in markdown([made["gold_beats"]])
    other = copy.deepcopy(report)
    for one in other["systems"]:
        one.get("gold_beats", {}).pop("model", None)
    assert "language models wrote" not in markdown(tables(other))


def test_csv_has_all_digits_and_the_limits_in_columns(made):
    table = made["overall"]
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert len(rows) == len(table.rows)
    for row, (section, own) in zip(rows, table.rows, strict=True):
        assert row["Section"] == section
        if own[3] is not None:
            assert float(row["Hit@1"]) == own[3]["value"]
            assert float(row["Hit@1 high"]) == own[3]["high"]


def test_comparisons_show_the_first_system_against_all_others(made, report):
    names = {name for _, row in made["comparisons"].rows for name in row[:2]}
    compared = {pair[side] for pair in report["comparisons"] for side in "ab"}
    assert len(names) == len(compared)
    assert f"has all {len(report['comparisons'])} pairs" in markdown([made["comparisons"]])


def test_controls_show_what_is_lost(made, report):
    table = made["controls"]
    assert table.header[4:] == ["no context", "lost: no context"]
    first = dict(zip(table.header, table.rows[0][1], strict=True))
    full, without = first["Whole prompt"]["value"], first["no context"]["value"]
    assert first["lost: no context"]["value"] == pytest.approx(full - without)
    for part in ("Whole prompt", "no context", "lost: no context"):
        assert first[part]["low"] <= first[part]["value"] <= first[part]["high"]
    assert re.search("No PMI of Lark-3B on .*: there is no run", markdown([made["overall"]]))


NO_CONTEXT = {"control": "no_context", "control_of": TASK}


def words_on_controls(folder):
    """What a report of the runs says of controls and PMI, and whether it has their table."""
    report = build_report(read_runs([folder]), Settings(resamples=20))
    made = tables(report)
    said = [note for note in made[0].notes if "control" in note or "PMI" in note]
    assert [note for note in report["notes"] if note in said] == said
    return said, "controls" in {table.name for table in made}


def test_controls_that_stand_beside_nothing_are_told_with_their_task(tmp_path):
    """As of the task by discipline, or one that includes ours under another name."""
    for model in ("acme/Lark-1B", "acme/Lark-3B"):
        write_energy(tmp_path, model, task="my_ranking")
        write_energy(tmp_path, model, task=f"{TASK}_nocontext", metadata=NO_CONTEXT)
    said, table = words_on_controls(tmp_path)
    assert not table
    assert said == [
        f"The controls of {TASK} stand beside that task itself, of which there is no run of "
        "Lark-1B, Lark-3B: they are compared with nothing.",
        "No PMI of Lark-1B, Lark-3B on my_ranking: the control without context stands beside "
        f"{TASK} itself, so run that task too.",
    ]


def test_every_control_that_stands_beside_nothing_is_told(tmp_path):
    write_energy(tmp_path, task="my_ranking", scorers={"raw": "raw"})  # of which there is no PMI
    metadata = {"control": "question_only", "control_of": TASK}
    write_energy(tmp_path, task=f"{TASK}_question_only", metadata=metadata)
    said, table = words_on_controls(tmp_path)
    assert not table
    assert said[0].startswith(f"The controls of {TASK} stand beside that task itself")


def test_why_there_is_no_pmi_is_told_with_a_table_of_controls_too(tmp_path):
    write_energy(tmp_path)
    write_energy(tmp_path, "acme/Lark-3B")
    write_energy(tmp_path, task=f"{TASK}_nocontext", metadata=NO_CONTEXT)
    said, table = words_on_controls(tmp_path)
    assert table
    assert len(said) == 1
    assert said[0].startswith(f"No PMI of Lark-3B on {TASK}: there is no run of this model")


def test_nothing_is_said_of_controls_where_nobody_ran_any(tmp_path):
    write_energy(tmp_path)
    assert words_on_controls(tmp_path) == ([], False)


def hostile_table():
    return Table("overall", "Caption.", ["Model", "Hit@1"], [(HOSTILE, [HOSTILE, {"value": 0.5}])])


def test_markdown_keeps_a_name_in_its_cell():
    lines = markdown([hostile_table()]).splitlines()
    row = next(line for line in lines if "0.500" in line)
    assert len(cells(row)) == 2
    for raw in ("<img", "`c`", "](http", " *b*"):
        assert raw not in row.replace("\\`", "").replace("\\*", "")
    assert len([line for line in lines if "next" in line]) == 2  # section and row, one line each


def test_latex_escapes_what_it_reads_as_commands():
    text = latex(hostile_table())
    body = text[text.index("\\midrule") : text.index("\\bottomrule")]
    for escaped in (r"\&", r"\%", r"\$1\_2\$", r"\#", r"\{", r"\textasciitilde{}", r"\textbar{}"):
        assert escaped in body
    assert r"\textbackslash{}" in body
    assert "\nnext" not in body
    row = next(line for line in body.splitlines() if line.endswith(r"0.500 \\"))
    assert len(re.findall(r"(?<!\\)&", row)) == 1


def test_latex_is_a_whole_float(made):
    for table in made.values():
        text = latex(table)
        for part in ("table*", "tabular"):
            assert text.count(rf"\begin{{{part}}}") == text.count(rf"\end{{{part}}}") == 1
        rows = [line for line in text.splitlines() if line.endswith(r"\\")]
        width = {len(re.findall(r"(?<!\\)&", line)) for line in rows if "multicolumn" not in line}
        assert width == {len(table.header) - 1}


def test_minus_zero_is_zero_and_a_small_p_is_not():
    cells = ["m", {"value": -0.0, "low": -0.0001, "high": 1.0}, {"value": 0.0001}]
    table = Table("overall", "C.", ["Model", "x", "p"], [("", cells)])
    assert "| 0.000 [0.000, 1.000] | &lt; 0.001 |" in markdown([table])


def test_data_without_dois_has_items(tmp_path):
    """In every text of the report, the page and the figures."""
    docs = [doc | {"doi": ""} for doc in documents()]
    write_energy(tmp_path / "in", docs=docs, scores=nan_for(docs[1]["paper_id"]))
    write_energy(tmp_path / "in", "acme/Lark-3B", docs=docs, total=9)
    docs = [doc | {"doi": ""} for doc in documents(shown=1)]
    write_judge(tmp_path / "in", lambda doc: doc["candidate_ids"][:5], docs=docs, total=9)
    report = build_report(read_runs([tmp_path / "in"]), Settings(resamples=50))
    write_report(report, tmp_path / "out")
    texts = [(tmp_path / "out" / "report.md").read_text("utf-8")]
    page = (tmp_path / "out" / "index.html").read_text("utf-8")
    page = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.S)
    texts.append(re.sub(r"<[^>]*>", " ", page))
    texts += [
        text.get_text()
        for _, figure in figures(report).values()
        for text in figure.findobj(matplotlib.text.Text)
    ]
    assert "Items" in texts[0]
    assert "is a miss in tests, tiers and the best" in texts[0]
    assert [found for text in texts for found in re.findall(r".*\bpapers?\b.*", text, re.I)] == []


def test_a_control_that_lacks_a_paper_stands_in_a_row_of_its_own(tmp_path):
    """Else its loss would stand beside a value of the whole prompt over other papers."""
    write_energy(tmp_path)
    lacks_one = nan_for(documents()[0]["paper_id"])
    for control, scores in (("no_context", None), ("question_only", lacks_one)):
        write_energy(
            tmp_path,
            task=f"{TASK}_{control}",
            metadata={"control": control, "control_of": TASK},
            scores=scores,
        )
    report = build_report(read_runs([tmp_path]), Settings(resamples=50))
    (table,) = [one for one in tables(report) if one.name == "controls"]
    rows = [row for title, row in table.rows if title == "Hit@1" and row[1] == "NLL"]
    assert [row[2] for row in rows] == [8, 7]
    for row, (here, there) in zip(rows, ((4, 6), (6, 4)), strict=True):
        lost = row[here + 1]["value"]
        assert row[here]["value"] + lost == pytest.approx(row[3]["value"])
        assert row[there] is None
        assert row[there + 1] is None


def test_notes_stand_below_the_latex_table(made):
    text = latex(made["overall"])
    assert "No system can be told apart" in text.partition(r"\end{tabular}")[2]
    table = Table("length", "Of one", ["Model", "Hit@1"], notes=["† says 50 % & nothing"])
    assert r"\textdagger{} says 50 \% \& nothing\par}" in latex(table)
