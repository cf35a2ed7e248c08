from __future__ import annotations

import random

import pytest
import torch

from benchmarks import scoring
from benchmarks.scoring import Departure, departure, distinct_tokens, paper_of_shape, token_ratio
from lm_eval_hyprank.prefix import Row
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_token_ratio_counts_what_is_computed_twice():
    paper = [Row((1, 2, 3), (4, 5)), Row((1, 2, 3), (6,))]
    assert distinct_tokens(paper) == 6
    assert token_ratio(paper) == pytest.approx(9 / 6)


def test_a_paper_of_a_shape():
    paper = paper_of_shape(450, 16, seed=1)
    assert {len(row.prefix) for row in paper} == {450}
    assert len({tuple(row.continuation) for row in paper}) == 16
    assert paper == paper_of_shape(450, 16, seed=1) != paper_of_shape(450, 16, seed=2)
    for count in (2, 4, 16, 64):
        sizes = [len(row.continuation) for row in paper_of_shape(1, count, seed=count)]
        assert (min(sizes), max(sizes)) == (40, 236)
        assert sum(sizes) == 138 * count


def test_ratios_are_other_times_over_ours(monkeypatch):
    """Medians over three papers, on which each way takes twice, one and four times as long."""
    taken = {scoring.run_ours: 1.0, scoring.run_stock: 4.0, scoring.run_floor: 0.5}
    asked = []

    def seconds(lm, work, _, paper, *size):
        asked.append((work, *size))
        return taken[work] * len(paper)

    monkeypatch.setattr(scoring, "seconds", seconds)
    monkeypatch.setattr(scoring, "engine_of", lambda *_: None)
    papers = [[Row((1, 2, 3), (4, last)) for last in range(count)] for count in (2, 1, 4)]
    assert scoring.alternate(None, papers, 16) == {
        "speed-up over stock at batch size 16": 4.0,
        "token ratio": pytest.approx(token_ratio(papers[0])),
        "share of the practical floor": 0.5,
    }
    assert asked == [(scoring.run_ours,), (scoring.run_stock, 16), (scoring.run_floor,)] * 3
    times = iter((3.0, 1.0, 2.0))
    monkeypatch.setattr(scoring, "seconds", lambda *_: next(times))
    monkeypatch.setattr(scoring, "run_ours", lambda *_: None)
    assert scoring.best_stock_batch_size(None, papers[0], 16) == 4
    times = iter((3.0, 1.0))
    assert scoring.best_stock_batch_size(None, papers[0], 4) == 4


def test_a_shape_stands_beside_stock_at_its_best_and_at_its_largest_batch_size(monkeypatch):
    """One second a token for ours; stock takes twice, one and a half and four times as long."""
    taken = {1: 2.0, 4: 1.5, 16: 4.0}

    def fastest(lm, times, work, _, paper, size=None):
        share = {scoring.run_ours: 1.0, scoring.run_floor: 0.5}.get(work) or taken[size]
        return share * distinct_tokens(paper)

    monkeypatch.setattr(scoring, "fastest", fastest)
    monkeypatch.setattr(scoring, "largest_stock_batch_size", lambda *_: 16)
    monkeypatch.setattr(scoring, "attention_share", lambda *_: None)
    monkeypatch.setattr(scoring, "SHAPES", [(450, 4)])
    console = scoring.Console(record=True, width=200)
    scoring.print_shapes(console, None)
    row = next(line for line in console.export_text().splitlines() if line.startswith("| 450 x 4 "))
    ratio = token_ratio(paper_of_shape(450, 4, seed=454))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["450 x 4", "4", "1.50", "4.00", f"{ratio:.2f}", "0.50", "1.00", ""]


def test_departures_are_counted():
    exact = [[1.0, 2.0, 3.0, 3.5], [1.0, 1.0]]
    found = [[1.0, 3.25, 3.0, 3.0], [1.0, 1.0]]
    # 2.0 goes behind 3.0 and 3.5; 3.0 and 3.5 become equal; what was equal stays so.
    assert departure(exact, found) == Departure(1.25, swapped=2, pairs=7, gap=1.5, ties=1)
    assert departure(exact, exact) == Departure(0.0, 0, 7, 0.0, 0)


def test_plain_scores_are_those_of_the_reference(tmp_path):
    lm = loaded(tmp_path)
    row = Row(*(tuple(random.Random(seed).choices(range(3, 300), k=12)) for seed in (0, 1)))
    found, expected = scoring.plain_scores(lm, row), tiny.plain_scores(lm.model, row)
    assert torch.equal(found.greedy, expected.greedy)
    torch.testing.assert_close(found.nll, expected.nll, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.raw, expected.raw, rtol=0, atol=1e-5)


def loaded(folder, dtype="float32"):
    tiny.demo_llama().save_pretrained(folder)
    tiny.demo_tokenizer().save_pretrained(folder)
    return scoring.load(str(folder), "cpu", dtype)


def test_exactness_in_bfloat16(tmp_path, capsys, monkeypatch):
    loaded(tmp_path)
    arguments = ["scoring", "--model", str(tmp_path), "--dtype", "bfloat16", "--papers", "1"]
    monkeypatch.setattr("sys.argv", [*arguments, "--parts", "exactness"])
    scoring.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if " of 120" in line]
    assert [line.split("|")[1].strip() for line in lines] == ["nll", "nll", "raw", "raw"]
    for line in lines:
        assert 0 < float(line.split("|")[3]) < 0.1


@pytest.mark.slow
def test_every_part_prints_its_table(tmp_path, capsys, monkeypatch):
    loaded(tmp_path)
    monkeypatch.setattr(scoring, "SHAPES", [(30, 2), (60, 3)])
    monkeypatch.setattr(scoring, "VOCABULARIES", (500, 1000))
    monkeypatch.setattr(scoring, "STOCK_BATCH_SIZES", (1, 4))
    monkeypatch.setattr(
        scoring, "paper_of_shape", lambda *shape, seed: [Row((5,) * shape[0], (6, 7))] * shape[1]
    )
    monkeypatch.setattr("sys.argv", ["scoring", "--model", str(tmp_path), "--papers", "1"])
    scoring.main()
    printed = capsys.readouterr().out
    for row in (
        "| share of the practical floor ",
        "| peak memory above the model ",
        "| speed-up over stock ",
        "| 60 x 3 ",
        "| 1,000 ",
        "| all of it ",
        "| raw   | plain passes ",
    ):
        assert row in printed
