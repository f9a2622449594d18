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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.data import Writer, write_table
from bench.gpu.figures import (
    BY_HAND,
    by_hand_row,
    compared,
    flops,
    gap_rows,
    gpus_row,
    member_row,
    speed_of,
)
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
from ensemble.members.huggingface.spec import CAPPED_BLOCKS, FLEX

DEADLINE_SECONDS = 560.0
# By --only, as the time does not do for all steps.
ON_REQUEST = (
    f"passes of {GEMMA.name}",
    f"4 and 8 bits of {LLAMA.name}",
    f"gaps of {GEMMA.name}",
    f"several GPUs, {MIDDLE.name}",
)
# A rehearsal has tried the same with another model, or in another step.
_REPEATED = (f"4 and 8 bits of {LLAMA.name}", f"attentions of {MIDDLE.name}", f"gaps of {GEMMA.name}")
# What the others are held to, so that it is always measured.
PEAK = "the device's peak"
_SEED = 21
# Tokens of rows, <bos> and all.
LONG, UP_TO_4096, SHORT, _REHEARSED = (1000, 2048), (512, 4096), (1, MAX_LENGTH), (40, 101)
# Operations a second of a device that gets as many rows as a step says; a slower one gets as much fewer, but some.
_FAST = 600e12
_FEWEST_ROWS = 30
_REHEARSAL_ROWS = 24
_ATTENTIONS = (FLEX, CAPPED_BLOCKS, "eager")
# Where compiling hangs, the other steps are to have time.
_COMPILE_SECONDS = 90
# Too small for packed rows, so that a rehearsal compiles nothing.
_REHEARSED_BUDGET = 100
# Beside the budget that is chosen, which is 16,384 tokens where a GPU's memory does not limit it.
_BUDGET = 32_768
_BY_HAND_TOKENS = 16_384


@dataclass(frozen=True)
class Table:
    """The rows of a step: the tokens of each, and at how many members cut them."""

    lengths: Sequence[int]
    max_length: int


