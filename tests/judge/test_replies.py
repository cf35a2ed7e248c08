import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.registry import get_filter

from lm_eval_hyprank.judge.replies import (
    JudgeRanking,
    JudgeVerdict,
    Reading,
    Reply,
    read_ranking,
    read_verdict,
)

RANKING = [7, 3, 1, 0, 15]
JSON = '{"ranking": [7, 3, 1, 0, 15]}'

READABLE = {
    "plain": JSON,
    "fence": f"```json\n{JSON}\n```",
    "fence without a language": f"```\n{JSON}\n```",
    "tilde fence": f"~~~\n{JSON}\n~~~",
    "prose around": f"Here is my ranking:\n\n{JSON}\n\nI hope this helps [1, 2, 3, 4, 5]!",
    "reasoning": f'<think>say {{"ranking":[0,1,2,3,4]}}</think> {JSON}',
    "thinking": f"<thinking>{{0, 1}}</thinking>{JSON}",
    "reasoning after": f'{JSON}<think>or {{"ranking":[0,1,2,3,4]}}?</think>',
    "reasoning nested": f"<think>a<think>b</think>{{'ranking':[0,1,2,3,4]}}</think>{JSON}",
    "reasoning without its start": f'maybe {{"ranking":[0,1,2,3,4]}}</think>{JSON}',
    "square reasoning": f'[THINK]{{"ranking":[0,1,2,3,4]}}[/THINK]{JSON}',
    "channels": f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    f"<|channel|>final<|message|>{JSON}",
    "several objects": f'Such as {{"ranking":[0,1,2,3,4]}}. My answer: {JSON}',
    "a draft, then the answer, then one that is no answer": '{"ranking":[0,1,2,3,4]} '
    f'{JSON} {{"ranking": []}}',
    "an object that is cut off at the end": f'{JSON} or rather {{"ranking": [1, 2',
    "nested": f'{{"answer": {JSON}}}',
    "in a list": f"[{JSON}]",
    "prose in braces": f"{{My ranking: {JSON}}}",
    "single quotes": "Sure! {'ranking': [7, 3, 1, 0, 15]}",
    "trailing commas": '{"ranking": [7, 3, 1, 0, 15,],}',
    "single quotes and trailing commas": "Best first: {'ranking': [7,3,1,0,15,],}",
    "no quotes": "{ranking: [7, 3, 1, 0, 15]}",
    "curly quotes": "{\u201cranking\u201d: [7, 3, 1, 0, 15]}",
    "comments": '{"ranking": [7, 3, // second\n 1, 0, 15]}',
    "Python": "{'ranking': [7, 3, 1, 0, 15], 'sure': True, 'why': None}",
    "upper case": '{"Ranking": [7, 3, 1, 0, 15]}',
    "numeric strings": '{"ranking": ["7", " 3 ", "1", "0", "15"]}',
    "floats": '{"ranking": [7.0, 3.0, 1, 0, 15.0]}',
    "float strings": '{"ranking": ["7.0", 3, 1, 0, 15]}',
    "labels": '{"ranking": ["Candidate 7", "hypothesis #3", "[1]", "Option: 0", "index 15"]}',
    "scores that say otherwise": '{"scores": [0.1, 0.2, 0.3, 0.4, 0.9], '
    '"ranking": [7, 3, 1, 0, 15], "confidence": {"0": 1}}',
    "LaTeX": '{"why": "as \\alpha_{i} \\to \\infty", "ranking": [7, 3, 1, 0, 15]}',
    "quotes in a text": '{"why": "the "best" one", "ranking": [7, 3, 1, 0, 15]}',
    "a brace in a text": '{"why": "a } brace", "ranking": [7, 3, 1, 0, 15]}',
    "half a brace in prose": f"f(x) = {{ x. {JSON}",
    "a line break in a text": '{"why": "one\ntwo", "ranking": [7, 3, 1, 0, 15]}',
    "a full permutation": '{"ranking": [7, 3, 1, 0, 15, 2, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14]}',
    "six": '{"ranking": [7, 3, 1, 0, 15, 7]}',
    "text after the fifth": '{"ranking": [7, 3, 1, 0, 15, "the rest are weak"]}',
    "a bare list": "[7, 3, 1, 0, 15]",
    "a bare list in a fence": "```json\n[7, 3, 1, 0, 15]\n```",
    "a chain": "[7] > [3] > [1] > [0] > [15]",
    "a chain in prose": "My order is [7] > [3] > [1] > [0] > [15] > [2].",
    "byte order mark and spaces": "\ufeff \n " + JSON + " \n",
}


