"""What only a real GPU can show, as one table: ``make test-gpu``.

Every check runs the command that users run, on checkpoints of real shapes with random weights made on the spot,
and reads run.json.  ``--rehearse`` runs the same checks on tiny models and whatever device there is: it tests
this script and nothing else.  A check is ``skipped`` only for what the machine lacks, time included, with the
reason in its row; ``--only`` names those that a short loan is for.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.place import (
    CAPPED,
    GEMMA,
    GIB,
    GROUPED,
    LLAMA,
    NF4,
    ROOT,
    RUN_SECONDS,
    SMALL,
    UNCAPPED,
    Failed,
    Skip,
    chosen,
    has_bitsandbytes,
    why_no_gpu,
)
from bench.rounds import say
from ensemble.common.gpus import inventory, telemetry, used_memory
from tests.gpu.bench import DEADLINE_SECONDS, EVEN_ROWS, Bench
from tests.gpu.verdicts import (
    Apart,
    Row,
    against_plan,
    follows_turing_rules,
    load_and_speed,
    releases,
    too_little,
)

Check = Callable[[Bench], Iterator[Row]]

# Mean distance from float32. A CPU's was 0.0003 and 0.003 for these shapes and weights.
_HALF_PRECISION = {"float16": 0.005, "bfloat16": 0.02}
# Two batches of 16,384 tokens: enough for the peak, and a T4 gets through them in 4 bits.
_LARGE_ROWS = 64
# What a check is thought to take that does not say.
USUAL_SECONDS = 20


def takes(seconds: int) -> Callable[[Check], Check]:
    """What a check takes on an H200: without as much time left it is not begun."""

    def decorate(check: Check) -> Check:
        check.__dict__["seconds"] = seconds
        return check

    return decorate


def seconds_of(check: Check) -> int:
    return int(getattr(check, "seconds", USUAL_SECONDS))


@takes(30)
def release(bench: Bench) -> Iterator[Row]:
    """The memory is back between members that share a GPU, and how soon."""
    small = {"model_name_or_path": str(bench.model(SMALL)), "replicas": 1}
    devices = [bench.roomiest.uuid] if bench.roomiest is not None else None
    members = ({"name": "first", **small}, {"name": "second", **small})
    report = bench.measure("release", *members, rows=50, devices=devices)
    used_before = {gpu.uuid: gpu.used_bytes for gpu in bench.gpus}
    yield from releases(report, used_before, bench.is_rehearsal)


@takes(35)
def recovery(bench: Bench) -> Iterator[Row]:
    """A worker that has too little memory for a batch halves it, and gives the same probabilities."""
    small: dict[str, Any] = {"name": "m", "model_name_or_path": str(bench.model(SMALL)), "dtype": "float32"}
    small |= {"batch_size": EVEN_ROWS, "replicas": 1}
    roomy = bench.measure("roomy", small, table="even", rows=EVEN_ROWS)
    allowed = too_little(roomy["members"][0])
    # A tiny model's batch is less than the smallest piece that torch takes of a GPU.
    gpu_bytes = 1 << 40 if bench.is_rehearsal else allowed
    tight = bench.measure("tight", small, table="even", rows=EVEN_ROWS, gpu_bytes=gpu_bytes)
    events = sum(worker["oom_events"] for worker in tight["members"][0]["workers"])
    apart = Apart.of(bench.probabilities("roomy", "m"), bench.probabilities("tight", "m"))
    verdict = apart.verdict(largest=1e-4) if events or bench.is_rehearsal else "FAILED"
    yield f"{events} out-of-memory events within {allowed / GIB:.2f} GiB, {apart}", verdict


@takes(75)
def precision(bench: Bench) -> Iterator[Row]:
    """Each dtype, attention and quantization against eager attention in float32.

    Random weights lose more in 4 bits than trained ones: on a CPU rows were 0.10 apart, strangers 0.25.
    """
    ways: dict[str, dict[str, Any]] = {
        f"{dtype} {attention}": {"dtype": dtype, "attn_implementation": attention}
        for dtype in ("float32", *_HALF_PRECISION)
        for attention in ("eager", "sdpa")
    }
    if has_bitsandbytes():
        ways["nf4"] = {"dtype": "float16", "quantization_config": NF4}
        ways["int8"] = {"dtype": "float16", "quantization_config": {"load_in_8bit": True}}
    else:
        yield "4 and 8 bits: bitsandbytes is not installed", "skipped"
    if bench.can_use_flash_attention:
        ways["bfloat16 flash"] = {"dtype": "bfloat16", "attn_implementation": "flash_attention_2"}
    else:
        yield "flash-attention 2: not installed, or not for this GPU", "skipped"
    names = {way: way.replace(" ", "-") for way in ways}
    path = str(bench.model(SMALL))
    members = ({"name": names[way], "model_name_or_path": path, "replicas": 1, **ways[way]} for way in ways)
    bench.measure("ways", *members, rows=200)
    exact = bench.probabilities("ways", names["float32 eager"])
    for way in list(ways)[1:]:
        apart = Apart.of(bench.probabilities("ways", names[way]), exact)
        if "quantization_config" in ways[way]:
            verdict = apart.verdict()
        elif ways[way]["dtype"] == "float32":
            verdict = apart.verdict(largest=1e-4)
        else:
            verdict = apart.verdict(mean=_HALF_PRECISION[ways[way]["dtype"]])
        yield f"{way}: {apart}", verdict


@takes(20)
def forecast(bench: Bench) -> Iterator[Row]:
    """The plan against the measured peak, for a small model."""
    member = {"name": "g270", "model_name_or_path": str(bench.model(SMALL)), "replicas": 1}
    yield from against_plan(bench.measure("plan", member, table="even", rows=EVEN_ROWS), bench.is_rehearsal)


@takes(140)
def large(bench: Bench) -> Iterator[Row]:
    """The reason for all of it: Gemma-2-9B, then Llama-3-8B; in 4 bits where the GPU is too small for them."""
    members = []
    for model in (GEMMA, LLAMA):
        try:
            settings = bench.settings(model)
            path = str(bench.model(model))
        except Skip as reason:
            yield str(reason), "skipped"
            continue
        members.append({"name": model.name, "model_name_or_path": path, "replicas": 1, **settings})
    if not members:
        return
    report = bench.measure("large", *members, table="even", rows=_LARGE_ROWS)
    for member in report["members"]:
        text = f"{member['name']}: {load_and_speed(member)}"
        yield text, "ok" if member["status"] == "complete" else "FAILED"
    yield from against_plan(report, bench.is_rehearsal)


@takes(30)
def kernels(bench: Bench) -> Iterator[Row]:
    """Fused attention serves every type, also by a T4's rules, and plans nothing anew for a new shape."""
    yield from _forward(bench, "attention")


