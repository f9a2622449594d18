"""Where a GPU is measured: models made on the spot, runs of the command with a time-out each, one deadline for all.

Owns what a machine must have for a step (a device's memory, disk, packages, time) and says so where it has not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from bench.gpu.results import LOG_BYTES, Results
from bench.shapes import (
    BGE_RERANKER_M3,
    GEMMA_2_2B,
    GEMMA_2_9B,
    GEMMA_3_270M,
    LLAMA_3_8B,
    make_full_size,
)
from ensemble.common.gpus import Device

ROOT = Path(__file__).resolve().parents[2]
LABELS = ["a", "b", "tie"]
MAX_LENGTH = 512
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
GIB = 1 << 30
AMPERE = (8, 0)
RUN_SECONDS = 180.0
# Left free on the disk beside a model.
_DISK_MARGIN_BYTES = 2 * GIB
_PREFIX = "ensemble gpu "
_MAKE = (
    "import json, sys; from pathlib import Path; from bench.shapes import make_full_size; "
    "make_full_size(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]), weights='random')"
)
_TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 4096,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 16,
}


def add_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Add the options that the checks and the benchmark share."""
    parser.add_argument("--rehearse", action="store_true", help="tiny models, any device")
    parser.add_argument(
        "--seconds", type=float, help=f"for everything together ({seconds:.0f}; 3600 for a rehearsal)"
    )
    parser.add_argument("--only", default="", help="parts whose names have one of these words in them: a,b")
    parser.add_argument("--models", type=Path, help="where made checkpoints are kept for the next time")
    parser.add_argument("--results", type=Path, help="what each part and run leaves, written as it ends")


class Skip(Exception):
    """This machine lacks what a step needs; the message says what."""


class Failed(Exception):
    """A step cannot be carried out, or not on what a run has left; the message says why."""


@dataclass(frozen=True)
class Model:
    """A shape with what it takes, in GiB: its file, and a GPU's memory in half precision and in 4 bits.

    The memory is the plan's for 16,384 tokens in rows of 512, rounded up.  ``kept`` are the numbers of the shape
    that a rehearsal's tiny model has as well.
    """

    name: str
    shape: Mapping[str, Any]
    file_gib: float
    gpu_gib: float
    gpu_4_bits_gib: float
    kept: Mapping[str, Any] = field(default_factory=dict)


SMALL = Model("g270", GEMMA_3_270M, 0.5, 2, 2)
MIDDLE = Model("gemma2b", GEMMA_2_2B, 4.9, 8, 5)
GEMMA = Model("gemma9b", GEMMA_2_9B, 17.3, 20, 9)
LLAMA = Model("llama8b", LLAMA_3_8B, 14, 17, 9)
ENCODER = Model("encoder", BGE_RERANKER_M3, 1.1, 3, 3)
# Gemma-2 with few layers, half of which see few tokens, and scores far beyond its cap; the same without such a cap.
_SHARP = {
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 1,
    "attn_logit_softcapping": 0.5,
    "sliding_window": 40,
}
CAPPED = Model("capped", GEMMA_2_2B, 2, 3, 3, _SHARP)
UNCAPPED = Model("uncapped", GEMMA_2_2B, 2, 3, 3, {**_SHARP, "attn_logit_softcapping": 1e4})
# Llama with few layers: four queries share a key.
GROUPED = Model("grouped", LLAMA_3_8B, 3.5, 5, 4, {"num_hidden_layers": 4})


def chosen(only: str, names: Iterable[str]) -> list[str]:
    """Those of the names that have one of the comma-separated words in them; all of them without words.

    Raises:
        ValueError: a word is in no name.
    """
    names, words = list(names), [word.strip() for word in only.split(",") if word.strip()]
    if unknown := [word for word in words if not any(word in name for name in names)]:
        raise ValueError(f"{', '.join(unknown)}: not here; there are: {', '.join(names)}")
    return [name for name in names if not words or any(word in name for word in words)]


def has_bitsandbytes() -> bool:
    return find_spec("bitsandbytes") is not None


def why_no_gpu() -> str:
    """Return why this Python can use no GPU here; empty where it can."""
    import torch

    if not torch.cuda.is_available():
        return f"no GPU that this torch ({torch.__version__}) can use"
    return ""


def python_path(before: str | None = os.environ.get("PYTHONPATH")) -> str:
    """Return a PYTHONPATH that has this checkout, behind what is there already."""
    return os.pathsep.join(filter(None, (before, str(ROOT))))


