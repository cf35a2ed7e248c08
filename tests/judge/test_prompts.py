import pytest

from lm_eval_hyprank import tasks
from lm_eval_hyprank.datasets.findings import DatasetError
from lm_eval_hyprank.judge.prompts import render, views


def first(load, **options):
    return load(demo=True, **options)["test"][0]


def test_the_prompt_shows_everything_in_the_order_of_the_document():
    doc = first(tasks.judge)
    prompt = render(doc)
    texts = [doc["background"], doc["question"]]
    texts += [f"[{index}] {text}" for index, text in enumerate(doc["candidates"])]
    places = [prompt.index(text) for text in texts]
    assert places == sorted(places)
    assert '{"ranking": [' in prompt
    assert doc["candidate_ids"][doc["gold"]] == "gold"
    assert doc["order"] == "seed:0"


def test_prompts_differ_and_hold_no_field_left_unfilled():
    prompts = {render(doc) for doc in tasks.judge(demo=True)["test"]}
    assert len(prompts) == 12
    for prompt in prompts:
        for name in ("background", "question", "candidate"):
            assert f"{{{name}" not in prompt
        assert "{{" not in prompt
        assert "\n\n\n" not in prompt


def test_braces_and_markup_in_the_data_stay_as_they_are(valid_folder, ranking_rows, paper_rows):
    ranking_rows[0]["gold_hypothesis"] = "{{ question }} <b>&amp; {% raw %} {background}"
    import json

    path = valid_folder / "ranking" / "ranking.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ranking_rows), encoding="utf-8")
    doc = tasks.judge(dataset_path=str(valid_folder))["test"][0]
    assert "] {{ question }} <b>&amp; {% raw %} {background}\n" in render(doc)


@pytest.mark.parametrize("load", [tasks.judge, tasks.judge_psc, tasks.judge_pairwise])
def test_the_background_can_be_left_out(load):
    doc, without = first(load), first(load, background=False)
    assert without["background"] is None
    assert doc["background"] in render(doc)
    assert doc["background"][:40] not in render(without)
    frame = render({**without, "question": "Q", "candidates": ["A", "B"]})
    assert "ackground" not in frame
    assert render(first(load, background="false")) == render(without)


def test_the_seed_and_the_order_change_the_order_only():
    doc = first(tasks.judge)
    for options, name in (
        ({"order_seed": 1}, "seed:1"),
        ({"order": "gold_first"}, "gold_first:0"),
        ({"order": "gold_last", "order_seed": 2}, "gold_last:2"),
    ):
        other = first(tasks.judge, **options)
        assert other["order"] == name
        assert other["candidates"] != doc["candidates"]
        shown = dict(zip(other["candidate_ids"], other["candidates"], strict=True))
        assert shown == dict(zip(doc["candidate_ids"], doc["candidates"], strict=True))
        assert other["candidate_ids"][other["gold"]] == "gold"
    assert first(tasks.judge, order="gold_first")["gold"] == 0
    assert first(tasks.judge, order="gold_last")["gold"] == 15


def test_a_choice_of_papers_does_not_change_the_prompts(valid_folder):
    every = tasks.judge(dataset_path=str(valid_folder))["test"]
    some = tasks.judge(dataset_path=str(valid_folder), discipline="Math")["test"]
    assert [render(doc) for doc in some] == [
        render(doc) for doc in every if doc["discipline"] == "Math"
    ]


def test_several_orders_are_views_of_one_document():
    doc = first(tasks.judge_psc, num_orders=3)
    shown = views(doc)
    assert len(shown) == 3
    assert len({render(view) for view in shown}) == 3
    for view in shown:
        assert view["candidate_ids"][view["gold"]] == "gold"
        assert sorted(view["candidates"]) == sorted(doc["candidates"])


def test_pairs_are_the_gold_against_each_negative_in_both_orders():
    doc = first(tasks.judge_pairwise)
    shown = views(doc)
    assert len(shown) == 30
    for number, (one, two) in enumerate(zip(shown[::2], shown[1::2], strict=True)):
        assert one["candidates"] == two["candidates"][::-1]
        assert one["candidate_ids"] == ["gold", doc["candidate_ids"][number + 1]]
        prompt = render(one)
        assert prompt.index(one["candidates"][0]) < prompt.index(one["candidates"][1])
        assert '{"better": ' in prompt


def test_another_template_is_taken_word_for_word(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(
        "B={{ background }}|Q={{ question }}|"
        "{% for c in candidates %}{{ loop.index0 }}:{{ c }};{% endfor %}",
        encoding="utf-8",
    )
    doc = first(tasks.judge, template=str(path))
    text = "".join(f"{number}:{text};" for number, text in enumerate(doc["candidates"]))
    assert render(doc) == f"B={doc['background']}|Q={doc['question']}|{text}"
    assert doc["template"] == str(path)


FAULTS = {
    "single braces": ("{background} {{question}} {{candidates}}", r"'\{background\}'.*\{\{ back"),
    "no question": ("{{background}} {{candidates}}", "does not show question"),
    "no background": ("{{question}} {{candidates}}", 'does not show background.*"background": f'),
    "other field": (
        "{{background}} {{question}} {{candidates}} {{survey}}",
        "asks for survey; a template is given background, question, candidates",
    ),
    "syntax": ("{{background}}\n{{question", "jinja:2: "),
}


@pytest.mark.parametrize(("source", "message"), FAULTS.values(), ids=FAULTS)
def test_a_template_that_would_not_show_the_paper_is_refused(tmp_path, source, message):
    path = tmp_path / "mine.jinja"
    path.write_text(source, encoding="utf-8")
    with pytest.raises(DatasetError, match=message):
        first(tasks.judge, template=str(path))


def test_a_template_without_background_goes_with_its_option(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{{question}} {{candidates}}", encoding="utf-8")
    assert first(tasks.judge, template=str(path), background=False)


def test_unreadable_templates_are_named(tmp_path):
    with pytest.raises(DatasetError, match=r"nothing\.jinja cannot be read \(No such file"):
        first(tasks.judge, template=str(tmp_path / "nothing.jinja"))
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    with pytest.raises(DatasetError, match="is not UTF-8"):
        first(tasks.judge, template=str(tmp_path / "latin.jinja"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order_seed": "x"}, "order_seed is 'x'; use a whole number"),
        ({"order_seed": True}, "order_seed is True"),
        ({"order": "random"}, "order is 'random'"),
        ({"background": "no"}, "background is 'no'; use true or false"),
        ({"ordr_seed": 1}, "'ordr_seed', which is no option; 'order_seed' is"),
        ({"templates": "x"}, "'templates', which is no option; 'template' is"),
    ],
)
def test_options_that_are_none_are_refused(options, message):
    with pytest.raises(DatasetError, match=message):
        first(tasks.judge, **options)


def test_options_of_the_model_are_ignored():
    others = {"model": "m", "base_url": "u", "revision": "r"}
    assert render(first(tasks.judge, **others)) == render(first(tasks.judge))
    assert first(tasks.judge_psc, **others)["order"] == "balanced:0"
    # A run may have energy tasks beside a judge.
    assert tasks.demo(template="x", order="gold_first", num_orders=3, background=False)
