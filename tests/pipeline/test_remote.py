"""Tables and results at addresses: S3 by moto's server, and ``file://``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ensemble.common.errors import DataError
from ensemble.common.remote_files import address_of, copy_in
from tests.project import ROOT, Project, python_path
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("warm")
LABELS = ["tie", "winner_a", "winner_b"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with S3's interface."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = (tmp_path_factory.mktemp("moto") / "log").open("wb")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log, subprocess.Popen(command, stdout=log, stderr=log) as process:

        def answers() -> bool:
            with socket.socket() as caller:
                return caller.connect_ex(("127.0.0.1", port)) == 0

        try:
            wait_until(answers, "the server")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.fixture
def s3(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """fsspec's file system of an empty bucket; commands find it by their environment."""
    import s3fs

    variables = {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "an-id-of-the-test",
        "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    store = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    if store.exists("bucket"):
        store.rm("bucket", recursive=True)
    store.mkdir("bucket")
    return store


@pytest.fixture
def csv_project(project: Project) -> Project:
    rows = [[row_id, "0.5", "0.3", "0.2"] for row_id in project.ids]
    project.write_csv("mate.csv", ["id", *LABELS], rows)
    project.write_config(of_csv(project, ""))
    return project


def of_csv(project: Project, root: str, **changes: Any) -> dict[str, Any]:
    """A config of a member that needs no worker; its files are at an address."""
    return project.config(
        models=[{"name": "mate", "task_type": "csv", "path": f"{root}mate.csv"}],
        defaults=None,
        data={"path": f"{root}test.csv", "label_column": "label"},
        **{"submission": {"sample": f"{root}sample.csv"}, **changes},
    )


def files(folder: Path) -> dict[str, bytes]:
    names = ["ensemble.csv", "submission.csv", "predictions/mate.csv"]
    return {name: (folder / name).read_bytes() for name in names}


def copies(project: Project) -> dict[Path, int]:
    cache = Path(os.environ["XDG_CACHE_HOME"])
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*.csv") if path.is_file()}


def printed(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stdout + done.stderr).split())


def test_addresses_and_paths() -> None:
    for address in (
        "s3://bucket/a/b.csv",
        "gs://bucket/b.csv",
        "hf://datasets/a/b/c.csv",
        "file:///tmp/b.csv",
    ):
        assert address_of(address) == address_of(Path(address)) == address
    for path in ("a/b.csv", "/s3/b.csv", "s3", "https://example.org/b.csv", "C:/b.csv"):
        assert address_of(Path(path)) is None


@pytest.mark.long
def test_a_run_with_all_its_files_on_s3(csv_project: Project, s3: Any) -> None:
    project = csv_project
    assert project.ensemble("run", "config.yaml").returncode == 0
    expected = files(project.folder / "runs/first")
    for name in ("test.csv", "sample.csv", "mate.csv"):
        s3.put_file(str(project.folder / name), f"bucket/in/{name}")
        (project.folder / name).unlink()
    submission = {"sample": "s3://bucket/in/sample.csv", "path": "s3://bucket/out/sub.csv"}
    to_s3 = of_csv(
        project,
        "s3://bucket/in/",
        submission=submission,
        output_dir="runs/second",
        copy_to="s3://bucket/runs/second/",
    )
    project.write_config(to_s3)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    results = "results copied to s3://bucket/runs/second/run.json and s3://bucket/out/sub.csv"
    assert results in printed(done)
    assert files(project.folder / "runs/second") == expected
    s3.get("bucket/runs/second", str(project.folder / "fetched"), recursive=True)
    assert files(project.folder / "fetched") == expected
    assert s3.cat_file("bucket/out/sub.csv") == expected["submission.csv"]
    assert not [path for path in s3.find("bucket") if ".ensemble" in path]
    names = {
        path.relative_to(project.folder / "fetched").as_posix()
        for path in (project.folder / "fetched").iterdir()
    }
    assert names == {"config.yaml", "ensemble.csv", "predictions", "run.json", "submission.csv"}
    # What was fetched is a run like any other.
    done = project.ensemble("compare", "fetched", "runs/second")
    assert done.returncode == 0, done.stderr

    first = copies(project)
    assert len(first) == 3
    done = project.ensemble("run", "config.yaml")
    assert "earlier run, reused" in done.stdout
    assert copies(project) == first, "an object that has not changed is copied once"

    table = s3.cat_file("bucket/in/test.csv").decode().replace("\n", "\nnew row,a text,tie\n", 1)
    s3.pipe_file("bucket/in/test.csv", table.encode())
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 2
    assert "s3/bucket/in/mate.csv" in done.stderr, "the new row is not in the other files"
    s3.pipe_file("bucket/in/mate.csv", s3.cat_file("bucket/in/mate.csv") + b"new row,0.1,0.2,0.7\n")
    s3.pipe_file("bucket/in/sample.csv", s3.cat_file("bucket/in/sample.csv") + b"new row,0,0,0\n")
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert "mate: file, rows changed since" in printed(done)
    assert s3.cat_file("bucket/out/sub.csv").splitlines()[-1] == b"new row,0.1,0.2,0.7"


