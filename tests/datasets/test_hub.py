from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, NoReturn

import datasets
import pytest
from datasets.packaged_modules.json.json import Json
from huggingface_hub import constants, errors

from lm_eval_hyprank.datasets import hub, rows
from lm_eval_hyprank.datasets.findings import DatasetError
from lm_eval_hyprank.datasets.researchbench import load
from lm_eval_hyprank.datasets.validation import PAPERS_FILE, RANKING_FILE
from tests.datasets.test_researchbench import python

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PAGE = "https://huggingface.co/datasets/ankilok/ResearchBench"
REMEDIES = (PAGE, "hf auth login", "HF_TOKEN", """--metadata '{"dataset_path": "DIR"}'""")
OWN_REMEDIES = ("https://huggingface.co/datasets/me/one", "hf auth login", "its path as `data`")

# Any use of the network fails at once, as on a machine without one.
NO_NETWORK = """
import socket
def refuse(*args, **kwargs):
    raise OSError(101, "Network is unreachable")
socket.getaddrinfo = refuse
socket.socket.connect = refuse
"""


@pytest.fixture(autouse=True)
def _forget_the_hub() -> Iterator[None]:
    hub._snapshot.cache_clear()
    yield
    hub._snapshot.cache_clear()


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and a hub that is not there."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # whatever the user has set
    monkeypatch.setattr(hub, "get_hf_file_metadata", raising(OSError("no route")))
    return cache


@pytest.fixture
def cached_snapshot(hub_cache: Path, valid_folder: Path) -> Path:
    return fill_cache(hub_cache, valid_folder)


def fill_cache(cache: Path, folder: Path) -> Path:
    """Puts the folder into a hub cache as the main branch; returns the snapshot."""
    repository = cache / "datasets--ankilok--ResearchBench"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    return snapshot


def raising(error: Exception) -> Callable[..., NoReturn]:
    def raise_it(*args: object, **kwargs: object) -> NoReturn:
        raise error

    return raise_it


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    # A real response's class depends on the version of huggingface_hub.
    error = kind.__new__(kind)
    Exception.__init__(error, f"{status} from the hub")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[assignment]
    return error


HUB_ERRORS = {
    "gated": (http_error(errors.GatedRepoError, 403), "it is gated"),
    "not logged in": (http_error(errors.RepositoryNotFoundError, 401), "you are not logged in"),
    "bad token": (http_error(errors.HfHubHTTPError, 401), "the token is invalid"),
    "no revision": (http_error(errors.RevisionNotFoundError, 404), "no revision 'v9'"),
    "no entry": (http_error(errors.RemoteEntryNotFoundError, 404), "revision 'v9' lacks ranking/"),
    "hub down": (http_error(errors.HfHubHTTPError, 503), "could not be reached (HfHubHTTPError"),
    "no network": (ConnectionError("refused"), "could not be reached (ConnectionError: refused)"),
    "offline": (errors.OfflineModeIsEnabled("offline"), "offline mode is on"),
}


@pytest.mark.parametrize("name", HUB_ERRORS)
@pytest.mark.parametrize("asked", ["get_hf_file_metadata", "hf_hub_download"])
def test_hub_error(name: str, asked: str, hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error, reason = HUB_ERRORS[name]
    # Both places where the hub may refuse: the first question, and the download itself.
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda *args, **kwargs: None)
    monkeypatch.setattr(hub, asked, raising(error))
    with pytest.raises(DatasetError) as caught:
        load(dataset_revision="v9")
    assert caught.value.__cause__ is error
    assert reason in str(caught.value)
    for remedy in REMEDIES:
        assert remedy in str(caught.value)


def test_connection_lost_after_the_first_answer(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda *args, **kwargs: None)
    error = errors.LocalEntryNotFoundError("no connection and no copy")
    monkeypatch.setattr(hub, "hf_hub_download", raising(error))
    with pytest.raises(DatasetError, match=r"could not be reached \(LocalEntryNotFoundError"):
        load()


def test_hub_that_never_answers(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = Event()
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda *a, **k: never.wait())
    start = time.monotonic()
    with pytest.raises(DatasetError, match=r"no answer within 0\.01 s"):
        load()
    assert time.monotonic() - start < 2
    never.set()


