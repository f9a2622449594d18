"""Functions of other packages that are called when a run ends."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.packages import lay_out, pip_install
from tests.page import lay_out_package
from tests.project import ROOT, Project, python_path

pytestmark = pytest.mark.usefixtures("warm")
GROUP = "ensemble.run_end"


@pytest.fixture
def csv_run(project: Project) -> Project:
    """A run whose only member needs no worker."""
    project.write_csv(
        "mate.csv", ["id", "tie", "winner_a", "winner_b"], [[i, "0.5", "0.3", "0.2"] for i in project.ids]
    )
    project.write_config(
        project.config(models=[{"name": "mate", "task_type": "csv", "path": "mate.csv"}], defaults=None)
    )
    return project


def test_the_hook_of_the_page_tells_a_server(csv_run: Project, tmp_path: Path) -> None:
    site = tmp_path / "site"
    told: list[object] = []

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    pip_install(site, lay_out_package(tmp_path / "source", "ensemble-extras"))
    with HTTPServer(("127.0.0.1", 0), Chat) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        environment = {
            "PYTHONPATH": python_path(ROOT, site),
            "WEBHOOK": f"http://127.0.0.1:{server.server_port}/",
        }
        done = csv_run.ensemble("run", "config.yaml", environment=environment)
        server.shutdown()
    assert (done.returncode, "hook" in done.stdout + done.stderr) == (0, False), done.stdout + done.stderr
    assert told == [{"text": "first: complete, 300 rows"}]


def test_a_hook_that_fails_is_a_warning(csv_run: Project, tmp_path: Path) -> None:
    site = tmp_path / "site"
    lay_out(
        site,
        "bad-hooks",
        GROUP,
        {"a": "bad_hooks:fail", "b": "bad_hooks:missing", "c": "bad_hooks:show", "d": "bad_hooks:leave"},
        bad_hooks="def fail(path): raise OSError('no network')\n"
        "def leave(path): raise SystemExit(7)\n"
        "def show(path): print('STATUS', __import__('json').loads(path.read_text())['status'])\n",
    )
    environment = {"PYTHONPATH": python_path(ROOT, site)}
    done = csv_run.ensemble("run", "config.yaml", environment=environment)
    assert done.returncode == 0, done.stderr
    start = "the hook a = bad_hooks:fail of the package bad-hooks failed (OSError: no network)"
    assert start in " ".join(done.stdout.split())
    assert "the hook b = bad_hooks:missing of the package bad-hooks failed (AttributeError" in " ".join(
        done.stdout.split()
    )
    assert "the hook d = bad_hooks:leave of the package bad-hooks failed (SystemExit: 7)" in " ".join(
        done.stdout.split()
    )
    assert "STATUS complete" in done.stdout
    assert start in (csv_run.folder / "runs/first/logs/run.log").read_text(encoding="utf-8")


@pytest.mark.long
def test_hooks_are_called_of_a_run_that_fails_and_not_by_a_rehearsal(
    project: Project, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    show = "def show(path): print('STATUS', __import__('json').loads(path.read_text())['status'])\n"
    lay_out(site, "hooks", GROUP, {"show": "some_hooks:show"}, some_hooks=show)
    environment = {"PYTHONPATH": python_path(ROOT, site)}
    code = "def predict(frame, context): return {}\n"
    models = [{"name": "mine", "task_type": "python", "predict": "mine.py:predict", "columns": ["text"]}]
    project.write_config(project.config(models=models, defaults=None))
    (project.folder / "mine.py").write_text(code.format("[[0.2, 0.3, 0.5]] * len(frame)"))
    done = project.ensemble("rehearse", "config.yaml", environment=environment)
    assert (done.returncode, "STATUS" in done.stdout) == (0, False), done.stderr
    (project.folder / "mine.py").write_text(code.format("'nothing'"))
    done = project.ensemble("run", "config.yaml", environment=environment)
    assert done.returncode == 1
    assert done.stdout.count("STATUS failed") == 1
