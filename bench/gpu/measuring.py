"""How much of a GPU this project uses, in under ten minutes: ``make bench-gpu``, or ``python -m bench.gpu``.

Checkpoints of real shapes with random weights are made on the spot and run by the command that users run, on rows
of 1,000 to 2,048 tokens, beside a hand-made loop.  Prints markdown.  ``--rehearse`` does all of it with tiny models
on whatever device there is: it tests this program alone.  What the machine lacks, or what there is no time for, is
skipped, and said to be.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.data import Writer, write_table
from bench.gpu.figures import by_hand_row, compared, flops, gpus_row, member_row, speed_of
from bench.gpu.place import (
    ENCODER,
    GEMMA,
    LLAMA,
    MAX_LENGTH,
    MIDDLE,
    NF4,
    ROOT,
    RUN_SECONDS,
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

DEADLINE_SECONDS = 560.0
SEVERAL = f"several GPUs, {MIDDLE.name}"
ON_REQUEST = (SEVERAL,)  # by --only, as the time does not do for all steps
# What the others are held to, so that it is always measured.
PEAK = "the device's peak"
_SEED = 21
# Tokens of rows as people have them, and of a rehearsal's.
LONG = (1000, 2046)
_REHEARSED = (40, 100)
_LONG_LENGTH = 2048
# Rows for a device of 600e12 operations a second; a slower one gets as much fewer, but some.
_ROWS = {SMALL.name: 20_000, MIDDLE.name: 4000, GEMMA.name: 200, LLAMA.name: 300, ENCODER.name: 2000}
_FAST = 600e12
_FEWEST_ROWS = 30
_REHEARSAL_ROWS = 24
# Beside the budget that is chosen, which is 16,384 tokens where a GPU's memory does not limit it.
_BUDGETS = (8192, 32_768, 65_536)
_BY_HAND_TOKENS = 16_384
_CHOSEN = "chosen"


class Measuring:
    """The steps, in order of what they are worth; each prints what it found."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._peak_flops = 0.0
        self._lengths: list[int] = []
        # By model: operations for a token, and the tokens/s of the best budget.
        self._per_token: dict[str, float] = {}
        # One of several: members side by side would have no gaps between them.
        self._devices = [place.roomiest.uuid] if place.roomiest is not None else []

    def peak(self) -> None:
        """The device's largest matrix products."""
        printed = json.loads(
            self._place.call("the peak", ["-m", "bench.gpu.peak"], ROOT, 60, self._visible())
        )
        self._peak_flops = float(printed["flops_per_second"])
        reached = f"{self._peak_flops / 1e12:.4g}e12 operations a second"
        self._show(f"{printed['device']}: {reached} in products of {printed['dtype']} matrices.")

    def against_a_loop(self, model: Model) -> None:
        """The budget of tokens that is chosen, others, and a loop as people write it by hand, on the same rows."""
        rows, length = self._write_table(model)
        settings, path = self._place.settings(model), self._place.model(model)
        member = {"model_name_or_path": str(path), "replicas": 1, **settings}
        members = [{"name": _CHOSEN, **member}]
        for budget in _BUDGETS[:1] if self._place.is_rehearsal else _BUDGETS:
            members.append({"name": f"of-{budget}", **member, "max_num_batched_tokens": budget})
        report = self._run(f"budgets-{model.name}", members, rows, length)
        lines = self._rows_of(report, model)
        shape = json.loads((path / "config.json").read_text(encoding="utf-8"))
        # As the makers of Gemma-2 tell people to.
        attention = "eager" if shape.get("attn_logit_softcapping") else "sdpa"
        job = {"model": str(path), "table": str(self._place.folder / "rows.csv"), "rows": rows}
        job |= {"max_length": length, "tokens": _BY_HAND_TOKENS, "attention": attention}
        job["quantization"] = settings.get("quantization_config")
        try:
            arguments = ["-m", "bench.gpu.by_hand", json.dumps(job)]
            printed = self._place.call("the hand-made loop", arguments, ROOT, RUN_SECONDS, self._visible())
            measured = json.loads(printed.splitlines()[-1])
            per_token, peak = self._per_token[model.name], self._peak_flops
            lines.append(by_hand_row(measured, attention, _BY_HAND_TOKENS, per_token, peak))
        except (Failed, Skip) as error:  # it may well need more memory
            self._show(f"No figure of a hand-made loop: {error}.")
        names = [member["name"] for member in members]
        lines = compared(lines, names)
        kind = "short" if model is SMALL else "long"
        self._show(f"{model.name}, {rows:,} {kind} rows, members one after the other:", plain_table(lines))

    def passes(self, model: Model) -> None:
        """What each means of ours gives in forward passes: capped blocks, shortcuts, fused norms."""
        quantization = self._place.settings(model).get("quantization_config")
        path = str(self._place.model(model))
        arguments = ["-m", "bench.gpu.passes", path, json.dumps(quantization)]
        printed = self._place.call(f"passes of {model.name}", arguments, ROOT, RUN_SECONDS, self._visible())
        lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        self._show(f"{model.name}, each row has what the row before it has:", plain_table(lines))

    def several_gpus(self, model: Model) -> None:
        """A member over two GPUs against one, and against a replica in 4 bits on each: what ``plan`` predicts."""
        gpus = [gpu.uuid for gpu in self._place.gpus[:2]]
        if len(gpus) < 2 and not self._place.is_rehearsal:
            raise Skip("it takes two GPUs")
        if self._place.settings(model):
            raise Skip(f"{model.name} fits in 4 bits only, so that one GPU has nothing to compare with")
        rows, length = self._write_table(model)
        path = str(self._place.model(model))
        common = {"model_name_or_path": path, "replicas": 1}
        ways: list[tuple[int, dict[str, Any]]] = [
            (1, {"name": "one-GPU", **common, **({"num_gpus": 1} if gpus else {})}),
            (2, {"name": "over-two", **common, **({"num_gpus": 2} if gpus else {})}),
        ]
        if has_bitsandbytes() and not self._place.is_rehearsal:
            ways.append((2, {"name": "4-bit-each", **common, "replicas": 2, "quantization_config": NF4}))
        members = [member for _, member in ways]
        report = self._run("several-gpus", members, rows, length, gpus)
        alone = speed_of(report["members"][0])
        counted_members = zip(ways, report["members"], strict=True)
        lines = [gpus_row(member, count, alone) for (count, _), member in counted_members]
        self._show(f"{rows:,} long rows, {model.name}:", plain_table(lines))

    def _show(self, *parts: str) -> None:
        _show(*parts)
        self._place.results.add(printed="\n\n".join(parts))

    def _run(
        self,
        name: str,
        members: Sequence[dict[str, Any]],
        rows: int,
        length: int,
        devices: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        devices = self._devices if devices is None else devices
        return self._place.run(name, *members, table="rows", rows=rows, devices=devices, max_length=length)

    def _rows_of(self, report: dict[str, Any], model: Model) -> list[dict[str, Any]]:
        """Return a row for each member of a run of one model."""
        shape = json.loads((self._place.model(model) / "config.json").read_text(encoding="utf-8"))
        parameters = report["members"][0]["workers"][0]["ready"]["parameters"]
        per_token = flops(shape, parameters, self._lengths) / sum(self._lengths)
        self._per_token[model.name] = per_token
        gaps = report.get("idle_gaps", ())
        return [member_row(member, per_token, self._peak_flops, gaps) for member in report["members"]]

    def _visible(self) -> dict[str, str] | None:
        return {"CUDA_VISIBLE_DEVICES": self._devices[0]} if self._devices else None

    def _write_table(self, model: Model) -> tuple[int, int]:
        """Write rows for a model; return how many, and the tokens at which members cut them.

        The small model's are short, so that the host is what limits it.
        """
        speed = min(1.0, self._peak_flops / _FAST)
        rows = max(_FEWEST_ROWS, round(_ROWS[model.name] * speed))
        shortest, longest = LONG
        if self._place.is_rehearsal:
            rows, (shortest, longest) = _REHEARSAL_ROWS, _REHEARSED
        words = counted(self._place.model(SMALL), made_up_words())
        tokens = dict(zip(words.words, words.tokens, strict=True))
        writer, chooser = Writer(words, _SEED), random.Random(_SEED)
        if model is SMALL:
            length, texts = MAX_LENGTH, writer.single(rows)
        else:
            length = _LONG_LENGTH
            texts = [writer.text(chooser.randint(shortest, longest)) for _ in range(rows)]
        # With <bos>, cut as the members cut them.
        self._lengths = [min(length, 1 + sum(tokens[word] for word in text.split())) for text in texts]
        write_table(self._place.folder / "rows.csv", ["text"], [[text] for text in texts])
        return rows, length


def steps(measuring: Measuring) -> list[tuple[str, float, Callable[[], None]]]:
    """What is measured: its name, the seconds without which it is not begun, and how."""
    parts: list[tuple[str, float, Callable[[], None]]] = [(PEAK, 20, measuring.peak)]
    for model, seconds in ((GEMMA, 70), (ENCODER, 25), (LLAMA, 50)):
        parts.append((f"passes of {model.name}", seconds, partial(measuring.passes, model)))
    for model, seconds in ((GEMMA, 120), (LLAMA, 90), (ENCODER, 70), (SMALL, 55)):
        parts.append((f"{model.name} against a loop", seconds, partial(measuring.against_a_loop, model)))
    parts.append((SEVERAL, 150, partial(measuring.several_gpus, MIDDLE)))
    return parts


def step_names(is_rehearsal: bool) -> list[str]:
    nowhere = Place(Path(), (), is_rehearsal, 0)
    return [name for name, _, _ in steps(Measuring(nowhere))]


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
    driver = inventory()
    if not options.rehearse and not driver.gpus:
        _show(f"Nothing was measured: torch can use a GPU, but {driver.mask_problem or driver.note}.")
        return 1
    folder, results = new_folder(), Results(options.results)
    seconds = options.seconds or (3600.0 if options.rehearse else DEADLINE_SECONDS)
    place = Place(folder, driver.gpus, options.rehearse, seconds, options.models, results)
    failed = False
    try:
        _show(f"{time.strftime('%Y-%m-%d')}. {machine()}. {versions()}. `python -m bench.gpu`.")
        planned = [step for step in steps(Measuring(place)) if step[0] in {PEAK, *names}]
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
    """Carry out a step and return whether it did not fail; what there is no time or no room for is skipped."""
    began = time.monotonic()
    problem, is_good = "", True
    if place.seconds_left < (0 if place.is_rehearsal else needs):
        left = max(0, place.seconds_left)
        problem = f"Skipped: {name}: {left:.0f} s are left, and it takes up to {needs:.0f}."
    else:
        say(f"{name}: up to {needs:.0f} s, {place.seconds_left:.0f} s left ...")
        try:
            step()
        except Skip as reason:
            problem = f"Skipped: {name}: {reason}."
        except Exception as error:  # whatever it is, the other steps are to run
            kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
            problem, is_good = f"FAILED: {name}: {kind}{error}.", False
    seconds = time.monotonic() - began
    place.results.add(step=name, problem=problem, seconds=round(seconds, 1))
    if problem:
        _show(problem)
    say(f"{name}: {seconds:.0f} s")
    return is_good


def _show(*parts: str) -> None:
    print("\n\n".join(parts), end="\n\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