def test_a_submission_as_parquet_at_an_address(csv_project: Project, tmp_path: Path) -> None:
    path = tmp_path / "out/sub.parquet"
    csv_project.write_config(
        of_csv(csv_project, "", submission={"sample": "sample.csv", "path": f"file://{path}"})
    )
    done = csv_project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    expected = pd.read_csv(csv_project.folder / "runs/first/submission.csv", dtype={"id": str})
    pd.testing.assert_frame_equal(pd.read_parquet(path), expected)


def test_a_trial_copies_nothing(csv_project: Project, tmp_path: Path) -> None:
    csv_project.write_config(of_csv(csv_project, "", copy_to=f"file://{tmp_path}/out"))
    done = csv_project.ensemble("run", "config.yaml", "--limit", "10")
    assert (done.returncode, (tmp_path / "out").exists()) == (0, False), done.stderr
    done = csv_project.ensemble("run", "config.yaml")
    assert (done.returncode, files(tmp_path / "out")) == (0, files(csv_project.folder / "runs/first"))


def test_a_copy_that_fails_at_the_end(csv_project: Project, tmp_path: Path) -> None:
    project, target = csv_project, tmp_path / "the copies"
    (target / "ensemble.csv/in the way").mkdir(parents=True)
    project.write_config(of_csv(project, "", copy_to=f"file://{target}"))
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 1
    assert f"error: file://{target}/ensemble.csv: cannot be written (IsADirectoryError" in done.stderr
    assert "the results are complete in runs/first, and the same command copies them again" in done.stderr
    assert "merge method: mean" in done.stdout, "the summary is not lost with the copy"
    (target / "ensemble.csv/in the way").rmdir()
    (target / "ensemble.csv").rmdir()
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert f"results copied to file://{target}/run.json" in done.stdout
    assert files(target) == files(project.folder / "runs/first")


@pytest.mark.long
def test_what_cannot_be_reached(csv_project: Project, s3: Any) -> None:
    project = csv_project

    def problem(config: dict[str, Any], command: str = "validate", **environment: str) -> str:
        project.write_config(config)
        done = project.ensemble(command, "config.yaml", environment=environment)
        assert done.returncode == 2, done.stdout + done.stderr
        assert not (project.folder / "runs").exists()
        return printed(done)

    missing = problem({**of_csv(project, ""), "data": {"path": "s3://no-such-bucket/test.csv"}})
    assert (
        "error: data.path (line 2): s3://no-such-bucket/test.csv: cannot be read (FileNotFoundError"
        in missing
    )
    assert "check the address, the network and the credentials" in missing
    sample = of_csv(project, "", submission={"sample": "s3://bucket/none.csv"})
    assert "submission.sample (line" in problem(sample)
    s3.pipe_file("bucket/folder/a.csv", b"id\n")
    assert "s3://bucket/folder: is a folder" in problem(
        {**of_csv(project, ""), "data": {"path": "s3://bucket/folder"}}
    )
    out = problem(of_csv(project, "", copy_to="s3://no-such-bucket/out"), "run")
    assert "s3://no-such-bucket/out/run.json: cannot be written (FileNotFoundError" in out
    assert "error: copy_to (line" in out
    local = problem({**of_csv(project, ""), "output_dir": "s3://bucket/runs"})
    assert "output_dir (line" in local
    assert "a run works in a local folder; name one, and this address as copy_to" in local
    assert "copy_to (line" in problem(of_csv(project, "", copy_to="runs/elsewhere"))
    # Without s3fs, as in an installation without the extra.
    (project.folder / "without").mkdir()
    (project.folder / "without/s3fs.py").write_text("raise ImportError('no module named s3fs')\n")
    without = problem(
        of_csv(project, "s3://bucket/"), PYTHONPATH=python_path(project.folder / "without", ROOT)
    )
    assert "s3:// needs s3fs, which is not installed; pip install 's3fs>=" in without


