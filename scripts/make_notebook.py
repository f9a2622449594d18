"""Writes configs/kaggle.ipynb around configs/kaggle*.yaml: ``python scripts/make_notebook.py``.

A test keeps the two in step, and runs the notebook in a folder laid out like Kaggle's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
NOTEBOOK = CONFIGS / "kaggle.ipynb"

INTRODUCTION = """\
# An ensemble of big models on Kaggle, offline

Settings: accelerator **GPU T4 x2**, L4 x4 or RTX Pro 6000, internet **off**. Inputs: the competition, a dataset
or model for each checkpoint, and this project: the kit that `scripts/kaggle_kit.py` makes, which brings
bitsandbytes, or a checkout.

Every command stops the notebook if it ends badly. (A line that starts with `!` never does: the version would be
saved, and submitted, with whatever lies there.)"""

ATTACH = '''\
import os
import subprocess
import sys
from pathlib import Path


def attached(pattern):
    """The input that holds such a file, wherever below /kaggle/input it is mounted."""
    found = (path for depth in range(1, 5) for path in Path("/kaggle/input").glob("*/" * depth + pattern))
    return next(found, None)


if wheel := attached("ensemble_runner-*.whl"):  # the kit
    lock = wheel.with_name("requirements.lock")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "-r", str(lock)], check=True)
elif module := attached("ensemble/__main__.py"):  # a checkout
    folders = [str(module.parents[1]), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
else:
    raise FileNotFoundError("no input holds this project: add its kit or its checkout as a dataset")


def ensemble(*arguments, good=(0,)):
    """Run `python -m ensemble ...` and print what it says; any other exit code stops the notebook."""
    command = [sys.executable, "-m", "ensemble", *arguments]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **both, encoding="utf-8", errors="replace") as process:
        for line in process.stdout:
            print(line, end="", flush=True)
    if process.returncode not in good:
        raise RuntimeError(f"ensemble {arguments[0]} ended with exit code {process.returncode}; see above")'''

LORA = """\
%%writefile lora.yaml
# Over config.yaml: what differs from it, key by key. Leave out what you do not need.
models:
  - name: gemma2  # a LoRA adapter over its base, which is loaded as the other files say
    model_name_or_path: {inputs}/gemma-2-9b-it
    adapter_name_or_path: {inputs}/gemma-2-9b-lmsys-lora
defaults:
  # Of a row that is too long each column loses its share, and the words between the columns stay.
  truncation:
    fields:
      prompt: {{share: 0.2, keep: head}}
      response_a: {{share: 0.4, keep: head_tail}}
      response_b: {{share: 0.4, keep: head_tail}}
  # Each row twice, which takes twice the time: the mean of both orders of the answers.
  views:
    - {{name: as_is}}
    - name: swapped
      swap: {{columns: [response_a, response_b], labels: [winner_model_a, winner_model_b]}}"""

SCRIPT = """\
%%writefile infer.py
# A script as you have it: it reads --rows, writes --out, and knows nothing of this project.
import argparse

import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression

parser = argparse.ArgumentParser()
parser.add_argument("--rows")
parser.add_argument("--out")
arguments = parser.parse_args()
labels = [{labels}]


def lengths(table):
    return np.log1p(np.stack([table[name].str.len() for name in ("prompt", "response_a", "response_b")], axis=1))


train, test = pd.read_csv("{train}"), pd.read_csv(arguments.rows)
model = LogisticRegression(max_iter=1000).fit(lengths(train), train[labels].to_numpy().argmax(axis=1))
pd.DataFrame(model.predict_proba(lengths(test)), index=test["{id}"], columns=labels).to_csv(arguments.out)"""

SCRIPT_MEMBER = """\
%%writefile infer.yaml
# Over config.yaml: one member more.
models:
  - name: lengths
    task_type: command
    command: [python, infer.py, --rows, "{rows}", --out, "{out}"]
    num_gpus: 0  # or how many of its own the script gets
    weight: 0.1"""

CARD = """\
import pynvml

CONFIG, GIB = ["config.yaml"], 1 << 30
try:
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    size = pynvml.nvmlDeviceGetMemoryInfo(gpu).total
    if pynvml.nvmlDeviceGetCudaComputeCapability(gpu) >= (8, 0) and size > 20 * GIB:
        CONFIG.append("rtx6000.yaml" if size > 80 * GIB else "l4.yaml")