@pytest.mark.parametrize("text", READABLE.values(), ids=READABLE)
def test_what_can_be_read_is_read(text):
    assert read_ranking(text, 16) == Reading(RANKING)


INVALID = {
    "nothing": ("", "empty"),
    "spaces": (" \n\t", "empty"),
    "prose": ("Candidates 7, 3, 1, 0 and 15 are the best.", "no ranking"),
    "a list in prose": ("See [7, 3, 1, 0, 15] above.", "no ranking"),
    "other JSON": ('{"order": [7, 3, 1, 0, 15]}', "no ranking"),
    "refusal": ("I'm sorry, but I can't rank these.", "refusal"),
    "other refusal": ("I cannot help with that.", "refusal"),
    "none": ('{"ranking": []}', "too few: 0 of 5"),
    "four": ('{"ranking": [7, 3, 1, 0]}', "too few: 4 of 5"),
    "short chain": ("[7] > [3] > [1]", "too few: 3 of 5"),
    "duplicate": ('{"ranking": [7, 3, 1, 7, 15]}', "duplicate: 7"),
    "the same as string": ('{"ranking": [7, 3, 1, "7", 15]}', "duplicate: 7"),
    "out of range": ('{"ranking": [7, 3, 0, 17, 15]}', "out of range: 17"),
    "negative": ('{"ranking": [-1, 3, 1, 0, 15]}', "out of range: -1"),
    "huge": ('{"ranking": [99999999999999999999, 3, 1, 0, 15]}', "out of range: 9999999999999999"),
    "counts from 1": ('{"ranking": [16, 3, 1, 2, 15]}', "counts from 1"),
    "permutation from 1": (
        json.dumps({"ranking": [*range(1, 17)]}),
        "counts from 1",
    ),
    "16 and 0": ('{"ranking": [16, 3, 0, 2, 15]}', "out of range: 16"),
    "true": ('{"ranking": ["3", 7, 1.0, "Candidate 12", true]}', "not a number: True"),
    "null": ('{"ranking": [7, 3, 1, null, 15]}', "not a number: None"),
    "half": ('{"ranking": [7.5, 3, 1, 0, 15]}', "not a number: 7.5"),
    "NaN": ('{"ranking": [NaN, 3, 1, 0, 15]}', "not a number: nan"),
    "infinite": ('{"ranking": [1e999, 3, 1, 0, 15]}', "not a number: inf"),
    "words": ('{"ranking": ["seven", "three", "one", "zero", "x"]}', "not a number: 'seven'"),
    "two numbers": ('{"ranking": ["7 or 3", 3, 1, 0, 15]}', "not a number: '7 or 3'"),
    "objects": ('{"ranking": [{"index": 7}, 3, 1, 0, 15]}', "not a number"),
    "placeholders": ('{"ranking": ["best", "second", "third", "fourth", "fifth"]}', "not a number"),
    "a number": ('{"ranking": 7}', "no ranking"),
    "a text": ('{"ranking": "7, 3, 1, 0, 15"}', "no ranking"),
    "no commas": ('{"ranking": [7 3 1 0 15]}', "no ranking"),
    "one comma missing": ('{"ranking": [7, 3, 2, 0, 1 5]}', "no ranking"),
    "list that does not end": ('{"ranking": [7, 3, 2, 0, 1}', "no ranking"),
    "cut within the list": ('{"ranking": [7, 3, 1, 0, 1', "cut off"),
    "cut after the list": ('{"ranking": [7, 3, 1, 0, 15]', "cut off"),
    "cut within the reasoning": ("<think> maybe [1, 2, 3, 4, 5", "cut off"),
    "cut within the reasoning, with an object": (f"<think> maybe {JSON}", "cut off"),
    "cut within the first channel": (f"<|channel|>analysis<|message|>{JSON}", "cut off"),
    "braces without end": ("{" * 3000 + '"ranking"', "cut off"),
    "deep": ('{"a":' * 1500 + JSON + "}" * 1500, "no ranking"),
}


