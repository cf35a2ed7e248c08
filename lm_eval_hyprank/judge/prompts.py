"""What a judge reads: papers as documents, and documents through a Jinja template as prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import jinja2
import jinja2.meta

from lm_eval_hyprank.datasets.documents import FEATURES
from lm_eval_hyprank.datasets.findings import DatasetError
from lm_eval_hyprank.datasets.researchbench import labelled_candidates
from lm_eval_hyprank.datasets.texts import single_braces
from lm_eval_hyprank.datasets.validation import Paper
from lm_eval_hyprank.judge.orders import balanced_orders, one_order

PACKAGE_TEMPLATES = ("listwise", "pairwise")

VARIABLES = ("background", "question", "candidates")
"""What a template is given; ``background`` is none where it is to be left out."""

_FEATURES = datasets.Features(
    {
        **{name: FEATURES[name] for name in ("paper_id", "discipline", "doi", "title")},
        "background": datasets.Value("string"),
        "question": datasets.Value("string"),
        **{name: FEATURES[name] for name in ("candidates", "candidate_ids", "gold")},
        "order": datasets.Value("string"),
        "orders": datasets.Sequence(datasets.Sequence(datasets.Value("int64"))),
        "template": datasets.Value("string"),
    }
)


def listwise(
    papers: Sequence[Paper],
    *,
    template: str | None,
    background: bool,
    order: str,
    order_seed: int,
) -> datasets.DatasetDict:
    """Makes documents of one prompt each, the candidates in the order shown.

    Args:
        papers: The papers.
        template: Path of a Jinja file, or the name of one of the package; None takes "listwise".
        background: Whether the prompt has the paper's background.
        order: "seed", "gold_first" or "gold_last".
        order_seed: The seed of the order.

    Returns:
        The split "test". ``candidates``, ``candidate_ids`` and ``gold`` follow the order shown,
        which ``order`` names.

    Raises:
        DatasetError: An argument is none of the possible ones, or the template is unusable.
    """
    name = find_template(template or "listwise", background)
    documents = []
    for paper in papers:
        labelled = list(labelled_candidates(paper).items())
        shown = one_order(paper.sample_id, len(labelled), order, _seed(order_seed))
        document = _document(paper, [labelled[index] for index in shown], background, name)
        documents.append(document | {"order": f"{order}:{order_seed}"})
    return _split(documents)


def several_orders(
    papers: Sequence[Paper],
    *,
    template: str | None,
    background: bool,
    num_orders: int,
    order_seed: int,
) -> datasets.DatasetDict:
    """Makes documents of ``num_orders`` prompts each, all candidates in another order.

    ``orders`` holds, for each prompt, the indices of the candidates as they are shown; the other
    fields are as of `listwise`, the gold always at index 0.
    """
    name = find_template(template or "listwise", background)
    documents = []
    for paper in papers:
        labelled = list(labelled_candidates(paper).items())
        orders = balanced_orders(paper.sample_id, len(labelled), num_orders, _seed(order_seed))
        document = _document(paper, labelled, background, name)
        documents.append(document | {"order": f"balanced:{order_seed}", "orders": orders})
    return _split(documents)


def pairwise(
    papers: Sequence[Paper], *, template: str | None, background: bool
) -> datasets.DatasetDict:
    """Makes documents of two prompts a negative: the gold shown first, then shown second.

    ``orders`` holds the pairs, ``[0, j]`` and ``[j, 0]`` for each negative ``j`` in turn.
    """
    name = find_template(template or "pairwise", background)
    documents = []
    for paper in papers:
        labelled = list(labelled_candidates(paper).items())
        pairs = [pair for j in range(1, len(labelled)) for pair in ([0, j], [j, 0])]
        document = _document(paper, labelled, background, name)
        documents.append(document | {"order": "both", "orders": pairs})
    return _split(documents)


def views(doc: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the document once for each of its orders, the candidates as they are shown."""
    return [
        {
            **doc,
            "candidates": [doc["candidates"][index] for index in shown],
            "candidate_ids": [doc["candidate_ids"][index] for index in shown],
            "gold": list(shown).index(doc["gold"]),
        }
        for shown in doc["orders"]
    ]


def render(doc: Mapping[str, Any]) -> str:
    """Returns the prompt that shows the document's candidates as they stand in it."""
    text = _template(doc["template"]).render({name: doc[name] for name in VARIABLES})
    return text.strip()


def find_template(name: str, background: bool) -> str:
    """Checks that a template shows all it has to show.

    Args:
        name: The name of a template of the package, or the path of a file.
        background: Whether the background has to be in it.

    Returns:
        The package's name, which is the same on every machine, or the file's absolute path.

    Raises:
        DatasetError: The file cannot be read, is no Jinja template, or shows less or other
            fields than it should.
    """
    path = _file(name)
    try:
        source = path.read_text(encoding="utf-8")
        used = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(source))
    except OSError as error:
        raise DatasetError(f"template: {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError:
        raise DatasetError(f"template: {path} is not UTF-8; save it as UTF-8") from None
    except jinja2.TemplateSyntaxError as error:
        raise DatasetError(f"template: {path}:{error.lineno}: {error.message}") from error
    if single := single_braces(source, VARIABLES):
        field, written = single
        raise DatasetError(
            f"template: {path} has {written!r}, which stays as it is; write {{{{ {field} }}}}"
        )
    needed = VARIABLES if background else VARIABLES[1:]
    faults = [f"does not show {name}" for name in needed if name not in used]
    faults += [f"asks for {name}" for name in sorted(used.difference(VARIABLES))]
    if faults:
        raise DatasetError(
            f"template: {path} {' and '.join(faults)}; a template is given "
            f"{', '.join(VARIABLES)} (the last a list) and has to use them all, save that "
            """`--metadata '{"background": false}'` makes do without the first"""
        )
    return name if name in PACKAGE_TEMPLATES else str(path)


def _file(name: str) -> Path:
    if name in PACKAGE_TEMPLATES:
        return Path(__file__).parent / "templates" / f"{name}.jinja"
    return Path(name).expanduser().resolve()


@lru_cache(maxsize=16)
def _template(name: str) -> jinja2.Template:
    # Plain text, not HTML; the values are data, in which nothing is rendered.
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_file(name).read_text(encoding="utf-8"))


def _document(
    paper: Paper, labelled: Sequence[tuple[str, str]], background: bool, template: str
) -> dict[str, Any]:
    labels = [label for label, _ in labelled]
    return {
        "paper_id": paper.sample_id,
        "discipline": paper.discipline,
        "doi": paper.doi,
        "title": paper.title,
        "background": paper.survey if background else None,
        "question": paper.question,
        "candidates": [text for _, text in labelled],
        "candidate_ids": labels,
        "gold": labels.index("gold"),
        "order": "",
        "orders": [],
        "template": template,
    }


def _split(documents: list[dict[str, Any]]) -> datasets.DatasetDict:
    split = datasets.Dataset.from_list(documents, features=_FEATURES)
    return datasets.DatasetDict({"test": split})


def _seed(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise DatasetError(f"order_seed is {value!r}; use a whole number")