except pynvml.NVMLError as error:
    print(error)  # no GPU
print(*CONFIG)"""

CHOSEN = """\
# CONFIG.append("lora.yaml")  # if you have changed it to your inputs
# CONFIG.append("infer.yaml")"""

REHEARSE = """\
import time

train, began = "{train}", time.monotonic()
ensemble("rehearse", *CONFIG, "--rows", "25000", "--lengths-from", train, good=(0, 1))
print(f"This rehearsal took {{(time.monotonic() - began) / 60:.1f}} minutes of Kaggle's nine hours.")"""

LOOK = """\
import pandas as pd

submission = pd.read_csv("{submission}")
sample = pd.read_csv("{sample}")
assert list(submission.columns) == list(sample.columns), "other columns than the sample"
assert submission["{id}"].equals(sample["{id}"]), "other rows than the sample"
print(submission.drop(columns="{id}").describe().round(4))
print(submission.head().to_string(index=False))"""


def main() -> None:
    NOTEBOOK.write_text(notebook_text(), encoding="utf-8")


def cells() -> list[dict[str, Any]]:
    """The notebook's cells."""
    text = (CONFIGS / "kaggle.yaml").read_text(encoding="utf-8")
    text = text.partition("\n")[2]  # without the editor's path of the schema
    config = yaml.safe_load(text)
    inputs = Path(config["data"]["path"]).parent
    paths = {"submission": config["submission"]["path"], "sample": config["submission"]["sample"]}
    id_column, train = config["data"]["id_column"], inputs / "train.csv"
    look = LOOK.format(**paths, id=id_column)
    labels = ", ".join(f'"{label}"' for label in config["labels"])
    return [
        _markdown("introduction", INTRODUCTION),
        _code("attach", ATTACH),
        _markdown("settings", "The config. Put your own inputs' folders in place of the model paths."),
        _code("config", f"%%writefile config.yaml\n{text.strip()}"),
        _markdown("cards", "On newer GPUs, by what NVML says: bfloat16 instead of 4 bits."),
        *(_code(name, f"%%writefile {name}.yaml\n{_overlay(name)}") for name in ("l4", "rtx6000")),
        _code("card", CARD),
        _markdown(
            "options",
            "An adapter, truncation by column and a swapped view: with `lora.yaml` in `CONFIG`, below.",
        ),
        _code("lora", LORA.format(inputs=inputs.parent)),
        _markdown(
            "own", "A script of your own as a member, beside the models: with `infer.yaml` in `CONFIG`."
        ),
        _code("script", SCRIPT.format(labels=labels, train=train, id=id_column)),
        _code("script-member", SCRIPT_MEMBER),
        _code("chosen", CHOSEN),
        _markdown("checks", "Can it run here? Are config, data and models right? What fits where?"),
        _code("doctor", 'ensemble("doctor", *CONFIG)'),
        _code("validate", 'ensemble("validate", *CONFIG)'),
        _code("plan", 'ensemble("plan", *CONFIG)'),
        _markdown(
            "rehearsal",
            "How long do 25,000 rows take, which are as long as those of `train.csv`? By a run of a sample. Exit "
            "code 1: they would not be done within `time_limit`, or not fit on the disk.",
        ),
        _code("rehearse", REHEARSE.format(train=train)),
        _markdown("computing", "Exit code 4: a `time_limit` ended it, with a complete submission."),
        _code("run", 'ensemble("run", *CONFIG, good=(0, 4))'),
        _markdown("result", "A look at what will be submitted."),
        _code("look", look),
    ]


def notebook_text() -> str:
    """The notebook as JSON, in the format 4.5."""
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "kaggle": {
            "accelerator": "nvidiaTeslaT4",
            "isGpuEnabled": True,
            "isInternetEnabled": False,
            "language": "python",
            "sourceType": "notebook",
        },
    }
    notebook = {"cells": cells(), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _overlay(name: str) -> str:
    """The keys of configs/kaggle_NAME.yaml, without the comment before them."""
    return (CONFIGS / f"kaggle_{name}.yaml").read_text(encoding="utf-8").partition("\n\n")[2].strip()


def _markdown(name: str, text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": text.splitlines(keepends=True)}


def _code(name: str, text: str) -> dict[str, Any]:
    return {**_markdown(name, text), "cell_type": "code", "execution_count": None, "outputs": []}


if __name__ == "__main__":
    main()