@takes(20)
def overflow(bench: Bench) -> Iterator[Row]:
    """Rows that overflow float16 get float32's numbers, and the next chunk starts there."""
    yield from _forward(bench, "overflow")


def _forward(bench: Bench, part: str) -> Iterator[Row]:
    printed = bench.call(part, ["-m", "tests.gpu.forward", part, str(bench.folder / part)], ROOT, RUN_SECONDS)
    for line in printed.splitlines():
        text, verdict = json.loads(line)
        yield text, verdict


@takes(20)
def spread(bench: Bench) -> Iterator[Row]:
    """A member over two GPUs gives one GPU's probabilities; its speed says whether the two took turns."""
    if len(bench.gpus) < 2:
        raise Skip("fewer than two GPUs")
    small = {"name": "m", "model_name_or_path": str(bench.model(SMALL)), "dtype": "float32", "replicas": 1}
    for name, count in (("together", 1), ("spread", 2)):
        report = bench.measure(name, {**small, "num_gpus": count})
        yield f"{count} GPUs: {load_and_speed(report['members'][0])}", "ok"
    apart = Apart.of(bench.probabilities("spread", "m"), bench.probabilities("together", "m"))
    yield str(apart), apart.verdict(largest=1e-4)


@takes(5)
def driver(bench: Bench) -> Iterator[Row]:
    """What NVML tells of each GPU in one session, and whether it agrees with itself."""
    if not (found := inventory().gpus):
        raise Skip("NVML shows no GPU")
    uuids = [gpu.uuid for gpu in found]
    began = time.monotonic()
    used, told = used_memory(uuids), telemetry(uuids)
    first, began = time.monotonic() - began, time.monotonic()
    used_memory(uuids), telemetry(uuids)
    again = time.monotonic() - began
    for gpu in found:
        seen, size = told[gpu.uuid], used[gpu.uuid]
        is_right = size is not None and size < gpu.total_bytes and seen is not None
        unknown = seen is None or None in (seen.sm_clock_mhz, seen.temperature_celsius, seen.power_watts)
        text = f"{gpu.name}: {seen}; first look {1000 * first:.0f} ms, second {1000 * again:.0f} ms"
        yield text, "FAILED" if not is_right else "skipped" if unknown else "ok"


