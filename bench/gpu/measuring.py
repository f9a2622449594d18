"""How much of a GPU this project uses, in under nine minutes: ``make bench-gpu``, or ``python -m bench.gpu``.

Checkpoints of real shapes with random weights are made on the spot and run by the command that users run.  Prints
markdown.  ``--rehearse`` does all of it with tiny models on whatever device there is: it tests this program alone.
What the machine lacks, or what there is no time for, is skipped, and said to be.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.data import Writer, write_table
from bench.gpu.figures import Speed, gpus_row, member_row, speed_of, sweep_row
from bench.gpu.place import (
    GEMMA,
    MAX_LENGTH,
    MIDDLE,
    NF4,
    ROOT,
    SMALL,
    Failed,
    Model,
    Place,
    Skip,
    add_options,
    chosen,
    has_bitsandbytes,
    new_folder,
    why_no_gpu,
)
from bench.gpu.results import Results
from bench.machine import machine, versions
from bench.rounds import say
from bench.table import plain_table
from bench.tokenizer import counted, made_up_words
from ensemble.common.gpus import inventory

DEADLINE_SECONDS = 510.0
SEVERAL = f"several GPUs, {MIDDLE.name}"
ON_REQUEST = (SEVERAL,)  # by --only, as the time does not do for all steps
# What the others are held to, so that it is always measured.
PEAK = "the device's peak"
_SEED = 21
# Rows for a device of 600e12 operations a second; a slower one gets as much fewer, but some.
_ROWS = {"members": 3000, SMALL.name: 20_000, MIDDLE.name: 4000, GEMMA.name: 800}
_FAST = 600e12
_FEWEST_ROWS = 200
_REHEARSAL_ROWS = 24
_BUDGETS = (2048, 4096, 8192, 32_768, 65_536)
_FEW_BUDGETS = (4096, 32_768)


class Measuring:
    """The steps, in order of what they are worth; each prints what it found."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._peak: dict[str, Any] = {}
        self._lengths: list[int] = []
        # One of several: members side by side would have no gaps between them.
        self._devices = [place.roomiest.uuid] if place.roomiest is not None else []

    def peak(self) -> None:
        """The device's largest matrix products."""
        visible = {"CUDA_VISIBLE_DEVICES": self._devices[0]} if self._devices else None
        said = self._place.call("the peak", ["-m", "bench.gpu.peak"], ROOT, 60, visible)
        self._peak = json.loads(said)
        flops, dtype = self._peak["flops_per_second"], self._peak["dtype"]
        reached = f"{flops / 1e12:.4g}e12 operations a second"
        self._show(f"{self._peak['device']}: {reached} in products of {dtype} matrices.")

    def members(self) -> None:
        """Three sizes one after the other, and the largest in 4 bits, in one run."""
        members: list[dict[str, Any]] = []
        for model in (SMALL, MIDDLE) if self._place.is_rehearsal else (SMALL, MIDDLE, GEMMA):
            try:
                settings, path = self._place.settings(model), str(self._place.model(model))
            except Skip as reason:
                self._show(f"Skipped: {reason}.")
                continue
            name = f"{model.name}-4bit" if settings else model.name
            members.append({"name": name, "model_name_or_path": path, "replicas": 1, **settings})
            if model is GEMMA and not settings and has_bitsandbytes():
                members.append({**members[-1], "name": f"{name}-4bit", "quantization_config": NF4})
        if not has_bitsandbytes():
            self._show("Skipped: 4 bits, for which bitsandbytes is not installed.")
        if not members:
            raise Skip("no model fits here")
        rows = self._rows("members")
        self._write_table(rows)
        report = self._place.run("members", *members, table="rows", rows=rows, devices=self._devices)
        lengths, peak = self._lengths[:rows], float(self._peak["flops_per_second"])
        gaps = report.get("idle_gaps", ())
        paths = {member["name"]: Path(member["model_name_or_path"]) for member in members}
        shapes = {name: json.loads((path / "config.json").read_text()) for name, path in paths.items()}
        lines = [member_row(one, shapes[one["name"]], lengths, peak, gaps) for one in report["members"]]
        self._show(f"{rows:,} long-tailed rows, one run, members one after the other:", plain_table(lines))

    def sweep(self, model: Model) -> None:
        """The budget of tokens that is chosen, against others."""
        if self._place.settings(model):
            raise Skip(f"{model.name} fits in 4 bits only")
        path, rows = str(self._place.model(model)), self._rows(model.name)
        self._write_table(rows)
        budgets = _FEW_BUDGETS if model is GEMMA else _BUDGETS
        member = {"model_name_or_path": path, "replicas": 1}
        members = [{"name": "chosen", **member}]
        for budget in budgets[:1] if self._place.is_rehearsal else budgets:
            members.append({"name": f"of-{budget}", **member, "max_num_batched_tokens": budget})
        name = f"sweep-{model.name}"
        report = self._place.run(name, *members, table="rows", rows=rows, devices=self._devices)
        speeds: list[Speed] = [speed_of(one) for one in report["members"]]
        self._show(plain_table([{"rows": rows, **sweep_row(model.name, speeds)}]))

    def several_gpus(self, model: Model) -> None:
        """A member over two GPUs against one, and against a replica in 4 bits on each: what ``plan`` predicts."""
        gpus = [gpu.uuid for gpu in self._place.gpus[:2]]
        if len(gpus) < 2 and not self._place.is_rehearsal:
            raise Skip("it takes two GPUs")
        if self._place.settings(model):
            raise Skip(f"{model.name} fits in 4 bits only, so that one GPU has nothing to compare with")
        path, rows = str(self._place.model(model)), self._rows("members")
        self._write_table(rows)
        one = {"model_name_or_path": path, "replicas": 1}
        ways: list[tuple[int, dict[str, Any]]] = [
            (1, {"name": "one-GPU", **one, **({"num_gpus": 1} if gpus else {})}),
            (2, {"name": "over-two", **one, **({"num_gpus": 2} if gpus else {})}),
        ]
        if has_bitsandbytes() and not self._place.is_rehearsal:
            ways.append((2, {"name": "4-bit-each", **one, "replicas": 2, "quantization_config": NF4}))
        members = [member for _, member in ways]
        report = self._place.run("several-gpus", *members, table="rows", rows=rows, devices=gpus)
        alone = speed_of(report["members"][0])
        lines = [gpus_row(one, count, alone) for (count, _), one in zip(ways, report["members"], strict=True)]
        self._show(f"{rows:,} long-tailed rows, {model.name}:", plain_table(lines))

    def _show(self, *parts: str) -> None:
        _show(*parts)
        self._place.results.add(printed="\n\n".join(parts))

    def _rows(self, what: str) -> int:
        if self._place.is_rehearsal:
            return _REHEARSAL_ROWS
        speed = min(1.0, float(self._peak["flops_per_second"]) / _FAST)
        return max(_FEWEST_ROWS, round(_ROWS[what] * speed))

    def _write_table(self, rows: int) -> None:
        words = counted(self._place.model(SMALL), made_up_words())
        tokens = dict(zip(words.words, words.tokens, strict=True))
        texts = Writer(words, _SEED).single(rows)
        # With <bos>, cut as the members cut them.
        self._lengths = [min(MAX_LENGTH, 1 + sum(tokens[word] for word in text.split())) for text in texts]
        write_table(self._place.folder / "rows.csv", ["text"], [[text] for text in texts])


