"""What a member behind a server says of servers that are odd, and what it asks of them."""

from __future__ import annotations

import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.members.endpoint.serving import STUB, Stub, serving
from tests.project import Project
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("warm")
TEXTS = {"winner_a": "plants", "winner_b": "food", "tie": "animal"}
KEY = "sk-a-very-secret-key"


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    """The toy, which tells no tokens."""
    with serving(tmp_path_factory.mktemp("a toy")) as server:
        yield server


def member(stub: Stub | None = None, **keys: Any) -> dict[str, Any]:
    where = {} if stub is None else {"url": stub.url}
    own = {"model": "tiny", "prompt_template": "{{ text }}", "label_tokens": TEXTS, "top_logprobs": 5}
    return {"name": "asked", "task_type": "endpoint", **where, **own, **keys}


def run(project: Project, *models: Mapping[str, Any], rows: int = 40, **changes: Any) -> Any:
    if not project.ids:
        project.write_table(rows)
    project.write_config(project.config(models=[*models], defaults=None, **changes))
    done = project.ensemble(
        "run", "config.yaml", environment={"MY_KEY": KEY, **changes.pop("environment", {})}
    )
    return done.returncode, re.sub(r" \(line \d+\)", "", " ".join((done.stdout + done.stderr).split()))


def expected(text: str) -> np.ndarray:
    letters = sum(map(ord, text[:40]))
    scores = np.exp([letters % 7, letters % 11, letters % 5])
    return np.asarray(scores / scores.sum())


def date_in(seconds: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize(
    "behaviour",
    [
        {"status": 429, "headers": {"Retry-After": "0.1"}, "times": 9},
        {"status": 429, "headers": {"Retry-After": date_in(1)}, "times": 3},
        {"status": 500, "times": 3},
        {"status": 503, "html": "<html>Bad gateway</html>", "times": 3},
        {"sleep": 3, "times": 2},
    ],
    ids=["429", "429 until a date", "500", "503 with a page", "time-outs"],
)
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_errors_that_pass_cost_no_row(
    api: str, behaviour: dict[str, Any], stub: Stub, project: Project
) -> None:
    stub.behave(**behaviour, path="/v1/c")
    code, printed = run(project, member(stub, api=api, timeout="2s" if "sleep" in behaviour else "2m"))
    assert code == 0, printed
    values = project.values("runs/first/predictions/asked.csv")
    np.testing.assert_allclose(values, [expected(text) for text in project.texts], atol=1e-9)
    if "sleep" not in behaviour:
        assert sorted(stub.prompts()) == sorted(project.texts)


@pytest.mark.parametrize(
    ("behaviour", "keys", "words"),
    [
        (
            {"key": "right"},
            {},
            'api_key: URL/models answers 401 {"error": "Unauthorized"}; see whether url',
        ),
        (
            {"key": "right"},
            {"api_key": "${MY_KEY}"},
            'api_key: URL/models answers 401 {"error": "Unauthorized"}; see whether url',
        ),
        ({"models": ["other", "third"]}, {}, "model: the server has none of the name tiny; it has"),
        (
            {"logprobs": "off"},
            {},
            "top_logprobs: the server gives no log-probabilities; switch them on there",
        ),
        (
            {"gives": 2},
            {},
            "top_logprobs: the server gives 2 tokens of 5 asked for",
        ),
        ({"most": 3}, {}, "top_logprobs: URL/completions answers 400"),
        (
            {"status": 200, "html": "<html>Welcome</html>"},
            {},
            "url: URL/completions answers 200 <html>Welcome</html>; see whether url",
        ),
        (
            {"status": 404},
            {},
            'answers 404 {"error": {"message": "an odd error"}}; see whether url (most end in /v1), model, api',
        ),
        ({"status": 200, "html": {"object": "odd"}}, {}, "the server answers in another form than OpenAI's"),
        (
            {},
            {"label_tokens": {**TEXTS, "tie": "riverside"}, "top_logprobs": 5},
            "label_tokens: 'riverside' is not among the 5 likeliest first tokens, but 'river' is, "
            "and one token is read: take a text of one token",
        ),
    ],
    ids=str,
)
def test_errors_that_stay_are_one_sentence(
    behaviour: dict[str, Any], keys: dict[str, Any], words: str, stub: Stub, project: Project
) -> None:
    stub.behave(**behaviour, path="/v1/completions")
    code, printed = run(project, member(stub, **keys))
    assert code == 1
    assert words.replace("URL", stub.url) in printed, printed
    assert "Traceback" not in printed


@pytest.mark.long  # the waits before further tries
def test_nobody_listens_and_no_certificate_fits(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}/v1"
        threading.Thread(target=_greet, args=[listener], daemon=True).start()
        code, printed = run(project, member(url=f"https://{address}"))
    assert code == 1
    assert f"url: https://{address}/models gave no answer in 8 tries, lastly ConnectError [SSL" in printed, (
        printed
    )
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}/v1"
        code, printed = run(project, member(url=f"http://{address}"))
    assert code == 1
    assert f"url: http://{address}/models gave no answer in 8 tries, lastly ConnectError" in printed, printed


