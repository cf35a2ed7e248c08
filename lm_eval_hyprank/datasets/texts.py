"""Texts of any data as the model shall see them, and what makes one unusable."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from pydantic_core import PydanticCustomError

# What the spreadsheet format leaves in place of a carriage return.
_CARRIAGE_RETURN = re.compile(r"_x000D_(?:\r?\n)?|\r\n?")


def clean(text: str) -> str:
    r"""Returns the text as the model shall see it.

    Line breaks become ``\n``: CRLF, CR and ``_x000D_``, the artefact that spreadsheets leave for
    a carriage return. Surrounding whitespace goes. Nothing else is changed.
    """
    return _CARRIAGE_RETURN.sub("\n", text).strip()


def printable(text: str) -> str:
    """Returns the text on one line, control characters and lone surrogates written as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def folded(text: str) -> str:
    """Returns what is compared of a text: all but its whitespace's kind and amount."""
    return " ".join(text.split())


def repeated_texts(texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Finds texts that read like an earlier one.

    Args:
        texts: Places and their texts, clean; blank ones are no matter of this check.

    Yields:
        The place of each, and the problem.
    """
    first_places: dict[str, str] = {}
    for place, text in texts:
        first = first_places.setdefault(folded(text), place)
        if folded(text) and first != place:
            yield place, f"is the same text as {first} (whitespace aside)"


def filled_text(value: str) -> str:
    """Returns a text that must not be empty, clean.

    Raises:
        PydanticCustomError: The text cannot be used; its type is a key of `REMEDIES`.
    """
    if not (cleaned := optional_text(value)):
        raise PydanticCustomError("blank", "is empty")
    return cleaned


def optional_text(value: str | None) -> str:
    """Returns a text that may be empty, clean; raises as `filled_text` does."""
    value = value or ""
    if "\0" in value:
        raise PydanticCustomError("nul", "holds a NUL character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise PydanticCustomError("surrogate", "holds half of a surrogate pair") from None
    return clean(value)


def single_braces(text: str, names: Iterable[str]) -> tuple[str, str] | None:
    """Finds a name in single braces: what other template languages fill in, and Jinja does not.

    Returns:
        The name and how it is written, None where no name is.
    """
    for name in names:
        if found := re.search(rf"(?<!\{{)\{{\s*{re.escape(name)}\s*\}}(?!\}})", text):
            return name, found[0]
    return None
