"""The API in a real Jupyter kernel: progress in the cell, frames, errors, and the interrupt button."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.project import ROOT, Project, python_path

# The kernel's own reasons to warn are none of ours.
pytestmark = pytest.mark.filterwarnings("default")
CELLS = (
    "import signal, threading, ensemble\nbefore = signal.getsignal(signal.SIGINT), threading.active_count()",
    "run = ensemble.run('config.yaml')",
    "print(run.ensemble.shape, run.predictions('gemma').index[0])\nrun",
    "try:\n    ensemble.run('config.yaml', {'fill': 1})\nexcept ensemble.ConfigError as error:\n    print(error)",
    """
import os, time
def interrupt():
    while not os.path.exists("runs/second/run.json"):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)  # what the button sends
button = threading.Thread(target=interrupt)
button.start()
try:
    ensemble.run("config.yaml", {"output_dir": "runs/second"}, quiet=True)
except KeyboardInterrupt:
    print(ensemble.open_run("runs/second").report.status)
button.join()
""",
    "print(before == (signal.getsignal(signal.SIGINT), threading.active_count()))",
)


@pytest.mark.long
def test_cells_of_a_notebook(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT, *map(Path, filter(None, sys.path))))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    kernels = tmp_path / "jupyter/kernels/here"
    kernels.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernels / "kernel.json").write_text(
        f'{{"argv": {command!r}, "display_name": "here", "language": "python"}}'.replace("'", '"')
    )
    project.write_config(project.config())
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    resources: dict[str, Any] = {"metadata": {"path": str(project.folder)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="here", resources=resources).execute()
    shown = [
        "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
        for cell in notebook.cells
    ]
    assert shown[0] == ""
    assert "gemma: predicting 300 rows" in shown[1], "progress"
    assert "log loss" in shown[1], "the summary"
    assert shown[2].startswith(f"(300, 3) {project.ids[0]}\n")
    assert "complete, after " in shown[2]
    assert "fill" in shown[3]
    assert shown[4] == "interrupted\n"
    assert shown[5] == "True\n"
    assert "JPY_PARENT_PID" not in os.environ