def steps(measuring: Measuring, is_rehearsal: bool) -> list[tuple[str, float, Callable[[], None]]]:
    """What is measured: its name, the seconds without which it is not begun, and how."""
    found: list[tuple[str, float, Callable[[], None]]] = [
        (PEAK, 20, measuring.peak),
        ("members", 150, measuring.members),
        (f"budgets of {SMALL.name}", 110, lambda: measuring.sweep(SMALL)),
    ]
    found.append((SEVERAL, 150, lambda: measuring.several_gpus(MIDDLE)))
    if not is_rehearsal:
        found.append((f"budgets of {MIDDLE.name}", 100, lambda: measuring.sweep(MIDDLE)))
        found.append((f"budgets of {GEMMA.name}", 90, lambda: measuring.sweep(GEMMA)))
    return found


def step_names(is_rehearsal: bool) -> list[str]:
    nowhere = Place(Path(), (), is_rehearsal, 0)
    return [name for name, _, _ in steps(Measuring(nowhere), is_rehearsal)]


def names_to_run(only: str, is_rehearsal: bool) -> list[str]:
    """The steps that ``--only`` names; without it all that fit into the time together.

    Raises:
        ValueError: there is none of a name.
    """
    names = chosen(only, step_names(is_rehearsal))
    return names if only or is_rehearsal else [name for name in names if name not in ON_REQUEST]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 1 where a step failed or nothing could be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    add_options(parser, DEADLINE_SECONDS)
    options = parser.parse_args(arguments)
    try:
        names = names_to_run(options.only, options.rehearse)
    except ValueError as error:
        parser.error(f"--only {error}")
    if not options.rehearse and (reason := why_no_gpu()):
        _show(f"Nothing was measured: {reason}. With --rehearse this program tries itself out on any device.")
        return 1
    found = inventory()
    if not options.rehearse and not found.gpus:
        _show(f"Nothing was measured: torch can use a GPU, but {found.mask_problem or found.note}.")
        return 1
    folder, results = new_folder(), Results(options.results)
    seconds = options.seconds or (3600.0 if options.rehearse else DEADLINE_SECONDS)
    place = Place(folder, found.gpus, options.rehearse, seconds, options.models, results)
    failed = False
    try:
        _show(f"{time.strftime('%Y-%m-%d')}. {machine()}. {versions()}. `python -m bench.gpu`.")
        planned = [step for step in steps(Measuring(place), options.rehearse) if step[0] in {PEAK, *names}]
        total = sum(needs for _, needs, _ in planned)
        say(f"{len(planned)} steps, up to {total:.0f} s on an H200; {place.seconds_left:.0f} s are given")
        for name, needs, step in planned:
            failed |= not _try(name, needs, step, place)
            if failed and name == PEAK:
                break  # nothing to compare with
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


def _try(name: str, needs: float, step: Callable[[], None], place: Place) -> bool:
    """Whether the step did not fail; what there is no time or no room for is skipped."""
    if place.seconds_left < (0 if place.is_rehearsal else needs):
        _show(
            f"Skipped: {name}: {max(0, place.seconds_left):.0f} s are left, and it takes up to {needs:.0f}."
        )
        return True
    began = time.monotonic()
    say(f"{name}: up to {needs:.0f} s, {place.seconds_left:.0f} s left ...")
    try:
        step()
    except Skip as reason:
        _show(f"Skipped: {name}: {reason}.")
    except Exception as error:  # whatever it is, the other steps are to run
        kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
        _show(f"FAILED: {name}: {kind}{error}.")
        return False
    say(f"{name}: {time.monotonic() - began:.0f} s")
    return True


def _show(*parts: str) -> None:
    print("\n\n".join(parts), end="\n\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