def test_download_takes_both_files_from_one_commit(
    hub_cache: Path, valid_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = fill_cache(hub_cache, valid_folder)
    asked = []

    def download(repository: str, file: str, **arguments: Any) -> str:
        asked.append((repository, file, arguments))
        return str(snapshot / file)

    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda *args, **kwargs: None)
    monkeypatch.setattr(hub, "hf_hub_download", download)
    for discipline in (None, "Law"):
        load(dataset_revision="v1", discipline=discipline)
    common = {"repo_type": "dataset", "local_files_only": False}
    assert asked == [
        ("ankilok/ResearchBench", RANKING_FILE, {"revision": "v1", **common}),
        ("ankilok/ResearchBench", PAPERS_FILE, {"revision": COMMIT, **common}),
    ]


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_cached_copy_where_the_hub_is_not_there(
    revision: str | None, cached_snapshot: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(load(dataset_revision=revision)["test"]) == 12
    assert "no route" in caplog.text
    assert str(cached_snapshot) in caplog.text


def test_cached_copy_lacks_a_file(cached_snapshot: Path) -> None:
    (cached_snapshot / PAPERS_FILE).unlink()
    with pytest.raises(DatasetError, match=r"could not be reached \(OSError: no route"):
        load()


LOAD_TIMED = """
import time
from lm_eval_hyprank.datasets.researchbench import load
start = time.monotonic()
try:
    print(len(load({path!r})["test"]))
except ValueError as error:
    print(type(error).__name__, error)
print(time.monotonic() - start)
"""


@pytest.mark.parametrize("switch", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", None])
def test_no_network(switch: str | None, tmp_path: Path, valid_folder: Path) -> None:
    environment = {"HF_HOME": str(tmp_path / "home")} | ({switch: "1"} if switch else {})
    failed = python(NO_NETWORK + LOAD_TIMED.format(path=None), **environment)
    *message, seconds = failed.stdout.splitlines()
    assert message[0].startswith("DatasetError"), failed.stderr
    for remedy in REMEDIES:
        assert remedy in "\n".join(message)
    assert float(seconds) < 10
    reason = "offline mode is on" if switch else "the hub could not be reached"
    assert reason in message[0]

    local = python(NO_NETWORK + LOAD_TIMED.format(path=str(valid_folder)), **environment)
    assert local.stdout.splitlines()[0] == "12", local.stderr

    fill_cache(tmp_path / "home" / "hub", valid_folder)
    cached = python(NO_NETWORK + LOAD_TIMED.format(path=None), **environment)
    assert cached.stdout.splitlines()[0] == "12", cached.stderr


# --- data of one's own ----------------------------------------------------------------------


def refused(revision: str | None = None) -> str:
    with pytest.raises(DatasetError) as caught:
        rows.read("me/one", revision=revision)
    for remedy in OWN_REMEDIES:
        assert remedy in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(HUB_ERRORS.keys() - {"no entry", "offline"}))
def test_a_hub_that_does_not_answer_is_not_asked_for_data(
    name: str, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, reason = HUB_ERRORS[name]
    monkeypatch.setattr(hub, "get_hf_file_metadata", raising(error))
    monkeypatch.setattr(datasets, "load_dataset", raising(AssertionError("asked")))
    message = refused("v9")
    assert reason in message
    assert "HF_HUB_OFFLINE=1" in message


def test_a_hub_that_never_answers_is_not_waited_for(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = Event()
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda *a, **k: never.wait())
    start = time.monotonic()
    assert "no answer within 0.01 s" in refused()
    assert time.monotonic() - start < 2
    never.set()


@pytest.mark.parametrize("name", ["no entry", "offline"])
def test_without_a_readme_or_a_network_the_data_may_be_there(
    name: str, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "get_hf_file_metadata", raising(HUB_ERRORS[name][0]))
    asked = []

    def load_dataset(*names: str, **options: str) -> dict[str, datasets.Dataset]:
        asked.append((names, options))
        return {"test": datasets.Dataset.from_list([{"a": "1"}])}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert rows.read("me/one", subset="s", revision="r").rows[0].values == {"a": "1"}
    assert asked == [(("me/one", "s"), {"revision": "r"})]


def test_a_failure_after_the_answer_names_its_error(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda *a, **k: None)
    monkeypatch.setattr(datasets, "load_dataset", raising(ValueError("Config name is missing")))
    assert "ValueError: Config name is missing" in refused()


def test_the_revision_of_own_data_is_text_too() -> None:
    with pytest.raises(DatasetError, match=r"dataset_revision is 120000\.0, not text"):
        rows.read("me/one", revision=12e4)  # type: ignore[arg-type]


READ_TIMED = """
import time
from lm_eval_hyprank.datasets import rows
start = time.monotonic()
try:
    print(rows.read("me/one").rows[0].values)
except ValueError as error:
    print(type(error).__name__, error)
print(time.monotonic() - start)
"""


def test_own_data_without_a_network(tmp_path: Path) -> None:
    failed = python(NO_NETWORK + READ_TIMED, HF_HOME=str(tmp_path))
    *message, seconds = failed.stdout.splitlines()
    assert message[0].startswith("DatasetError The data set me/one cannot be"), failed.stderr
    for remedy in OWN_REMEDIES:
        assert remedy in "\n".join(message)
    assert float(seconds) < 10


def test_offline_mode_reads_the_copy_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the message advises."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": "1"}\n', encoding="utf-8")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    builder = Json(dataset_name="one", hash="c0ffee", data_files=str(file))
    builder.download_and_prepare()
    # What the hub gave lies below its owner's name, in a folder of its configuration.
    lies = tmp_path / "cache" / "me___one" / "default"
    lies.parent.mkdir()
    Path(builder.cache_dir).parents[1].rename(lies)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert rows.read("me/one").rows[0].values == {"a": "1"}
