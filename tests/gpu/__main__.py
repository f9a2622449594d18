"""What only a real GPU can show, as one table: ``make test-gpu``.

Every check runs the command that users run, on checkpoints of real shapes with random weights made on the spot,
and reads run.json.  ``--rehearse`` runs the same checks on tiny models and whatever device there is: it tests
this script and nothing else.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from tests.shapes import GEMMA_2_9B, GEMMA_3_270M, LLAMA_3_8B, make_full_size

ROOT = Path(__file__).resolve().parents[2]
LABELS = ["a", "b", "tie"]
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
# Python runs this at start-up: it lowers what torch may take, below everything under test.
_FRACTION = """
import os, sys
from importlib.abc import MetaPathFinder
class Limit(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "transformers.modeling_layers":
            sys.meta_path.remove(self)
            import torch
            if torch.cuda.is_available():
                torch.cuda.set_per_process_memory_fraction(float(os.environ["TEST_MEMORY_FRACTION"]))
if "TEST_MEMORY_FRACTION" in os.environ:
    sys.meta_path.insert(0, Limit())
"""


@dataclass
class Bench:
    """A folder with models and a table, and the table of results that grows."""

    folder: Path
    is_rehearsal: bool
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def model(self, name: str, shape: Mapping[str, Any]) -> Path:
        folder = self.folder / name
        if not folder.exists():
            if self.is_rehearsal:
                shape = {**shape, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
                         "vocab_size": 1000, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
                         "query_pre_attn_scalar": 16}  # fmt: skip
            make_full_size(folder, shape, LABELS, weights="random")
        return folder

    def run(
        self,
        name: str,
        *members: Mapping[str, Any],
        rows: int = 400,
        environment: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Run members over the table's first rows; the run.json.  A run that fails raises with what it said."""
        config = {
            "data": {"path": str(self.folder / "test.csv")},
            "labels": LABELS,
            "defaults": {"text_column": "text", "max_length": 512},
            "models": [dict(member) for member in members],
            "output_dir": str(self.folder / name),
            "limit": rows,
        }
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "ensemble", "run", f"{name}.yaml"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": f"{self.folder / 'start'}:{ROOT}", **(environment or {})},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(
                done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.stdout[-500:]
            )
        document: dict[str, Any] = json.loads((self.folder / name / "run.json").read_text(encoding="utf-8"))
        return document

    def probabilities(self, run: str, member: str) -> npt.NDArray[np.float64]:
        with (self.folder / run / "predictions" / f"{member}.csv").open(encoding="utf-8") as file:
            return np.array([[float(cell) for cell in row[1:]] for row in list(csv.reader(file))[1:]])

    def write_table(self) -> None:
        chooser = random.Random(0)
        words = "the of and to in is that for it as was with be by on not he his but at".split()
        with (self.folder / "test.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "text"])
            for number in range(2000):  # long-tailed: median 60 words, 99th percentile 400
                length = min(500, max(1, int(chooser.lognormvariate(4.1, 0.8))))
                writer.writerow([number, " ".join(chooser.choices(words, k=length))])
        (self.folder / "start").mkdir()
        (self.folder / "start" / "sitecustomize.py").write_text(_FRACTION, encoding="utf-8")


def release(bench: Bench) -> Iterator[tuple[str, str]]:
    """The memory is back between members, and how soon."""
    small = {"model_name_or_path": str(bench.model("g270", GEMMA_3_270M)), "replicas": 1}
    report = bench.run("release", {"name": "first", **small}, {"name": "second", **small})
    for one in report["releases"] or [{"device": "cpu", "seconds": 0.0, "is_free": True}]:
        yield f"{one['device']}: {one['seconds']:.2f} s", "ok" if one["is_free"] else "FAILED"


def recovery(bench: Bench) -> Iterator[tuple[str, str]]:
    """A worker that may take a small part of the GPU halves its batches and gives the same probabilities."""
    small = {"name": "m", "model_name_or_path": str(bench.model("g270", GEMMA_3_270M)), "dtype": "float32"}
    bench.run("roomy", small)
    greedy = {**small, "max_num_batched_tokens": 65536}
    report = bench.run("tight", greedy, environment={"TEST_MEMORY_FRACTION": "0.05"})
    events = sum(worker["oom_events"] for worker in report["members"][0]["workers"])
    apart = float(np.abs(bench.probabilities("roomy", "m") - bench.probabilities("tight", "m")).max())
    good = (events > 0 or bench.is_rehearsal) and apart < 1e-4
    yield f"{events} out-of-memory events, {apart:.1e} apart", "ok" if good else "FAILED"


def precision(bench: Bench) -> Iterator[tuple[str, str]]:
    """Half precision against float32."""
    small = {"name": "m", "model_name_or_path": str(bench.model("g270", GEMMA_3_270M))}
    dtypes = ("float32", "float16", "bfloat16")
    for dtype in dtypes:
        bench.run(dtype, {**small, "dtype": dtype}, rows=200)
    whole = bench.probabilities("float32", "m")
    for dtype in dtypes[1:]:
        apart = np.abs(bench.probabilities(dtype, "m") - whole)
        yield (
            f"{dtype}: mean {apart.mean():.1e}, largest {apart.max():.1e}",
            "ok" if apart.mean() < 0.05 else "FAILED",
        )


def four_bits(bench: Bench) -> Iterator[tuple[str, str]]:
    """bitsandbytes on the device."""
    small = {"name": "m", "model_name_or_path": str(bench.model("g270", GEMMA_3_270M))}
    bench.run("whole", {**small, "dtype": "float16"}, rows=200)
    report = bench.run("nf4", {**small, "dtype": "float16", "quantization_config": NF4}, rows=200)
    apart = float(np.abs(bench.probabilities("nf4", "m") - bench.probabilities("whole", "m")).mean())
    yield f"{_peaks(report['members'][0])}, mean {apart:.1e} from float16", "ok" if apart < 0.2 else "FAILED"


def forecast(bench: Bench) -> Iterator[tuple[str, str]]:
    """The plan against the measured peak."""
    for name, shape in (("g270", GEMMA_3_270M), ("llama8b", LLAMA_3_8B)):
        report = bench.run(
            f"plan_{name}", {"name": name, "model_name_or_path": str(bench.model(name, shape))}
        )
        yield _against_plan(report)


def two_large(bench: Bench) -> Iterator[tuple[str, str]]:
    """The reason for all of it: Gemma-2-9B, then Llama-3-8B."""
    members = [
        {"name": "gemma9b", "model_name_or_path": str(bench.model("gemma9b", GEMMA_2_9B)), "replicas": 1},
        {"name": "llama8b", "model_name_or_path": str(bench.model("llama8b", LLAMA_3_8B)), "replicas": 1},
    ]
    report = bench.run("large", *members)
    for member in report["members"]:
        worker = member["workers"][0]
        speed = member["tokens"] / max(worker["predict_seconds"], 1e-9)
        text = f"load {worker['load_seconds']:.1f} s, {speed:,.0f} tokens/s, {_peaks(member)}"
        yield f"{member['name']}: {text}", "ok" if member["status"] == "complete" else "FAILED"
    yield _against_plan(report)


def _against_plan(report: Mapping[str, Any]) -> tuple[str, str]:
    texts, verdict = [], "ok"
    for member in report["members"]:
        planned = member["forecast"]["peak_bytes"] - member["forecast"]["context_bytes"]
        measured = max(worker["peak_gpu_memory_bytes"] or 0 for worker in member["workers"])
        if not measured:
            return "no GPU, nothing measured", "skipped"
        texts.append(f"{member['name']}: planned {planned / 2**30:.2f}, measured {measured / 2**30:.2f} GiB")
        verdict = verdict if abs(planned / measured - 1) <= 0.15 else "FAILED"
    return "; ".join(texts), verdict


def _peaks(member: Mapping[str, Any]) -> str:
    worker = member["workers"][0]
    peak = worker["peak_gpu_memory_bytes"] or worker["peak_memory_bytes"]
    return f"{worker['dtype']}, {worker['attn_implementation']}, peak {peak / 2**30:.2f} GiB"


CHECKS: dict[str, Callable[[Bench], Iterator[tuple[str, str]]]] = {
    "release between members": release,
    "out-of-memory recovery": recovery,
    "half precision": precision,
    "4-bit on the device": four_bits,
    "plan against the peak": forecast,
    "two 9B-class members": two_large,
}


def _why_not() -> str:
    """Why nothing can be checked here; empty where it can."""
    missing = [name for name in ("torch", "transformers", "typer", "pynvml") if find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {', '.join(missing)}; install the project there, or set PYTHON="
    import torch

    if not torch.cuda.is_available():
        return f"no GPU that this torch ({torch.__version__}) can use"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny models, any device")
    parser.add_argument("--only", default="", help="checks whose name has this in it")
    arguments = parser.parse_args()
    if not arguments.rehearse and (reason := _why_not()):
        print(f"skipped: {reason}")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="ensemble gpu "))
    bench = Bench(folder, arguments.rehearse)
    bench.write_table()
    print("| check | result | | seconds |\n|---|---|---|---|", flush=True)
    failed = False
    try:
        for name, check in CHECKS.items():
            if arguments.only not in name:
                continue
            began = time.monotonic()
            try:
                for text, verdict in check(bench):
                    failed |= verdict == "FAILED"
                    print(f"| {name} | {text} | {verdict} | {time.monotonic() - began:.0f} |", flush=True)
            except (RuntimeError, OSError, KeyError) as error:
                failed = True
                print(f"| {name} | {error} | FAILED | {time.monotonic() - began:.0f} |", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
