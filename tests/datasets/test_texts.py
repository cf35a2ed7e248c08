from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_hyprank.datasets.texts import clean, printable, single_braces


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a\r\nb\rc\nd", "a\nb\nc\nd"),
        ("a_x000D_\nb", "a\nb"),
        ("a_x000D_\r\nb", "a\nb"),
        ("a_x000D_b", "a\nb"),
        ("a_x000D__x000D_\nb", "a\n\nb"),
        ("  \t\na  b\n ", "a  b"),
        ("_x000A_ {x} {{ y }} <b> $\\alpha$", "_x000A_ {x} {{ y }} <b> $\\alpha$"),
    ],
)
def test_clean(raw: str, expected: str) -> None:
    assert clean(raw) == expected


@given(st.text(st.sampled_from("a_x0D\r\n \u03b1")))
def test_clean_is_final_and_leaves_all_else(text: str) -> None:
    cleaned = clean(text)
    assert clean(cleaned) == cleaned
    assert "\r" not in cleaned
    assert "_x000D_" not in cleaned
    if "\r" not in text and "_x000D_" not in text:
        assert cleaned == text.strip()


@given(st.text(st.characters()))
def test_printable_is_one_line_that_can_be_encoded(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    shown.encode("utf-8")
    if text.isprintable():
        assert shown == text


def test_printable_escapes() -> None:
    assert printable("a\n\0\ud800\u03b1") == r"a\n\x00\ud800" + "\u03b1"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{q}", ("q", "{q}")),
        ("a { my col } {{ q }}", ("my col", "{ my col }")),
        ("{b+c} {q}", ("q", "{q}")),
        ("{{ q }} {{q}} {other} {{{ q }}} q", None),
        ("{bxc} {}", None),
    ],
)
def test_a_name_in_single_braces_is_found(text: str, found: tuple[str, str] | None) -> None:
    assert single_braces(text, ["q", "my col", "b+c"]) == found
    assert single_braces(text, []) is None
