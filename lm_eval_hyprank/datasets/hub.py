"""Data sets of the Hugging Face hub: within bounded time, or with a message that helps."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from threading import Thread

import datasets
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from lm_eval_hyprank.datasets.findings import DatasetError
from lm_eval_hyprank.datasets.texts import printable

_logger = logging.getLogger(__name__)

# How long the hub may take to answer before the copy in the cache is looked for. A dead network
# must show within ten seconds, and imports take their share of them.
ANSWER_SECONDS = 6.0


def snapshot(repository: str, files: tuple[str, ...], revision: str | None, local: str) -> Path:
    """Returns the folder of a data set's files, from the cache where the hub does not answer.

    Args:
        repository: The data set, ``owner/name``.
        files: The files of it.
        revision: The hub's branch, tag or commit; its main branch by default.
        local: How to use a copy on this machine, for the message.

    Raises:
        DatasetError: The hub does not give the files and no copy is cached. The message says what
            to do.
    """
    _check(revision)
    return _snapshot(repository, files, revision, local)


def load(repository: str, subset: str | None, revision: str | None) -> datasets.DatasetDict:
    """Loads a data set as `datasets.load_dataset` does, which tries a dead network for long.

    Args:
        repository: The data set, ``owner/name``.
        subset: The hub's subset (configuration).
        revision: The hub's branch, tag or commit.

    Raises:
        DatasetError: The hub does not give it. The message says what to do.
    """
    _check(revision)
    remedies = (
        "Check the name, and name the subset (`subset`) if it has several.",
        "Or download a file of it and give its path as `data`.",
    )
    try:
        _ask(repository, "README.md", revision)
    except (OfflineModeIsEnabled, RemoteEntryNotFoundError):
        pass  # the cache is read; and no data set needs this file
    except Exception as error:  # whatever the network libraries raise
        # Nothing but offline mode makes `load_dataset` read its cache without asking the hub.
        cached = "Set HF_HUB_OFFLINE=1 to use the copy of an earlier run, if there is one."
        reason = _reason(error, ("README.md",), revision)
        raise DatasetError(_message(repository, reason, *remedies, cached)) from error
    try:
        return datasets.load_dataset(repository, subset, revision=revision)
    except Exception as error:
        reason = f"{type(error).__name__}: {printable(str(error))}"
        raise DatasetError(_message(repository, reason, *remedies)) from error


def _check(revision: object) -> None:
    if not isinstance(revision, str | None):
        # key=value metadata turns what looks like a number into one.
        raise DatasetError(
            f"dataset_revision is {revision!r}, not text; give it as JSON: "
            """--metadata '{"dataset_revision": "REVISION"}'"""
        )


@lru_cache(maxsize=8)
def _snapshot(repository: str, files: tuple[str, ...], revision: str | None, local: str) -> Path:
    try:
        _ask(repository, files[0], revision)
        problem = None
    except Exception as error:  # whatever the network libraries raise
        problem = error
    try:
        folder = _download(repository, files, revision, local_files_only=problem is not None)
    except Exception as error:
        if problem is None or not isinstance(error, LocalEntryNotFoundError):
            problem = error
        reason = _reason(problem, files, revision)
        raise DatasetError(_message(repository, reason, local)) from problem
    if problem is not None and not isinstance(problem, OfflineModeIsEnabled):
        _logger.warning("The hub gives no data (%s); the cached copy %s is used", problem, folder)
    return folder


def _ask(repository: str, file: str, revision: str | None) -> None:
    """Asks the hub for a file once, without retries; raises what stands in the way.

    `hf_hub_download` alone would retry a dead network for minutes where nothing is cached, and
    no timeout of it covers name resolution or a host with several unreachable addresses: hence
    the thread.
    """
    if datasets.config.HF_HUB_OFFLINE:  # also set by HF_DATASETS_OFFLINE
        raise OfflineModeIsEnabled("offline mode is on")
    url = hf_hub_url(repository, file, repo_type="dataset", revision=revision)
    answers: list[Exception | None] = []

    def ask() -> None:
        try:
            get_hf_file_metadata(url, timeout=ANSWER_SECONDS)
        except Exception as error:
            answers.append(error)
        else:
            answers.append(None)

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    answer = answers[0] if answers else TimeoutError(f"no answer within {ANSWER_SECONDS:g} s")
    if answer is not None:
        raise answer


def _download(
    repository: str, files: tuple[str, ...], revision: str | None, local_files_only: bool
) -> Path:
    """Returns the snapshot folder with the files in it, all of one and the same commit."""
    first, *others = files
    path = hf_hub_download(
        repository,
        first,
        repo_type="dataset",
        revision=revision,
        local_files_only=local_files_only,
    )
    folder = Path(path).parents[first.count("/")]
    for file in others:
        hf_hub_download(
            repository,
            file,
            repo_type="dataset",
            revision=folder.name,  # the commit: the branch may have moved since
            local_files_only=local_files_only,
        )
    return folder


def _reason(error: Exception, files: tuple[str, ...], revision: str | None) -> str:
    """Returns what happened on the hub."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, GatedRepoError):
        return "it is gated, and you have not been granted access or are not logged in"
    if isinstance(error, RevisionNotFoundError):
        return f"it has no revision {revision!r} (dataset_revision)"
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        return (
            "the hub does not show it to you: there is none of this name, you are not logged in, "
            "or the token is invalid"
        )
    if isinstance(error, OfflineModeIsEnabled):
        return (
            "offline mode is on (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE) and "
            f"{constants.HF_HUB_CACHE} holds no copy of it"
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return f"its revision {revision or 'main'!r} lacks {' or '.join(files)}"
    return f"the hub could not be reached ({type(error).__name__}: {error})"


def _message(repository: str, reason: str, *remedies: str) -> str:
    page = f"https://huggingface.co/datasets/{repository}"
    return "\n".join(
        [
            f"The data set {repository} cannot be loaded from the Hugging Face hub: {reason}.",
            "What helps:",
            f"  - Request access on {page}, if it is gated (once, with a hub account).",
            "  - Log in with `hf auth login`, or set HF_TOKEN to your access token.",
            *(f"  - {remedy}" for remedy in remedies),
        ]
    )
