"""Where the package's YAML task files lie."""

from __future__ import annotations

from pathlib import Path


def installed() -> Path:
    """Where the wheel places the task files, whether they are there or not."""
    import lm_eval

    return Path(str(lm_eval.__file__)).parent / "tasks" / "hyprank"


def folder() -> Path:
    """The installed task files, or the source tree's where lm-eval lies elsewhere."""
    import lm_eval_hyprank

    place = installed()
    return place if place.is_dir() else Path(lm_eval_hyprank.__path__[0]).parent / "task_configs"
