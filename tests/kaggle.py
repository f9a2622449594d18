"""Kaggle, rehearsed: its folders with small stand-ins, its image's Python, and the notebook run there offline.

``python -m tests.kaggle`` runs configs/kaggle.ipynb so, and writes what it prints into
docs/reference/kaggle-output.md.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.checkpoints import make_adapter, make_base, make_checkpoint, make_texts
from tests.project import ROOT
from tests.waiting import PATIENCE_SECONDS

LABELS = ["winner_model_a", "winner_model_b", "winner_tie"]
COMPETITION, CHECKOUT = "lmsys-chatbot-arena", "ensemble-runner"
NOTEBOOK, OUTPUT = ROOT / "configs" / "kaggle.ipynb", ROOT / "docs" / "reference" / "kaggle-output.md"
# The page leaves out longer cells and lines that only say how far something is; the output of some cells begins at
# the line that starts so.
LINES_SHOWN = 7
_PROGRESS = re.compile(
    r", [\d.]+ s$|: (starting Python|loading the model|predicting .*)$"
    r"|: [\d,]+/[\d,]+ rows\b.* (left|waiting for its turn)$|^the report is being written$"
)
_SHOWN_FROM = {"doctor": "A run can", "validate": "All checks", "rehearse": "by a run of"}
# In namespaces of its own there is no network, and this folder is read-only, as datasets are.
_OFFLINE = """
import fcntl, os, socket, struct, subprocess, sys
folder, *command = sys.argv[1:]
with socket.socket() as any_socket:  # the loopback, by which a notebook talks to its kernel, is down at first
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x41))
subprocess.run(["mount", "--bind", folder, folder], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
os.execv(command[0], command)
"""
# Lines that depend on the machine and the moment.
_PASSING = re.compile(r"\d|---|[CG]PU|^(gemma2|llama3|lengths)\b")
_INTRODUCTION = """\
# The Kaggle notebook and its output

This is what [`configs/kaggle.ipynb`](../../configs/kaggle.ipynb) prints, without longer cells and lines of
progress. Two small models stand in for Gemma-2-9B and Llama-3-8B, over 40 rows, on a machine without a GPU. So
sizes, speeds and devices are not Kaggle's. The notebook ran in folders like Kaggle's, without a network and with
read-only inputs. `CONFIG` has `lora.yaml` and `infer.yaml`, too.

`python -m tests.kaggle` writes this page.
"""


def lay_out(root: Path) -> None:
    """The inputs that configs/kaggle.yaml reads, with small stand-ins of the same architectures: 40 rows."""
    data = root / "input" / COMPETITION
    data.mkdir(parents=True)
    (root / "working").mkdir()
    labels = ["LABEL_0", "LABEL_1", "LABEL_2"]
    make_checkpoint(root / "input" / "gemma-2-9b-lmsys", "gemma2", labels, seed=1)
    make_checkpoint(root / "input" / "llama-3-8b-lmsys", "llama", labels, seed=2, pad=None)
    texts = make_texts(120, seed=5)
    rows = []
    for index in range(40):
        turns = [texts[3 * index : 3 * index + 2], [texts[3 * index + 2], None], ["\ud83d broken pair"]]
        rows.append([str(136060 + index), *[json.dumps(turn) for turn in turns]])
    _write_csv(data / "test.csv", ["id", "prompt", "response_a", "response_b"], rows)
    sample = [[row[0], "0.33", "0.33", "0.34"] for row in rows]
    _write_csv(data / "sample_submission.csv", ["id", *LABELS], sample)


def lay_out_options(root: Path) -> None:
    """What its lora.yaml, infer.yaml and its rehearsal read beside that: a base, its adapter, and labelled rows."""
    make_adapter(
        root / "input" / "gemma-2-9b-lmsys-lora",
        make_base(root / "input" / "gemma-2-9b-it", "gemma2", seed=3),
        labels=len(LABELS),
        modules_to_save=["score"],
    )
    texts, truth = make_texts(1260, seed=6), ["100", "010", "001"]
    rows = [
        [str(index), *[json.dumps([turn]) for turn in texts[3 * index : 3 * index + 3]], *truth[index % 3]]
        for index in range(420)
    ]
    header = ["id", "prompt", "response_a", "response_b", *LABELS]
    _write_csv(root / "input" / COMPETITION / "train.csv", header, rows)


def _write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def attach_checkout(root: Path) -> None:
    """The project's files as a dataset."""
    folder = root / "input" / CHECKOUT
    shutil.copytree(ROOT / "ensemble", folder / "ensemble", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def make_image(folder: Path, without: Collection[str] = ()) -> Path:
    """A Python that has what this one has, but neither this project nor these packages.

    Pip sees what is in the image as installed, and installs beside it.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    image = folder / "image"
    image.mkdir()
    (site / "image.pth").write_text(f"{image}\n", encoding="utf-8")
    left_out = re.compile("|".join(["ensemble_?", "__editable__", "__pycache__", *without]))
    seen = set()
    for place in (Path(item) for item in sys.path if item.endswith("-packages")):
        for entry in place.iterdir():
            # Of a package that lies over another release of itself, the one that is imported.
            name = re.sub(r"-[^-]*\.dist-info$", ".dist-info", entry.name).lower()
            if name not in seen and not left_out.match(name) and entry.suffix != ".pth":
                seen.add(name)
                (image / entry.name).symlink_to(entry)
    return folder / "venv" / "bin" / "python"


def run_notebook(
    python: Path, root: Path, changes: Mapping[str, str] | None = None
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the notebook with nbconvert, as Kaggle does, in ``root``, which stands for /kaggle.

    Args:
        changes: texts of the notebook to replace.

    Returns:
        What nbconvert did, and the notebook with its outputs, empty where a cell failed.
    """
    text = NOTEBOOK.read_text(encoding="utf-8").replace("/kaggle/input", f"{root}/input")
    options = (rf"CONFIG.append(\"{name}.yaml\")" for name in ("lora", "infer"))
    with_options = {f"# {option}": option for option in options}
    for old, new in {"/kaggle/working": f"{root}/working", **with_options, **(changes or {})}.items():
        assert old in text, old
        text = text.replace(old, new)
    notebook, executed = root / "working" / "__notebook__.ipynb", root / "working" / "executed.ipynb"
    notebook.write_text(text, encoding="utf-8")
    home = root / "home"  # of Jupyter's and IPython's own files
    home.mkdir(exist_ok=True)
    dropped = ("PYTHONPATH", "PIP_", "JUPYTER", "IPYTHON", "HF_", "XDG_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    command = ["-m", "nbconvert", "--to", "notebook", "--execute", "--output", executed.name, str(notebook)]
    done = subprocess.run(
        [*offline(root / "input"), str(python), *command],
        cwd=root / "working",
        env={**environment, "HOME": str(home), "KAGGLE_KERNEL_RUN_TYPE": "Batch"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    return done, json.loads(executed.read_text(encoding="utf-8")) if executed.is_file() else {}


def offline(read_only: Path) -> list[str]:
    """What a command is put behind to have no network and a read-only folder; nothing where that is forbidden."""
    command = [
        "unshare",
        "--map-root-user",
        "--net",
        "--mount",
        sys.executable,
        "-c",
        _OFFLINE,
        str(read_only),
    ]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, shutil.which("true") or "/bin/true"]).returncode
    ):
        return []
    return command


def is_shown(source: str) -> bool:
    """Whether the page has a cell."""
    return len(source.splitlines()) <= LINES_SHOWN


def without_progress(lines: Sequence[str]) -> list[str]:
    """The lines of an output that still matter once the cell has ended."""
    return [line for line in lines if not _PROGRESS.search(line)]


def rendered(notebook: Mapping[str, Any], root: Path) -> str:
    """A notebook's shorter cells with their outputs in Markdown, with /kaggle in place of ``root``."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub("^#", "##", source))
        elif is_shown(source):
            parts.append(f"```python\n{source}\n```")
            output = "".join("".join(output.get("text", "")) for output in cell["outputs"])
            start = max(output.find(_SHOWN_FROM.get(cell["id"], "")), 0)
            lines = without_progress(output[start:].rstrip().splitlines())
            parts += ["\n".join(["```text", *lines, "```"])] if lines else []
        else:
            parts.append(f"*({len(source.splitlines())} lines)*")
    text = "\n\n".join(parts).replace(str(root), "/kaggle").replace(str(root.parent / "venv"), "/usr")
    return re.sub(r"\bLinux-\S+", "Linux", text) + "\n"


def page(notebook: Mapping[str, Any], root: Path) -> str:
    """docs/reference/kaggle-output.md, of a notebook that was run in ``root``."""
    return f"{_INTRODUCTION}\n{rendered(notebook, root)}"


def lasting(page: str) -> list[str]:
    """What a page says on every machine, at every run: its text, and lines of outputs without figures.

    What doctor and plan say of the machine is left out, and so are its devices and the progress of members.
    """
    lines: list[str] = []
    is_output = is_of_machine = False
    all_lines = page.splitlines()
    for number, line in enumerate(all_lines):
        # A table's header takes one line or two, by the width of its figures.
        is_header = any("---" in below for below in all_lines[number + 1 : number + 3])
        if line.startswith("```"):
            is_output = line == "```text"
        elif not is_output:
            if line.startswith("ensemble("):
                is_of_machine = line.startswith(('ensemble("doctor"', 'ensemble("plan"'))
            lines.append(line)
        elif not is_of_machine and not is_header and not _PASSING.search(line) and line not in lines:
            lines.append(" ".join(line.split()))
    return [line for line in lines if line]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "kaggle"
        lay_out(root)
        lay_out_options(root)
        attach_checkout(root)
        done, executed = run_notebook(make_image(Path(folder)), root)
        if not executed:
            sys.exit(done.stdout)
        OUTPUT.write_text(page(executed, root), encoding="utf-8")


if __name__ == "__main__":
    main()