class Measuring:
    """The steps, in order of what they are worth; each prints what it found."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._peak_flops = 0.0
        # One of several: members side by side would have no gaps between them.
        self._devices = [place.roomiest.uuid] if place.roomiest is not None else []

    def peak(self) -> None:
        """The device's largest matrix products."""
        (printed,) = self._printed("the peak", "bench.gpu.peak")
        self._peak_flops = float(printed["flops_per_second"])
        reached = f"{self._peak_flops / 1e12:.4g}e12 operations a second"
        self._show(f"{printed['device']}: {reached} in products of {printed['dtype']} matrices.")

    def attention_alone(self) -> None:
        """Attention for capped scores without a model around it, for rows of several lengths."""
        lines = self._printed("attention alone", "bench.gpu.attention")
        self._show("Attention alone:", plain_table(lines))

    def attentions(self, model: Model, rows: int, lengths: tuple[int, int]) -> None:
        """Each attention for capped scores: its speed, its memory against the plan, and the gap before it."""
        members = [self._way(attention) for attention in _ATTENTIONS]
        self._measure("attentions", model, members, self._write_table(rows, lengths))

    def _way(self, attention: str) -> dict[str, Any]:
        budget = {"max_num_batched_tokens": _REHEARSED_BUDGET} if self._place.is_rehearsal else {}
        timeout = {"compile_timeout": _COMPILE_SECONDS} if attention == FLEX else {}
        return {"name": attention, "attn_implementation": attention, **timeout, **budget}

    def against_a_loop(self, model: Model, rows: int) -> None:
        """What is chosen, a larger budget, packed rows of Llama, and a loop as people write it by hand."""
        members: list[dict[str, Any]] = [{"name": "chosen"}]
        if model is LLAMA:
            members.append({**self._way(FLEX), "name": "packed"})
        members.append({"name": f"of-{_BUDGET}", "max_num_batched_tokens": _BUDGET})
        # With short rows the host is what limits the small model.
        table = self._write_table(rows, SHORT if model is SMALL else LONG)
        self._measure("loop", model, members, table, is_by_hand=True)

    def quantized(self, model: Model, rows: int) -> None:
        """A large model in 4 and in 8 bits, also without int8's outliers, for which layers wait."""
        if not has_bitsandbytes():
            raise Skip("bitsandbytes is not installed")
        eight = {"load_in_8bit": True}
        ways = {"nf4": NF4, "int8": eight, "int8-threshold-0": {**eight, "llm_int8_threshold": 0.0}}
        members = [{"name": way, "quantization_config": ways[way]} for way in ways]
        self._measure("quantized", model, members, self._write_table(rows, LONG))

    def gaps(self, model: Model, rows: int) -> None:
        """The gaps between equal members, one of which loads into whole pieces of memory, and ends with them."""
        members: list[dict[str, Any]] = [{"name": "first"}, {"name": "second"}]
        members += [{"name": "whole-pieces", "expandable_segments": False}, {"name": "last"}]
        self._measure("gaps", model, members, self._write_table(rows, LONG))

    def passes(self, model: Model) -> None:
        """What each means of ours gives in forward passes: capped blocks, shortcuts, fused norms."""
        quantization = self._place.settings(model).get("quantization_config")
        arguments = [str(self._place.model(model)), json.dumps(quantization)]
        lines = self._printed(f"passes of {model.name}", "bench.gpu.passes", *arguments)
        self._show(f"{model.name}, each row has what the row before it has:", plain_table(lines))

    def several_gpus(self, model: Model, rows: int) -> None:
        """A member over two GPUs against one, and against a replica in 4 bits on each: what ``plan`` predicts."""
        gpus = [gpu.uuid for gpu in self._place.gpus[:2]]
        if len(gpus) < 2 and not self._place.is_rehearsal:
            raise Skip("it takes two GPUs")
        if self._place.settings(model):
            raise Skip(f"{model.name} fits in 4 bits only, so that one GPU has nothing to compare with")
        table = self._write_table(rows, LONG)
        common = {"model_name_or_path": str(self._place.model(model)), "replicas": 1}
        ways: list[tuple[int, dict[str, Any]]] = [
            (1, {"name": "one-GPU", **common, **({"num_gpus": 1} if gpus else {})}),
            (2, {"name": "over-two", **common, **({"num_gpus": 2} if gpus else {})}),
        ]
        if has_bitsandbytes() and not self._place.is_rehearsal:
            ways.append((2, {"name": "4-bit-each", **common, "replicas": 2, "quantization_config": NF4}))
        report = self._run("several-gpus", [member for _, member in ways], table, gpus)
        alone = speed_of(report["members"][0])
        counted_members = zip(ways, report["members"], strict=True)
        lines = [gpus_row(member, count, alone) for (count, _), member in counted_members]
        self._show(f"{model.name}, {_described(table)}:", plain_table(lines))

    def _show(self, *parts: str) -> None:
        _show(*parts)
        self._place.results.add(printed="\n\n".join(parts))

    def _run(
        self, name: str, members: Sequence[dict[str, Any]], table: Table, devices: Sequence[str]
    ) -> dict[str, Any]:
        rows, length = len(table.lengths), table.max_length
        return self._place.run(name, *members, table="rows", rows=rows, devices=devices, max_length=length)

    def _measure(
        self,
        run: str,
        model: Model,
        ways: Sequence[dict[str, Any]],
        table: Table,
        is_by_hand: bool = False,
    ) -> None:
        """Run a model in several ways, and show a row for each, and one for each gap between two.

        Args:
            is_by_hand: whether they are held against a loop; else they are against the last of them.

        Raises:
            Failed: one of them failed, which does not keep the others from being shown.
        """
        name, path, problem = f"{run}-{model.name}", self._place.model(model), None
        common = {"model_name_or_path": str(path), "replicas": 1, **self._place.settings(model)}
        if self._place.is_rehearsal:  # each takes the time of its imports
            ways = ways[: 1 if is_by_hand and model is not LLAMA else 2]
        try:
            report = self._run(name, [{**common, **way} for way in ways], table, self._devices)
        except Failed as error:
            report, problem = self._place.report(name), error
        done = [member for member in report.get("members", ()) if member["status"] == "complete"]
        if problem and not done:
            raise problem
        shape = json.loads((path / "config.json").read_text(encoding="utf-8"))
        parameters = done[0]["workers"][-1]["ready"]["parameters"]
        per_token = flops(shape, parameters, table.lengths) / sum(table.lengths)
        lines = [member_row(member, per_token, self._peak_flops) for member in done]
        if is_by_hand:
            job = {"model": str(path), "table": str(self._place.folder / "rows.csv"), "attention": "sdpa"}
            sizes = {"rows": len(table.lengths), "max_length": table.max_length, "tokens": _BY_HAND_TOKENS}
            job_text = json.dumps(job | sizes | {"quantization": common.get("quantization_config")})
            try:
                (found,) = self._printed("the hand-made loop", "bench.gpu.by_hand", job_text)
                lines.append(by_hand_row(found, "sdpa", _BY_HAND_TOKENS, per_token, self._peak_flops))
            except (Failed, Skip) as error:  # it may well need more memory
                self._show(f"No figure of a hand-made loop: {error}.")
        lines = compared(lines, BY_HAND if is_by_hand else ways[-1]["name"])
        self._show(f"{model.name}, {_described(table)}, members one after the other:", plain_table(lines))
        if gaps := gap_rows(report):
            self._show("Seconds between two of them:", plain_table(gaps))
        if problem:
            raise problem

    def _printed(self, what: str, module: str, *arguments: str) -> list[dict[str, Any]]:
        """Return the JSON that a module prints, which sees the device that is measured."""
        visible = {"CUDA_VISIBLE_DEVICES": self._devices[0]} if self._devices else None
        printed = self._place.call(what, ["-m", module, *arguments], ROOT, RUN_SECONDS, visible)
        return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]

    def _write_table(self, rows: int, lengths: tuple[int, int]) -> Table:
        """Write rows of so many tokens; those of ``SHORT`` are as people have them."""
        speed = min(1.0, self._peak_flops / _FAST)
        rows = max(_FEWEST_ROWS, round(rows * speed))
        if self._place.is_rehearsal:
            rows, lengths = _REHEARSAL_ROWS, lengths if lengths == SHORT else _REHEARSED
        words = counted(self._place.model(SMALL), made_up_words())
        tokens = dict(zip(words.words, words.tokens, strict=True))
        writer, chooser = Writer(words, _SEED), random.Random(_SEED)
        texts = writer.single(rows) if lengths == SHORT else []
        while len(texts) < rows:
            texts.append(writer.text(chooser.randint(lengths[0], lengths[1] - 1)))
        # With <bos>, cut as the members cut them.
        counts = [min(lengths[1], 1 + sum(tokens[word] for word in text.split())) for text in texts]
        write_table(self._place.folder / "rows.csv", ["text"], [[text] for text in texts])
        return Table(counts, lengths[1])