@pytest.mark.long
def test_a_server_that_does_not_answer(csv_project: Project, s3: Any) -> None:
    csv_project.write_config(of_csv(csv_project, "s3://bucket/"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    done = csv_project.ensemble("validate", "config.yaml", environment={"AWS_ENDPOINT_URL": nobody})
    assert done.returncode == 2
    assert "s3://bucket/test.csv: cannot be read (EndpointConnectionError" in printed(done)


@pytest.mark.long
def test_an_object_that_changes_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, is_copied = tmp_path / "test.csv", threading.Event()
    path.write_bytes(b"x" * 200_000_000)

    def touch() -> None:
        while not is_copied.is_set():
            os.utime(path)

    toucher = threading.Thread(target=touch)
    toucher.start()
    try:
        with pytest.raises(
            DataError, match=r"test\.csv: changed while it was copied; start again when it is comp"
        ):
            copy_in(f"file://{path}")
    finally:
        is_copied.set()
        toucher.join()
    assert not [result for result in (tmp_path / "cache").rglob("*") if result.is_file()]
    assert copy_in(f"file://{path}").path.read_bytes() == path.read_bytes()


def test_an_object_that_changes_during_the_run(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = f"file://{project.folder}/test.csv"
    (project.folder / "mine.py").write_text(
        f"def predict(frame, context):\n"
        f"    open({str(project.folder / 'test.csv')!r}, 'a').write('9999,more,tie\\n')\n"
        f"    return [[0.2, 0.3, 0.5]] * len(frame)\n"
    )
    models = [{"name": "mine", "task_type": "python", "predict": "mine.py:predict", "columns": ["text"]}]
    project.write_config(
        project.config(models=models, defaults=None, submission=None, data={"path": address})
    )
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert f"{address} changed since it was copied" in printed(done)
    assert len(project.read("runs/first/ensemble.csv")[1]) == 300


def test_addresses_on_the_command_line(csv_project: Project, tmp_path: Path) -> None:
    project, root = csv_project, f"file://{tmp_path}/a folder"
    (tmp_path / "a folder/day=1").mkdir(parents=True)
    (project.folder / "mate.csv").rename(tmp_path / "a folder/day=1/mate.csv")
    done = project.ensemble("merge", f"{root}/day=1/mate.csv", "-o", f"{root}/out/merged.csv")
    assert done.returncode == 0, done.stderr
    assert f"{root}/out/merged.csv: 300 rows of" in printed(done)
    done = project.ensemble("fit", f"b={root}/day=1/mate.csv", "--labels", "test.csv", "-o", f"{root}/w.yaml")
    assert done.returncode == 2
    assert f"error: {root}/w.yaml: must be on this machine; name a local path" in printed(done)


@pytest.mark.long
def test_commands_on_files_at_addresses(csv_project: Project, s3: Any) -> None:
    project = csv_project
    ids = pd.read_csv(project.folder / "mate.csv", dtype={"id": str})["id"]
    values = np.random.default_rng(0).dirichlet([1, 1, 1], (2, len(ids)))
    table, other = (pd.DataFrame(part, columns=LABELS) for part in values)
    table.insert(0, "id", ids)
    other.insert(0, "id", ids)
    s3.pipe_file("bucket/mate.csv", table.to_csv(index=False).encode())
    s3.pipe_file("bucket/other.csv", other.sample(frac=1, random_state=0).to_csv(index=False).encode())
    s3.put_file(str(project.folder / "test.csv"), "bucket/test.csv")
    done = project.ensemble(
        "merge", "s3://bucket/mate.csv", "b=s3://bucket/other.csv", "-o", "s3://bucket/out.parquet"
    )
    assert done.returncode == 0, done.stderr
    with s3.open("bucket/out.parquet") as file:
        merged = pd.read_parquet(file)
    pd.testing.assert_frame_equal(merged[LABELS], (table[LABELS] + other[LABELS]) / 2)
    assert merged["id"].equals(ids)
    done = project.ensemble(
        "compare", "s3://bucket/mate.csv", "s3://bucket/other.csv", "--labels", "s3://bucket/test.csv"
    )
    assert done.returncode == 0, done.stderr
    assert "log_loss" in done.stdout
    files = ["a=s3://bucket/mate.csv", "s3://bucket/other.csv", "--labels", "s3://bucket/test.csv"]
    done = project.ensemble("fit", *files, "-o", "w.yaml")
    assert done.returncode == 0, done.stderr
    assert "other" in (project.folder / "w.yaml").read_text()
