"""Prompts of any data: a Jinja template over the columns of a row."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox

from lm_eval_hyprank.datasets.findings import DatasetError
from lm_eval_hyprank.datasets.texts import clean, single_braces

_logger = logging.getLogger(__name__)


class Prompt:
    """A Jinja template over the columns of a row.

    Args:
        text: The template.
        columns: The names of the columns.
        hidden: Those of them that it must not see, for they belong to one candidate of an item.

    Raises:
        DatasetError: The template is none, or names what is no column or hidden.

    Attributes:
        columns: The columns that it may look at.
    """

    def __init__(self, text: str, columns: Sequence[str], hidden: Set[str] = frozenset()) -> None:
        if not isinstance(text, str):
            raise DatasetError(f"prompt is {text!r}, not text")
        environment = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined)
        try:
            tree = environment.parse(text)
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise DatasetError(f"prompt: line {error.lineno}: {error.message}") from None
        used = jinja2.meta.find_undeclared_variables(tree)
        named = jinja2.nodes.Name
        by_key, anywhere = {}, False
        if "row" in used and "row" not in columns:  # not a name of the template's own
            keys = ((node, _key(node)) for node in tree.find_all(_LOOKUPS))
            by_key = {node: key for node, key in keys if key is not None}
            # It may also stand for whatever is in it, as in `row.items()`.
            anywhere = sum(name.name == "row" for name in tree.find_all(named)) > len(by_key)
            used = used - {"row"} | {*by_key.values()}
        unknown = used - set(columns)
        if unknown:
            raise DatasetError(
                f"prompt has {{{{ {written(min(unknown))} }}}}, which is no column; "
                f"the columns are: {', '.join(columns)}"
            )
        if used & hidden:
            raise DatasetError(
                f"prompt has the column {min(used & hidden)}, which differs among the candidates "
                "of an item; a prompt stands before all of them"
            )
        # A single pair of braces would reach the model as it stands, alike for all items.
        if found := single_braces(text, columns):
            raise DatasetError(
                f"prompt has {{{found[0]}}}; a column is written in two pairs of braces: "
                f"{{{{ {found[0]} }}}}"
            )
        if not (used or anywhere):
            _logger.warning("the prompt names no column: it is the same for all items")
        asked = {
            by_key.get(node) or getattr(node, "name", None)
            for part in _asked(tree)
            for node in (part, *part.find_all((named, *_LOOKUPS)))
            if isinstance(node, (named, *_LOOKUPS))
        }
        self._needed = sorted(used - asked)
        self._hidden = hidden
        self.columns = set(columns) - hidden if anywhere else used

    def render(self, row: Mapping[str, Any], problems: list[tuple[str, str, str]]) -> str:
        """Returns the prompt of an item.

        Args:
            row: The item's columns.
            problems: What is wrong with the item, as field, problem and remedy; what keeps the
                prompt from being made is added.

        Returns:
            The prompt, "" where there is a problem.
        """
        values = {name: _clean(value) for name, value in row.items() if name not in self._hidden}
        for name in self._needed:
            if values.get(name) in (None, "", []):
                asks = f"{{% if {written(name)} %}}...{{% endif %}}"
                remedy = f"Fill it in, or write {asks} in the prompt"
                problems.append((name, "is empty, and the prompt needs it", remedy))
        if problems:
            return ""
        try:
            context = self._template.render({"row": values, **values})
            context.encode("utf-8")
        except (jinja2.TemplateError, TypeError, UnicodeEncodeError) as error:
            problem = f"cannot be filled in ({error})"
            problems.append(("prompt", problem, "Correct the prompt or the row"))
            return ""
        return context


_LOOKUPS = (jinja2.nodes.Getitem, jinja2.nodes.Getattr)


def written(column: str) -> str:
    """A column as a prompt names it."""
    return column if column.isidentifier() else f"row[{json.dumps(column)}]"


def _asked(tree: jinja2.nodes.Template) -> Iterator[jinja2.nodes.Node]:
    """What a template asks for, and so has something to say without."""
    nodes = jinja2.nodes
    for branch in tree.find_all(nodes.If):
        yield branch.test
    for either in tree.find_all(nodes.CondExpr):
        yield either.test
    for choice in tree.find_all(nodes.Or):
        yield choice.left
    for one in tree.find_all(nodes.Filter):
        if one.name in ("default", "d") and one.node is not None:
            yield one.node


def _key(node: jinja2.nodes.Node) -> str | None:
    """The column that ``row["column"]`` or ``row.column`` names, None of anything else."""
    of = getattr(node, "node", None)
    if not (isinstance(of, jinja2.nodes.Name) and of.name == "row"):
        return None
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr if node.attr not in dir(dict) else None
    key = getattr(getattr(node, "arg", None), "value", None)  # of a constant
    return key if isinstance(key, str) else None


def _clean(value: Any) -> Any:
    """Returns a column's value with all its texts as the model shall see them."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_clean(one) for one in value]
    if isinstance(value, dict):
        return {name: _clean(one) for name, one in value.items()}
    return value