def _greet(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        connection.close()


def test_a_label_that_is_not_among_the_likeliest_makes_its_rows_bad(stub: Stub, project: Project) -> None:
    stub.behave()
    code, printed = run(project, member(stub, top_logprobs=4), on_bad_row="uniform")
    assert code == 0, printed
    (report,) = project.run_json()["members"]
    values = project.values("runs/first/predictions/asked.csv")
    is_bad = np.array([_least_likely(text) in (0, 1, 2) for text in project.texts])
    assert 0 < is_bad.sum() < len(values)
    assert len(report["bad_rows"]) == is_bad.sum()
    assert all(
        "is not among the 4 likeliest first tokens" in reason for reason in report["bad_rows"].values()
    )
    np.testing.assert_allclose(values[is_bad], 1 / 3)
    good = [expected(text) for text, bad in zip(project.texts, is_bad, strict=True) if not bad]
    np.testing.assert_allclose(values[~is_bad], good, atol=1e-9)


def _least_likely(text: str) -> int:
    letters = sum(map(ord, text[:40]))
    scores = [letters % number for number in (7, 11, 5, 3, 2)]
    return max(range(5), key=lambda place: (-scores[place], place))


def test_the_key_is_in_no_file(stub: Stub, project: Project) -> None:
    stub.behave(key=KEY)
    code, printed = run(project, member(stub, api_key="${MY_KEY}"))
    assert code == 0, printed
    assert KEY not in printed
    stub.behave(
        key=KEY, status=418, html=f"no tea for {KEY} {'and so on ' * 27}{KEY}", path="/v1/completions"
    )
    code, printed = run(project, member(stub, api_key="${MY_KEY}", length_normalize="bytes"))
    assert code == 1
    assert "no tea for ***" in printed
    assert KEY[:12] not in printed
    for path in (project.folder / "runs").rglob("*"):
        if path.is_file():
            assert KEY[:12].encode() not in path.read_bytes(), path


def test_where_the_server_is_changes_nothing_and_what_it_is_asked_does(
    stub: Stub, project: Project, tmp_path: Path
) -> None:
    stub.behave()
    code, printed = run(project, member(stub))
    assert code == 0, printed
    (tmp_path / "other").mkdir()
    with serving(tmp_path / "other") as other:
        assert run(project, member(other, api_key="${MY_KEY}", max_concurrency=2, timeout="1m"))[0] == 0
        assert other.prompts() == []
        assert run(project, member(other, length_normalize="bytes"))[0] == 0
        assert sorted(other.prompts()) == sorted(project.texts)


@pytest.mark.fresh
def test_a_killed_run_asks_no_finished_chunk_again(stub: Stub, project: Project) -> None:
    """A chunk is 32 rows for two requests at a time."""
    project.write_table(96)
    stub.behave(sleep=0.05, path="/v1/completions")
    project.write_config(project.config(models=[member(stub, max_concurrency=2)], defaults=None))
    process = project.start("run", "config.yaml")
    wait_until(lambda: len(stub.prompts()) >= 50, "a chunk and a half")
    process.kill()
    process.communicate()
    time.sleep(1)  # those that the server has got are answered
    shards = [*project.folder.glob("runs/first/work/asked.*/*.csv")]
    numbers = [int(line.split(",")[0]) for path in shards for line in path.read_text().splitlines()[1:]]
    assert len(numbers) in (32, 64)
    stub.behave()
    code, printed = run(project, member(stub, max_concurrency=2))
    assert code == 0, printed
    assert sorted(stub.prompts()) == sorted(project.texts[row] for row in {*range(96)} - {*numbers})
    values = project.values("runs/first/predictions/asked.csv")
    np.testing.assert_allclose(values, [expected(text) for text in project.texts], atol=1e-9)


@pytest.mark.fresh
def test_at_a_signal_the_answers_are_kept(stub: Stub, project: Project) -> None:
    project.write_table(96)
    stub.behave(sleep=0.1, path="/v1/completions")
    project.write_config(project.config(models=[member(stub, max_concurrency=6)], defaults=None))
    process = project.start("run", "config.yaml")
    wait_until(lambda: len(stub.prompts()) >= 20, "some answers")
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    (shard,) = project.folder.glob("runs/first/work/asked.*/*.csv")
    kept, asked = len(shard.read_text().splitlines()) - 1, len(stub.prompts())
    assert asked - 6 <= kept <= asked < 96, "those under way are dropped"


def test_a_classifier(project: Project, tmp_path: Path) -> None:
    """vLLM names the likeliest label alone, so that the order of the others is the config's to say."""
    folder = tmp_path / "a classifier"
    model = make_checkpoint(folder / "model", "llama", ["x", "y", "z"], seed=2)
    label_map = {"x": "tie", "y": "winner_a", "z": "winner_b"}
    plain = {
        "name": "plain",
        "model_name_or_path": str(model),
        "prompt_template": "{{ text }}",
        "label_map": label_map,
    }
    asked = {
        key: value
        for key, value in member(api="classify").items()
        if key not in ("label_tokens", "top_logprobs")
    }
    with serving(folder) as server:
        asked["url"] = server.url
        code, printed = run(project, {**asked, "label_map": label_map}, plain)
        assert code == 0, printed
        asked_values = project.values("runs/first/predictions/asked.csv")
        np.testing.assert_allclose(
            asked_values, project.values("runs/first/predictions/plain.csv"), atol=1e-5
        )
        code, printed = run(project, {**asked, "label_map": dict([*label_map.items()][::-1])})
        assert code == 1
        assert "label_map: the server has 3 labels, and number" in printed


def server(folder: Path, *arguments: str, **keys: Any) -> dict[str, Any]:
    return {"command": [*STUB, "--port", "{port}", str(folder), *arguments], **keys}


def test_a_server_of_its_own_that_dies_is_started_again(project: Project, tmp_path: Path) -> None:
    folder = tmp_path / "a toy"
    folder.mkdir()
    Stub(folder, "").behave(kill=True, times=2, path="/v1/completions")
    code, printed = run(project, member(server=server(folder), max_concurrency=2))
    assert code == 0, printed
    assert "): its command ended with exit code 3" in printed
    values = project.values("runs/first/predictions/asked.csv")
    np.testing.assert_allclose(values, [expected(text) for text in project.texts], atol=1e-9)
    assert "listening" in (project.folder / "runs/first/logs/asked-0.log").read_text()


@pytest.mark.parametrize(
    ("command", "keys", "words"),
    [
        (
            [sys.executable, "-c", "import sys; sys.exit('no model here')", "{port}"],
            {},
            "exit code 1, with the last words",
        ),
        (
            [sys.executable, "-c", "print('all done')", "{port}"],
            {},
            "with the last words: all done",
        ),
        (
            [
                sys.executable,
                "-c",
                "import time; print('still loading', flush=True); time.sleep(60)",
                "{port}",
            ],
            {"ready_timeout": "3s"},
            "did not answer with status 200 within 3.0 s (ready_timeout); the server's last words: still",
        ),
        (
            ["/nowhere/vllm", "serve", "{port}"],
            {},
            "server.command: the program /nowhere/vllm is no file that may be executed",
        ),
        ([sys.executable, "-c", "8000"], {}, "command: does not say {port}"),
    ],
    ids=["ends", "ends well", "never ready", "no program", "no port"],
)
def test_servers_that_cannot_be_asked(
    command: list[str], keys: dict[str, Any], words: str, project: Project
) -> None:
    code, printed = run(project, member(server={"command": command, **keys}))
    assert code in (1, 2)
    assert words in printed, printed


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "give one of url (a server that runs already) and server"),
        ({"url": "localhost:8000"}, "url: must be the address of an API, such as http://localhost:8000/v1"),
        ({"url": "http://a/v1", "num_gpus": 1}, "num_gpus: a server at a url has its own devices"),
        ({"url": "http://a/v1", "label_map": {"x": "tie"}}, "label_map: needs api: classify"),
        ({"url": "http://a/v1", "api": "classify"}, "label_tokens: a classifier has no label texts"),
        ({"url": "http://a/v1", "label_tokens": {"tie": "x"}}, "label_tokens: has no text for"),
    ],
    ids=str,
)
def test_keys_that_do_not_go_together(keys: dict[str, Any], words: str, project: Project) -> None:
    project.write_table(3)
    project.write_config(project.config(models=[member(**keys)], defaults=None))
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 2
    assert words in re.sub(r" \(line \d+\)", "", " ".join((done.stdout + done.stderr).split()))