@pytest.mark.parametrize(("text", "reason"), INVALID.values(), ids=INVALID)
def test_what_cannot_be_read_says_why(text, reason):
    reading = read_ranking(text, 16)
    assert reading.value is None
    assert reading.invalid is not None
    assert reading.invalid.startswith(reason)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply("", failure="HTTP 500: oops"), "no answer: HTTP 500: oops"),
        (Reply("", finish="length"), "empty: the token budget was spent"),
        (Reply("", finish="stop"), "empty"),
        (Reply("", finish="content_filter"), "content filter"),
        (Reply("", finish="refusal"), "refusal"),
        (Reply("I weigh them", finish="length"), "cut off: the token budget was spent"),
        (Reply("I weigh them", finish="max_tokens"), "cut off: the token budget was spent"),
        (Reply("<think>hm", finish="length"), "cut off: the token budget was spent"),
    ],
)
def test_what_the_api_says_is_the_reason(reply, reason):
    assert read_ranking(reply, 16) == Reading(None, reason)
    assert read_verdict(reply) == Reading(None, reason)


def test_a_long_reply_is_read_in_no_time():
    """Without an end mark, a search for one from every position would take minutes."""
    text = "I weigh them. " * 20_000
    assert read_ranking(text, 16).value is None
    assert read_ranking(text + JSON, 16).value == RANKING
    assert read_ranking(f"{text}</think>{text}</think>{JSON}", 16).value == RANKING


def test_a_complete_answer_counts_even_if_the_budget_ran_out_behind_it():
    assert read_ranking(Reply(JSON + " because", finish="length"), 16) == Reading(RANKING)


def test_a_reply_survives_pickling_whole():
    reply = pickle.loads(pickle.dumps(Reply("x", finish="stop", failure="f")))
    assert (reply, reply.finish, reply.failure) == ("x", "stop", "f")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"better": 1}', 0),
        ('{"better": 2}', 1),
        ('{"better": "2"}', 1),
        ('{"better": 2.0}', 1),
        ("{'better': 'Hypothesis 1',}", 0),
        ('```json\n{"better": 2}\n```', 1),
        ('<think>{"better": 1}</think>{"better": 2}', 1),
        ('{"better": 1} on reflection {"better": 2}', 1),
    ],
)
def test_verdicts(text, value):
    assert read_verdict(text) == Reading(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"better": 0}', "out of range: 0"),
        ('{"better": 3}', "out of range: 3"),
        ('{"better": true}', "not a number: True"),
        ('{"better": [1]}', "not a number: [1]"),
        ('{"better": null}', "not a number: None"),
        ('{"better": "both"}', "not a number: 'both'"),
        ("Hypothesis 1 is better.", "no verdict"),
        ("1", "no verdict"),
        ('{"better": ', "cut off"),
        ("I won't choose.", "refusal"),
    ],
)
def test_invalid_verdicts(text, reason):
    reading = read_verdict(text)
    assert reading.value is None
    assert reading.invalid.startswith(reason)


def test_the_filters_read_the_first_reply_to_each_request():
    doc = {"candidates": ["x"] * 16}
    assert get_filter("judge_ranking") is JudgeRanking
    assert get_filter("judge_verdict") is JudgeVerdict
    assert JudgeRanking().apply([[JSON, "x"], ["x"]], [doc, doc]) == [
        Reading(RANKING),
        Reading(None, "no ranking"),
    ]
    assert JudgeVerdict().apply([['{"better": 1}']], [doc]) == [Reading(0)]


# ---- any ranking, any wrapping

