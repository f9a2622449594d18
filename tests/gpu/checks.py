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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.gpu.place import (
    CAPPED,
    GEMMA,
    GROUPED,
    ROOT,
    RUN_SECONDS,
    SMALL,
    UNCAPPED,
    Failed,
    Skip,
    add_options,
    chosen,
    new_folder,
    why_no_gpu,
)
from bench.gpu.results import Results
from bench.rounds import say
from ensemble.common.gpus import inventory, used_memory
from ensemble.members.huggingface.spec import CAPPED_BLOCKS, FLEX
from tests.gpu.bench import DEADLINE_SECONDS, EVEN_ROWS, TAILED_ROWS, Bench
from tests.gpu.verdicts import (
    Apart,
    Row,
    against_plan,
    follows_turing_rules,
    load_and_speed,
)

Check = Callable[[Bench], Iterator[Row]]

# Mean distance from eager attention in float32. A CPU's was 0.0003 for float16 and 0.003 for bfloat16.
_OFF = {"float32": 1e-5, "float16": 0.005, "bfloat16": 0.02}
_MAX_LENGTH = 2048
# Workers that share a GPU where a check asks for numbers only.
_TOGETHER = 4
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


@takes(20)
def environment(bench: Bench) -> Iterator[Row]:
    """What the machine is, for whoever reads the results elsewhere; and what ``ensemble doctor`` says of it."""
    commands = {
        "nvidia-smi.txt": ["nvidia-smi", "-q"],
        "pip.txt": [sys.executable, "-m", "pip", "list"],
        "torch.txt": [sys.executable, "-c", "import torch; print(torch.__config__.show())"],
        "compiler.txt": ["sh", "-c", "command -v cc gcc clang; cc --version"],  # Triton needs one, for flex
        "memory.txt": ["cat", "/proc/meminfo"],
        "disks.txt": ["df", "-h"],
    }
    texts = {}
    for name, command in commands.items():
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            texts[name] = done.stdout + done.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            texts[name] = str(error)
    with bench.results.keeping(bench.folder / "environment", texts):
        message = bench.call("doctor", ["-m", "ensemble", "doctor"], bench.folder, 60)
        texts["doctor.txt"] = message
    yield " ".join(message.split())[-300:], "ok"


@takes(75)
def attention(bench: Bench) -> Iterator[Row]:
    """Each attention keeps a soft cap and a window, without which all is different; several workers on a GPU."""
    ways = [("float32", "eager"), ("float32", CAPPED_BLOCKS), ("bfloat16", CAPPED_BLOCKS)]
    if bench.is_ampere:
        ways += [("float32", FLEX), ("bfloat16", FLEX)]
    else:
        yield f"{FLEX}: not for this GPU", "skipped"
    if bench.is_ampere and find_spec("flash_attn") is not None:
        ways.append(("bfloat16", "flash_attention_2"))
    else:
        yield "flash-attention 2: not installed, or not for this GPU", "skipped"
    path, uncapped = str(bench.model(CAPPED)), str(bench.model(UNCAPPED))
    members: list[dict[str, Any]] = [
        {"name": f"{kind}-{dtype}", "model_name_or_path": path, "dtype": dtype, "attn_implementation": kind}
        for dtype, kind in ways
    ]
    members.append({**members[0], "name": "uncapped", "model_name_or_path": uncapped})
    members = [{**member, "replicas": 1} for member in members]
    report = bench.measure("attention", *members, rows=200, workers_per_gpu=_TOGETHER)
    eager = bench.probabilities("attention", "eager-float32")
    without = Apart.of(bench.probabilities("attention", "uncapped"), eager)
    for member, (dtype, kind) in zip(report["members"][1:], ways[1:], strict=False):
        ready = member["workers"][0]["ready"]
        used = ready["attn_implementation"]
        apart = Apart.of(bench.probabilities("attention", member["name"]), eager)
        # Two caps that give the same would hide that one is lost.
        is_good = used == kind and without.mean > 3 * apart.mean
        verdict = apart.verdict(mean=_OFF[dtype]) if is_good else "FAILED"
        found = "; ".join(
            (f"{dtype} {used}: {apart}", f"without the cap {without.mean:.1e}", *ready["notes"])
        )
        yield found, verdict


@takes(120)
def same_bytes(bench: Bench) -> Iterator[Row]:
    """The same command twice, and a run that was killed and resumed, write the same bytes with packed rows."""
    rows: dict[str, Any] = {} if bench.is_rehearsal else {"table": "long", "max_length": _MAX_LENGTH}
    member: dict[str, Any] = {"name": "m", "model_name_or_path": str(bench.model(CAPPED)), "replicas": 1}
    if bench.is_ampere:
        member["attn_implementation"] = FLEX
    for name in ("once", "twice"):
        report = bench.measure(name, member, **rows)
        yield f"{name}: {load_and_speed(report['members'][0])}", "ok"  # once it is compiled, it loads sooner
    expected = bench.prediction_bytes("once", "m")
    is_same = bench.prediction_bytes("twice", "m") == expected
    yield f"run twice: {'the same' if is_same else 'other'} bytes", "ok" if is_same else "FAILED"
    bench.kill_after_a_chunk("killed", member, **rows)
    kept = bench.measure("killed", member, **rows)["members"][0]["reused_rows"]
    if kept == TAILED_ROWS:
        yield "killed: all rows were done before", "skipped"
        return
    is_same = bench.prediction_bytes("killed", "m") == expected
    verdict = "ok" if is_same and kept else "FAILED"
    yield f"killed after {kept} rows: {'the same' if is_same else 'other'} bytes", verdict