def _described(table: Table) -> str:
    return f"{len(table.lengths):,} rows of {min(table.lengths):,} to {max(table.lengths):,} tokens"


def steps(measuring: Measuring) -> list[tuple[str, float, Callable[[], None]]]:
    """What is measured: its name, the seconds without which it is not begun, and how."""
    loop, quantized, passes = measuring.against_a_loop, measuring.quantized, measuring.passes
    return [
        (PEAK, 20, measuring.peak),
        ("attention alone", 45, measuring.attention_alone),
        # Long enough for the next one's imports to be done when a member ends.
        (f"attentions of {GEMMA.name}", 150, partial(measuring.attentions, GEMMA, 300, LONG)),
        (f"{LLAMA.name} against a loop", 80, partial(loop, LLAMA, 200)),
        (f"4 and 8 bits of {GEMMA.name}", 75, partial(quantized, GEMMA, 100)),
        (f"attentions of {MIDDLE.name}", 60, partial(measuring.attentions, MIDDLE, 150, UP_TO_4096)),
        (f"passes of {LLAMA.name}", 45, partial(passes, LLAMA)),
        (f"{ENCODER.name} against a loop", 45, partial(loop, ENCODER, 2000)),
        (f"{SMALL.name} against a loop", 40, partial(loop, SMALL, 20_000)),
        (f"passes of {GEMMA.name}", 70, partial(passes, GEMMA)),
        (f"4 and 8 bits of {LLAMA.name}", 75, partial(quantized, LLAMA, 100)),
        (f"gaps of {GEMMA.name}", 160, partial(measuring.gaps, GEMMA, 500)),
        (f"several GPUs, {MIDDLE.name}", 150, partial(measuring.several_gpus, MIDDLE, 4000)),
    ]


def step_names(is_rehearsal: bool) -> list[str]:
    nowhere = Place(Path(), (), is_rehearsal, 0)
    return [name for name, _, _ in steps(Measuring(nowhere))]


def names_to_run(only: str, is_rehearsal: bool) -> list[str]:
    """The steps that ``--only`` names; without it all that fit into the time together.

    Raises:
        ValueError: there is none of a name.
    """
    left_out = () if only else _REPEATED if is_rehearsal else ON_REQUEST
    return [name for name in chosen(only, step_names(is_rehearsal)) if name not in left_out]


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
