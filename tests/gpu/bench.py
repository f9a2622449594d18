"""Where the checks run: models and tables made on the spot, runs of the command with a time-out each.

Owns what a machine must have for a check (a device's memory, disk, packages, time) and says so where it has not.
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from ensemble.devices import Device
from tests.gpu.verdicts import GIB, Failed, Skip, check_devices
from tests.shapes import GEMMA_2_9B, GEMMA_3_270M, LLAMA_3_8B

ROOT = Path(__file__).resolve().parents[2]
LABELS = ["a", "b", "tie"]
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
# The whole of it stays under eight minutes, with the cleaning up.
DEADLINE_SECONDS = 450.0
RUN_SECONDS = 180.0
# Rows of the even table, a chunk of its own at most; in the long-tailed one there are ``TAILED_ROWS``.
EVEN_ROWS = 120
TAILED_ROWS = 400
# Left free on the disk beside a model.
_DISK_MARGIN_BYTES = 2 * GIB
_MAKE = (
    "import json, sys; from pathlib import Path; from tests.shapes import make_full_size; "
    "make_full_size(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]), weights='random')"
)


@dataclass(frozen=True)
class Model:
    """A shape with what it takes, in GiB: its file, and a GPU's memory in half precision and in 4 bits.

    The memory is the plan's for 16,384 tokens in rows of 512, rounded up.
    """

    name: str
    shape: Mapping[str, Any]
    file_gib: float
    gpu_gib: float
    gpu_4_bits_gib: float


SMALL = Model("g270", GEMMA_3_270M, 0.5, 2, 2)
GEMMA = Model("gemma9b", GEMMA_2_9B, 17.3, 20, 9)
LLAMA = Model("llama8b", LLAMA_3_8B, 14, 17, 9)


def has_bitsandbytes() -> bool:
    return find_spec("bitsandbytes") is not None


class Bench:
    """A folder with models and tables.

    Args:
        gpus: as they were before the first run.
        is_rehearsal: models are tiny, and any device does.
        seconds: for all checks together, from now on.
    """

    def __init__(
        self, folder: Path, gpus: Sequence[Device], is_rehearsal: bool, seconds: float = DEADLINE_SECONDS
    ) -> None:
        self.folder = folder
        self.gpus = tuple(gpus)
        self.is_rehearsal = is_rehearsal
        self._seconds = seconds
        self._ends = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        return self._ends - time.monotonic()

    @property
    def roomiest(self) -> Device | None:
        """The GPU with most memory free; None where there is none."""
        return max(self.gpus, key=lambda gpu: gpu.total_bytes - gpu.used_bytes, default=None)

    def too_late(self) -> str:
        return f"the {self._seconds:.0f} s that all checks have together were over"

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
        folder = self.folder / model.name
        if folder.exists():
            return folder
        shape = dict(model.shape)
        if self.is_rehearsal:
            shape |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 1000,
                      "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
                      "query_pre_attn_scalar": 16}  # fmt: skip
        else:
            free = shutil.disk_usage(self.folder).free - _DISK_MARGIN_BYTES
            if free < model.file_gib * GIB:
                place = f"{self.folder.parent} has {max(0, free) / GIB:.1f} GiB to give; set TMPDIR to a larger one"
                raise Skip(f"{model.name}: needs {model.file_gib:g} GiB of disk, {place}")
        unfinished = self.folder / f"{model.name}.unfinished"
        arguments = [str(unfinished), json.dumps(shape), json.dumps(LABELS)]
        try:
            self.call(f"writing {model.name}", ["-c", _MAKE, *arguments], ROOT, self.seconds_left)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return folder

    def run(
        self,
        name: str,
        *members: Mapping[str, Any],
        table: str = "tailed",
        rows: int = TAILED_ROWS,
        devices: Sequence[str] | None = None,
        gpu_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Run members over a table's first rows; the run.json.

        Args:
            table: ``tailed`` or ``even``.
            gpu_bytes: what torch may take of a GPU; None: all of it.

        Raises:
            Failed: it took too long, ended with an error, or did not use the GPU.
            Skip: the time for all checks was over before its own.
        """
        config = {
            "data": {"path": f"{table}.csv"},
            "labels": LABELS,
            "defaults": {"text_column": "text", "max_length": 512},
            "models": [dict(member) for member in members],
            "output_dir": name,
            "limit": rows,
            **({"devices": list(devices)} if devices else {}),
        }
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self.call(name, ["-m", "ensemble", "run", f"{name}.yaml"], self.folder, RUN_SECONDS, gpu_bytes)
        document: dict[str, Any] = json.loads((self.folder / name / "run.json").read_text(encoding="utf-8"))
        if not self.is_rehearsal:
            check_devices(document)
        return document

    def probabilities(self, run: str, member: str) -> npt.NDArray[np.float64]:
        with (self.folder / run / "predictions" / f"{member}.csv").open(encoding="utf-8") as file:
            return np.array([[float(cell) for cell in row[1:]] for row in list(csv.reader(file))[1:]])

    def write_tables(self) -> None:
        """``tailed`` has a median of 60 words and a 99th percentile of 400; all rows of ``even`` have 501 tokens.

        Batches of a long-tailed table end where padding begins, at about 3,000 tokens; those of an even one are
        as large as they may be, which is what the plan reckons with.  A digit is a token to the tests' tokenizer.
        """
        chooser = random.Random(0)
        words = "the of and to in is that for it as was with be by on not he his but at".split()
        lengths = [min(500, max(1, int(chooser.lognormvariate(4.1, 0.8)))) for _ in range(TAILED_ROWS)]
        self._write_table("tailed", [" ".join(chooser.choices(words, k=length)) for length in lengths])
        self._write_table("even", ["".join(chooser.choices("0123456789", k=500)) for _ in range(EVEN_ROWS)])

    def call(
        self,
        what: str,
        arguments: Sequence[str],
        folder: Path,
        seconds: float,
        gpu_bytes: int | None = None,
    ) -> None:
        """Run Python with these arguments to its end.

        Args:
            what: names it in messages.
            seconds: for this call; less where the time for all checks is over before.
            gpu_bytes: what torch may take of a GPU in it and in its workers; None: all of it.

        Raises:
            Failed: it took longer, or ended with an error.
            Skip: the time for all checks was over before its own.
        """
        limit = min(seconds, self.seconds_left)
        if limit <= 0:
            raise Skip(self.too_late())
        environment = {**os.environ, "TEST_GPU_BYTES": str(gpu_bytes)}
        paths = [str(Path(__file__).with_name("fraction")), str(ROOT), os.environ.get("PYTHONPATH", "")]
        if gpu_bytes is None:
            del environment["TEST_GPU_BYTES"], paths[0]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:  # run() has killed it; its workers go with it
            if self.seconds_left <= 0:
                raise Skip(f"{what}: {self.too_late()} after {limit:.0f} s of it") from None
            raise Failed(f"{what} took more than {limit:.0f} s") from None
        if done.returncode:
            said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
            raise Failed(f"{what} ended with exit code {done.returncode}: ... {said[-400:]}")

    def _write_table(self, name: str, texts: Sequence[str]) -> None:
        with (self.folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "text"])
            writer.writerows(enumerate(texts))