@takes(40)
def profile(bench: Bench) -> Iterator[Row]:
    """Where the time of a batch of long rows goes, by kernel, packed where that is possible."""
    if bench.settings(GEMMA):
        raise Skip(f"{GEMMA.name} fits in 4 bits only")
    yield from _forward(bench, "profile", bench.model(GEMMA))


@takes(10)
def pair_copies(bench: Bench) -> Iterator[Row]:
    """Copies between each two GPUs bring the bytes that were sent."""
    if len(bench.gpus) < 2:
        raise Skip("fewer than two GPUs")
    yield from _forward(bench, "copies")


@takes(25)
def kernels(bench: Bench) -> Iterator[Row]:
    """Fused attention serves every type, also by a T4's rules, and plans nothing anew for a new shape."""
    yield from _forward(bench, "attention")


@takes(15)
def overflow(bench: Bench) -> Iterator[Row]:
    """Rows that overflow float16 get float32's numbers, and the next chunk starts there."""
    yield from _forward(bench, "overflow")


def _forward(bench: Bench, part: str, model: Path | None = None) -> Iterator[Row]:
    folder = str(model or bench.folder / part)
    printed = bench.call(part, ["-m", "tests.gpu.forward", part, folder], ROOT, RUN_SECONDS)
    for line in printed.splitlines():
        if not line.startswith("["):  # of a library
            continue
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


@takes(3)
def driver(bench: Bench) -> Iterator[Row]:
    """What NVML tells of each GPU in one session, and whether it agrees with itself."""
    if not (result := inventory().gpus):
        raise Skip("NVML shows no GPU")
    uuids = [gpu.uuid for gpu in result]
    began = time.monotonic()
    used = used_memory(uuids)
    first, began = time.monotonic() - began, time.monotonic()
    used_memory(uuids)
    again = time.monotonic() - began
    for gpu in result:
        size = used[gpu.uuid]
        is_right = size is not None and size < gpu.total_bytes
        looks = f"first look {1000 * first:.0f} ms, second {1000 * again:.0f} ms"
        yield f"{gpu.name}: {size} of {gpu.total_bytes} bytes used; {looks}", "ok" if is_right else "FAILED"


@takes(45)
def turing(bench: Bench) -> Iterator[Row]:
    """A T4's rules on whatever GPU is there: it is said to have compute capability 7.5."""
    member = {"name": "m", "model_name_or_path": str(bench.model(GROUPED)), "replicas": 1}
    bench.measure("exact", {**member, "dtype": "float32"}, table="even", rows=EVEN_ROWS)
    report = bench.measure("turing", member, table="even", rows=EVEN_ROWS, capability="7.5")
    yield from follows_turing_rules(report["members"][0], bench.is_rehearsal)
    apart = Apart.of(bench.probabilities("turing", "m"), bench.probabilities("exact", "m"))
    yield str(apart), apart.verdict(mean=_OFF["float16"])
    yield from against_plan(report, bench.is_rehearsal)


# In the order of what a second of each is worth.
CHECKS: dict[str, Check] = {
    "environment": environment,
    "what the driver tells": driver,
    "attention and its cap": attention,
    "same bytes": same_bytes,
    "attention kernels": kernels,
    "float16 overflow": overflow,
    "profile by kernel": profile,
    "copies between GPUs": pair_copies,
    "a T4's rules": turing,
    "a member over two GPUs": spread,
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
    add_options(parser, DEADLINE_SECONDS)
    arguments = parser.parse_args(argv)
    try:
        names = chosen(arguments.only, CHECKS)
    except ValueError as error:
        parser.error(f"--only {error}")
    if not arguments.rehearse and (reason := why_no_gpu()):
        print(f"skipped: {reason}")
        return 0
    gpus = inventory()
    if not arguments.rehearse and not gpus.gpus:
        print(f"FAILED: torch can use a GPU, but {gpus.mask_problem or gpus.note}")
        return 1
    # A rehearsal says nothing about time, and the machine may be slow.
    seconds = arguments.seconds or (3600.0 if arguments.rehearse else DEADLINE_SECONDS)
    results = Results(arguments.results)
    bench = Bench(new_folder(), gpus.gpus, arguments.rehearse, seconds, arguments.models, results)
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
                took = round(time.monotonic() - began, 1)
                results.add(check=name, result=text, verdict=verdict, seconds=took)
                cell = " ".join(text.replace("|", "/").split())
                print(f"| {name} | {cell} | {verdict} | {took:.0f} |", flush=True)
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
