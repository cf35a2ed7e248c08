"""Tasks with several prompts a paper, which lm-eval's own class has no room for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from lm_eval_hyprank.judge.prompts import views


class SeveralPrompts(ConfigurableTask):
    """A task that asks once for each of a document's ``orders`` and scores the replies together.

    Metrics and their standard errors are then of papers, as they should be: the replies on one
    paper are no independent observations.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        # lm-eval hands over the YAML's `class` too, which its own class does not take.
        super().__init__(config={key: config[key] for key in config if key != "class"})

    def fewshot_context(self, doc: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Returns the contexts of all orders."""
        context = super().fewshot_context
        return [context(view, *args, **kwargs) for view in views(doc)]

    def construct_requests(self, doc: dict[str, Any], ctx: Any, **kwargs: Any) -> list[Instance]:
        """Makes one request of each context."""
        requests = []
        for index, context in enumerate(ctx):
            request = super().construct_requests(doc, context, **kwargs)
            request.idx = index
            requests.append(request)
        return requests