WRAPPINGS = [
    lambda r: json.dumps({"ranking": r}),
    lambda r: json.dumps({"ranking": r}, indent=2),
    lambda r: json.dumps({"ranking": [str(n) for n in r]}),
    lambda r: json.dumps({"ranking": [float(n) for n in r]}),
    lambda r: json.dumps({"ranking": [f"Candidate {n}" for n in r]}),
    lambda r: json.dumps({"reasoning": "{1, 2} \\ 'x'", "ranking": r}),
    lambda r: json.dumps({"ranking": r, "scores": [0, 1, 2, 3, 4]}),
    lambda r: json.dumps({"result": {"ranking": r}}),
    lambda r: str({"ranking": r}),
    lambda r: "{ranking: " + str(r) + "}",
    lambda r: '{"ranking": [' + ", ".join(map(str, r)) + ",],}",
    lambda r: '{"ranking": [' + ", ".join(map(str, r)) + "], // best first\n}",
    lambda r: f"```json\n{json.dumps({'ranking': r})}\n```",
    lambda r: f"~~~\n{json.dumps({'ranking': r})}\n~~~",
    lambda r: f"It's simple: {json.dumps({'ranking': r})} (of {{16}}).",
    lambda r: f'<think>{{"ranking": [4, 3, 2, 1, 0]}}</think>\n{json.dumps({"ranking": r})}',
    lambda r: f'... {{"ranking": [4, 3, 2, 1, 0]}} </think> {json.dumps({"ranking": r})}',
    lambda r: f'For example {{"ranking": [4, 3, 2, 1, 0]}}.\n{json.dumps({"ranking": r})}',
    lambda r: f'{json.dumps({"ranking": r})}\n<think>{{"ranking": [4, 3, 2, 1, 0]}}',
    lambda r: f'{json.dumps({"ranking": r})} {{"ranking": [1, 1, 1, 1, 1]}}',
    lambda r: " > ".join(f"[{n}]" for n in r),
    lambda r: json.dumps(r),
]

PERMUTATIONS = st.permutations(range(16))


@given(PERMUTATIONS, st.integers(5, 16), st.sampled_from(WRAPPINGS), PERMUTATIONS)
def test_every_wrapping_names_the_same_candidates(ranking, length, wrap, order):
    reading = read_ranking(wrap(ranking[:length]), 16)
    assert reading.invalid is None
    ids = [f"candidate_{index}" for index in order]
    assert [ids[n] for n in reading.value] == [f"candidate_{order[n]}" for n in ranking[:5]]


ENTRIES = st.one_of(
    st.integers(-3, 20),
    st.booleans(),
    st.none(),
    st.floats(-2, 20),
    st.sampled_from(["3", "x", "Candidate 7", "1.5", "", "16"]),
)


def _meant(entry):
    if isinstance(entry, bool) or entry is None:
        return None
    if isinstance(entry, str):
        return {"3": 3, "Candidate 7": 7, "16": 16}.get(entry)
    return int(entry) if entry == int(entry) else None


@given(st.lists(ENTRIES, max_size=8), st.sampled_from(WRAPPINGS[:2] + WRAPPINGS[12:15]))
def test_a_list_passes_only_as_it_is_meant(entries, wrap):
    reading = read_ranking(wrap(entries), 16)
    first = [_meant(entry) for entry in entries[:5]]
    fits = len(set(first)) == 5 and all(n is not None and 0 <= n < 16 for n in first)
    known = [n for n in map(_meant, entries) if n is not None]
    from_one = 16 in known and min(known) > 0
    assert (reading.value is not None) == (fits and not from_one)
    if reading.value is not None:
        assert reading.value == first


PIECES = st.sampled_from(
    ['{"ranking": [', "]}", "}", "{", '"', "'", "7", " 3", ",", "[", "<think>", "</think>", "\\",
     "```", "ranking", ":", "-", ".", "\n", "1 ", "true", "16", "//", "x", "better", "null"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=40).map("".join))
def test_whatever_comes_ends_in_a_ranking_that_fits_or_a_reason(text):
    reading = read_ranking(text, 16)
    assert (reading.value is None) != (reading.invalid is None)
    if reading.value is not None:
        assert len(set(reading.value)) == len(reading.value) == 5
        assert set(reading.value) <= set(range(16))
    verdict = read_verdict(text)
    assert (verdict.value is None) != (verdict.invalid is None)
    assert verdict.value in (None, 0, 1)