def remove_leftovers(folder: Path) -> None:
    """Remove the folders of measurings whose processes are gone, such as killed ones, from a temporary folder."""
    for left in folder.glob(f"{_PREFIX}*"):
        process = left.name.removeprefix(_PREFIX).partition(" ")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(left, ignore_errors=True)


def new_folder() -> Path:
    """Return a new folder for runs and models, within the temporary folder."""
    remove_leftovers(Path(tempfile.gettempdir()))
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()} "))


class Place:
    """A folder with models and runs.

    Args:
        gpus: as they were before the first run.
        is_rehearsal: models are tiny, and any device does.
        seconds: for everything together, from now on.
        models: where models are kept for the next time; None: in ``folder``.
        results: keeps what runs leave.
    """

    def __init__(
        self,
        folder: Path,
        gpus: Sequence[Device],
        is_rehearsal: bool,
        seconds: float,
        models: Path | None = None,
        results: Results | None = None,
    ) -> None:
        self.folder = folder
        self.models = models or folder
        self.models.mkdir(parents=True, exist_ok=True)
        self.results = results or Results(None)
        self.gpus = tuple(gpus)
        self.is_rehearsal = is_rehearsal
        self._seconds = seconds
        # Members and lengths whose plan has been kept: it takes seconds, and says the same of a repeated run.
        self._planned: list[tuple[Sequence[Mapping[str, Any]], int]] = []
        self._ends = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        return self._ends - time.monotonic()

    @property
    def roomiest(self) -> Device | None:
        """The GPU with most memory free; None where there is none."""
        return max(self.gpus, key=lambda gpu: gpu.total_bytes - gpu.used_bytes, default=None)

    @property
    def is_ampere(self) -> bool:
        """Whether all GPUs have the compute capability that flash-attention 2 and flex take, 8.0 or a later one."""
        able = [gpu.compute_capability is not None and gpu.compute_capability >= AMPERE for gpu in self.gpus]
        return bool(able) and all(able)

    def too_late(self) -> str:
        return f"the {self._seconds:.0f} s for everything were over"

    def settings(self, model: Model) -> dict[str, Any]:
        """How a model fits on one GPU here: as it is, or in 4 bits.

        Raises:
            Skip: not at all.
        """
        if self.is_rehearsal or self.roomiest is None:
            return {}
        free = self.roomiest.total_bytes - self.roomiest.used_bytes
        if free >= model.gpu_gib * GIB:
            return {}
        there = f"{self.roomiest.name} has {free / GIB:.1f} GiB free"
        if free < model.gpu_4_bits_gib * GIB:
            raise Skip(f"{model.name}: needs {model.gpu_4_bits_gib:g} GiB even in 4 bits, {there}")
        if not has_bitsandbytes():
            raise Skip(f"{model.name}: needs {model.gpu_gib:g} GiB, or bitsandbytes for 4 bits; {there}")
        return {"quantization_config": NF4}

    def model(self, model: Model) -> Path:
        """The model's folder, written at its first use.

        Raises:
            Skip: the disk is too small, or writing took longer than there is time.
        """
        shape = {**model.shape, **model.kept}
        if self.is_rehearsal:
            shape = {**model.shape, **_TINY, **model.kept}
        # The name says what is in it, so that a kept model of another shape is not taken for this one.
        digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:8]
        folder = self.models / f"{model.name}-{digest}"
        if folder.exists():
            return folder
        unfinished = self.models / f"{folder.name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        if self.is_rehearsal:  # a process of its own would take longer to start than these take to write
            make_full_size(unfinished, shape, LABELS, dtype="float32", weights="random")
            return unfinished.rename(folder)
        free = shutil.disk_usage(self.models).free - _DISK_MARGIN_BYTES
        if free < model.file_gib * GIB:
            place = f"{self.models} has {max(0, free) / GIB:.1f} GiB to give; name a larger one with --models"
            raise Skip(f"{model.name}: needs {model.file_gib:g} GiB of disk, {place}")
        arguments = [str(unfinished), json.dumps(shape), json.dumps(LABELS)]
        try:
            self.call(f"writing {model.name}", ["-c", _MAKE, *arguments], ROOT, self.seconds_left)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return folder

    def write_config(
        self,
        name: str,
        members: Sequence[Mapping[str, Any]],
        table: str,
        rows: int,
        devices: Sequence[str] | None = None,
        max_length: int = MAX_LENGTH,
        workers_per_gpu: int = 1,
    ) -> None:
        """Write a run's config, NAME.yaml; the arguments are those of ``run``."""
        config = {
            "data": {"path": f"{table}.csv"},
            "labels": LABELS,
            "defaults": {"text_column": "text", "max_length": max_length},
            "models": [dict(member) for member in members],
            "output_dir": name,
            "report": False,
            "limit": rows,
            "max_workers_per_gpu": workers_per_gpu,
            **({"devices": list(devices)} if devices else {}),
        }
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def run(
        self,
        name: str,
        *members: Mapping[str, Any],
        table: str,
        rows: int,
        devices: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        max_length: int = MAX_LENGTH,
        workers_per_gpu: int = 1,
    ) -> dict[str, Any]:
        """Run members over a table's first rows; the run.json.

        Args:
            table: name of a CSV in this folder, without its ending.
            environment: beside this process's own.
            workers_per_gpu: more than one where speeds do not matter, which saves the time of imports.

        Raises:
            Failed: it took too long, ended with an error, or did not use the GPU.
            Skip: the time for everything was over before its own.
        """
        self.write_config(name, members, table, rows, devices, max_length, workers_per_gpu)
        # A slow GPU is given more time together, and more for each run.
        limit = self.seconds_left if self.is_rehearsal else max(RUN_SECONDS, self._seconds / 3)
        texts: dict[str, str] = {}
        with self.results.keeping(self.folder / name, texts):
            try:
                if self.results.folder is not None and (members, max_length) not in self._planned:
                    self._planned.append((members, max_length))
                    plan = ["-m", "ensemble", "plan", f"{name}.yaml"]
                    texts["plan.txt"] = self.call(f"plan of {name}", plan, self.folder, limit, environment)
                command = ["-m", "ensemble", "run", f"{name}.yaml"]
                texts["printed.txt"] = self.call(name, command, self.folder, limit, environment)
            except Failed as error:
                texts["error.txt"] = str(error)
                raise
        document = self.report(name)
        if not self.is_rehearsal:
            check_devices(document)
        return document

    def report(self, run: str) -> dict[str, Any]:
        """Return a run's run.json; {} where it has none."""
        path = self.folder / run / "run.json"
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return report

    def call(
        self,
        what: str,
        arguments: Sequence[str],
        folder: Path,
        seconds: float,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Run Python with these arguments to its end; what it printed.

        Args:
            what: names it in messages.
            seconds: for this call; less where the time for everything is over before.
            environment: beside this process's own.

        Raises:
            Failed: it took longer, or ended with an error.
            Skip: the time for everything was over before its own.
        """
        limit = min(seconds, self.seconds_left)
        if limit <= 0:
            raise Skip(self.too_late())
        variables = {**os.environ, **(environment or {})}
        variables["PYTHONPATH"] = python_path(variables.get("PYTHONPATH"))
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=folder,
                env=variables,
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired as error:  # run() has killed it; its workers go with it
            self._keep_output(what, error.stdout, error.stderr)
            if self.seconds_left <= 0:
                raise Skip(f"{what}: {self.too_late()} after {limit:.0f} s of it") from None
            raise Failed(f"{what} took more than {limit:.0f} s") from None
        if done.returncode:
            self._keep_output(what, done.stdout, done.stderr)
            said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
            raise Failed(f"{what} ended with exit code {done.returncode}: ... {said[-400:]}")
        return done.stdout

    def _keep_output(self, what: str, *streams: str | bytes | None) -> None:
        """Keep the ends of what a call printed that did not succeed; streams that were cut off are bytes."""
        texts = [
            stream.decode(errors="replace") if isinstance(stream, bytes) else stream or ""
            for stream in streams
        ]
        self.results.add(failed=what, printed=[text[-LOG_BYTES:] for text in texts])


def check_devices(report: Mapping[str, Any]) -> None:
    """Hold every worker of a run to a GPU.

    Raises:
        Failed: one ran elsewhere, or none ran.
    """
    for member in report["members"]:
        names = [worker["ready"]["device"] for worker in member["workers"]]
        if not names or any(name in (None, "cpu") for name in names):
            notes = "; ".join(note for worker in member["workers"] for note in worker["ready"]["notes"])
            raise Failed(
                f"{member['name']} ran on {names or 'nothing'}, not on a GPU ({notes or 'no notes'})"
            )