@takes(40)
def soft_cap(bench: Bench) -> Iterator[Row]:
    """What is taken by default for Gemma-2 keeps its soft cap; one so small that all is different without."""
    path, uncapped = str(bench.model(CAPPED)), str(bench.model(UNCAPPED))
    members: list[dict[str, Any]] = [{"name": "eager", "dtype": "float32", "attn_implementation": "eager"}]
    members += [{"name": f"default-{dtype}", "dtype": dtype} for dtype in ("float32", "bfloat16")]
    members = [{"model_name_or_path": path, "replicas": 1, **member} for member in members]
    members.append({**members[0], "name": "uncapped", "model_name_or_path": uncapped})
    bench.measure("cap", *members, rows=200)
    eager = bench.probabilities("cap", "eager")
    without = Apart.of(bench.probabilities("cap", "uncapped"), eager)
    for dtype, limit in (("float32", 1e-5), ("bfloat16", _HALF_PRECISION["bfloat16"])):
        apart = Apart.of(bench.probabilities("cap", f"default-{dtype}"), eager)
        # Two caps that give the same would hide that one is lost.
        tells = without.mean > 3 * apart.mean
        verdict = apart.verdict(mean=limit) if tells else "FAILED"
        yield f"{dtype}: {apart}; without the cap {without.mean:.1e}", verdict


@takes(30)
def turing(bench: Bench) -> Iterator[Row]:
    """A T4's rules on whatever GPU is there: it is said to have compute capability 7.5."""
    member = {"name": "m", "model_name_or_path": str(bench.model(GROUPED)), "replicas": 1}
    bench.measure("exact", {**member, "dtype": "float32"}, table="even", rows=EVEN_ROWS)
    report = bench.measure("turing", member, table="even", rows=EVEN_ROWS, capability="7.5")
    yield from follows_turing_rules(report["members"][0], bench.is_rehearsal)
    apart = Apart.of(bench.probabilities("turing", "m"), bench.probabilities("exact", "m"))
    yield str(apart), apart.verdict(mean=_HALF_PRECISION["float16"])
    yield from against_plan(report, bench.is_rehearsal)


CHECKS: dict[str, Check] = {
    "release between members": release,
    "out-of-memory recovery": recovery,
    "types, attention, quantization": precision,
    "plan against the peak": forecast,
    "two 9B-class members": large,
    "attention kernels": kernels,
    "float16 overflow": overflow,
    "a member over two GPUs": spread,
    "soft cap": soft_cap,
    "a T4's rules": turing,
    "what the driver tells": driver,
}


def rows_of(check: Check, bench: Bench) -> Iterator[Row]:
    """A check's rows; whatever ends it early becomes one."""
    needs = 0 if bench.is_rehearsal else seconds_of(check)
    if bench.seconds_left <= needs:
        left = max(0.0, bench.seconds_left)
        yield (
            f"{left:.0f} s are left of those for everything, and it takes about {seconds_of(check)}",
            "skipped",
        )
        return
    try:
        yield from check(bench)
    except Skip as reason:
        yield str(reason), "skipped"
    except Failed as error:
        yield str(error), "FAILED"
    except Exception as error:  # whatever it is, the other checks are to run
        yield f"{type(error).__name__}: {error}", "FAILED"


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0, or 1 where a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny models, any device")
    parser.add_argument("--only", default="", help="checks whose names have one of these words in them: a,b")
    arguments = parser.parse_args(argv)
    try:
        names = chosen(arguments.only, CHECKS)
    except ValueError as error:
        parser.error(f"--only {error}")
    if not arguments.rehearse and (reason := why_no_gpu()):
        print(f"skipped: {reason}")
        return 0
    found = inventory()
    if not arguments.rehearse and not found.gpus:
        print(f"FAILED: torch can use a GPU, but {found.mask_problem or found.note}")
        return 1
    # A rehearsal says nothing about time, and the machine may be slow.
    seconds = 3600.0 if arguments.rehearse else DEADLINE_SECONDS
    bench = Bench(Path(tempfile.mkdtemp(prefix="ensemble gpu ")), found.gpus, arguments.rehearse, seconds)
    failed = False
    try:
        bench.write_tables()
        total = sum(seconds_of(CHECKS[name]) for name in names)
        say(f"{len(names)} checks, about {total} s on an H200; {bench.seconds_left:.0f} s are given")
        print("| check | result | | seconds |\n|---|---|---|---|", flush=True)
        for name in names:
            check, began = CHECKS[name], time.monotonic()
            say(f"{name}: about {seconds_of(check)} s, {bench.seconds_left:.0f} s left ...")
            for text, verdict in rows_of(check, bench):
                failed |= verdict == "FAILED"
                cell = " ".join(text.replace("|", "/").split())
                print(f"| {name} | {cell} | {verdict} | {time.monotonic() - began:.0f} |", flush=True)
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
