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
    Model,
    Skip,
    add_options,
    chosen,
    has_bitsandbytes,
    new_folder,
    why_no_gpu,
)
from bench.gpu.results import Results
from bench.rounds import say
from ensemble.common.gpus import inventory, used_memory
from ensemble.members.footprint import GPU_TOKEN_BUDGET, RESERVE_SHARE
from tests.gpu.bench import DEADLINE_SECONDS, EVEN_ROWS, TAILED_ROWS, Bench
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
# Of 1,500 tokens on average: a few batches of 16,384 tokens.
_LARGE_ROWS = 100
_MAX_LENGTH = 2048
# A small model in float32 with eager attention: weights, two processes' CUDA contexts, and half of a batch.
_FEW_ROWS_BYTES = int(3.4 * GIB)
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


@takes(20)
def small(bench: Bench) -> Iterator[Row]:
    """The smallest run there is, through the command that users run."""
    member = {"name": "m", "model_name_or_path": str(bench.model(SMALL)), "replicas": 1}
    report = bench.measure("small", member, rows=200)
    yield load_and_speed(report["members"][0]), "ok"


@takes(110)
def same_bytes(bench: Bench) -> Iterator[Row]:
    """The same command twice, and a run that was killed and resumed, write the same bytes."""
    rows = _long_table(bench)
    ways: dict[str, dict[str, Any]] = {"half": {}}
    if has_bitsandbytes():
        ways["nf4"] = {"quantization_config": NF4}
    for way, settings in ways.items():
        member = {"name": "m", "model_name_or_path": str(bench.model(SMALL)), "replicas": 1, **settings}
        bench.measure(f"{way}-once", member, **rows)
        expected = bench.prediction_bytes(f"{way}-once", "m")
        bench.measure(f"{way}-twice", member, **rows)
        is_same = bench.prediction_bytes(f"{way}-twice", "m") == expected
        yield f"{way}, run twice: {'the same' if is_same else 'other'} bytes", "ok" if is_same else "FAILED"
        bench.kill_after_a_chunk(f"{way}-killed", member, **rows)
        report = bench.measure(f"{way}-killed", member, **rows)
        is_same = bench.prediction_bytes(f"{way}-killed", "m") == expected
        kept = report["members"][0]["reused_rows"]
        if kept == TAILED_ROWS:
            yield f"{way}, killed: all rows were done before", "skipped"
            continue
        verdict = "ok" if is_same and kept else "FAILED"
        yield f"{way}, killed after {kept} rows: {'the same' if is_same else 'other'} bytes", verdict


@takes(60)
def kept_room(bench: Bench) -> Iterator[Row]:
    """A resumed run takes the same batches although another process now holds more of the GPU's memory.

    It holds so much that few rows fit: where a whole batch fits, a little more or less memory changes nothing.
    """
    member = {"name": "m", "model_name_or_path": str(bench.model(SMALL)), "replicas": 1}
    # Rows of 2,048 tokens take most memory so.
    member |= {"dtype": "float32", "attn_implementation": "eager"}
    rows = _long_table(bench)
    taken = 0
    if bench.roomiest is not None:
        total = bench.roomiest.total_bytes
        taken = max(0, total - bench.roomiest.used_bytes - int(RESERVE_SHARE * total) - _FEW_ROWS_BYTES)
        rows["devices"] = [bench.roomiest.uuid]
    with bench.memory_taken(taken):
        report = bench.measure("alone", member, **rows)
        bench.kill_after_a_chunk("beside", member, **rows)
    with bench.memory_taken(taken + (300 << 20)):
        kept = bench.measure("beside", member, **rows)["members"][0]["reused_rows"]
    is_same = bench.prediction_bytes("beside", "m") == bench.prediction_bytes("alone", "m")
    batch = max(worker["ready"]["token_budget"] for worker in report["members"][0]["workers"])
    text = f"{'the same' if is_same else 'other'} bytes after {kept} rows, in batches of {batch:,} tokens"
    if kept == TAILED_ROWS or (batch >= GPU_TOKEN_BUDGET and not bench.is_rehearsal):
        yield f"{text}: all rows were done before, or memory was no limit", "skipped"
        return
    yield text, "ok" if is_same and kept else "FAILED"


def _long_table(bench: Bench) -> dict[str, Any]:
    """Return rows as people have them, long enough for a run on a GPU to be killed before its end."""
    return {} if bench.is_rehearsal else {"table": "long", "max_length": _MAX_LENGTH}


@takes(30)
def release(bench: Bench) -> Iterator[Row]:
    """The memory is back between members that share a GPU, and how soon."""
    small = {"model_name_or_path": str(bench.model(SMALL)), "replicas": 1}
    devices = [bench.roomiest.uuid] if bench.roomiest is not None else None
    members = ({"name": "first", **small}, {"name": "second", **small})
    bench.measure("release", *members, rows=50, devices=devices)
    log = (bench.folder / "release" / "logs" / "run.log").read_text(encoding="utf-8")
    used_before = {gpu.uuid: gpu.used_bytes for gpu in bench.gpus}
    yield from releases(log, used_before, bench.is_rehearsal)


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
    events = sum(worker["counters"]["oom_events"] for worker in tight["members"][0]["workers"])
    apart = Apart.of(bench.probabilities("roomy", "m"), bench.probabilities("tight", "m"))
    verdict = apart.verdict(largest=1e-4) if events or bench.is_rehearsal else "FAILED"
    yield f"{events} out-of-memory events within {allowed / GIB:.2f} GiB, {apart}", verdict


@takes(45)
def precision(bench: Bench) -> Iterator[Row]:
    """Each dtype, attention and quantization against eager attention in float32, several workers on a GPU.

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
    bench.measure("ways", *members, rows=200, workers_per_gpu=_TOGETHER)
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


@takes(75)
def large(bench: Bench) -> Iterator[Row]:
    """The reason for all of it: Gemma-2-9B, then Llama-3-8B, on long rows; in 4 bits where the GPU is too small."""
    members = []
    for model in (GEMMA, LLAMA):
        try:
            settings = bench.settings(model)
            path = str(bench.model(model))
        except Skip as reason:
            yield str(reason), "skipped"
            continue
        members.append({"name": model.name, "model_name_or_path": path, "replicas": 1, **settings})
    yield from _long_rows(bench, "large", members)


def quantized(model: Model) -> Check:
    """Return the check of a large model in 4 and in 8 bits, also without int8's outliers, for which layers wait."""

    @takes(75)
    def check(bench: Bench) -> Iterator[Row]:
        if not has_bitsandbytes():
            raise Skip("bitsandbytes is not installed")
        eight = {"load_in_8bit": True}
        ways = {"nf4": NF4, "int8": eight, "int8-threshold-0": {**eight, "llm_int8_threshold": 0.0}}
        common = {"model_name_or_path": str(bench.model(model)), "replicas": 1}
        members = [
            {"name": f"{model.name}-{way}", **common, "quantization_config": settings}
            for way, settings in ways.items()
        ]
        yield from _long_rows(bench, f"quantized-{model.name}", members)

    return check


def _long_rows(bench: Bench, run: str, members: Sequence[dict[str, Any]]) -> Iterator[Row]:
    if not members:
        return
    report = bench.measure(run, *members, rows=_LARGE_ROWS, **_long_table(bench))
    for member in report["members"]:
        text = f"{member['name']}: {load_and_speed(member)}"
        yield text, "ok" if member["status"] == "complete" else "FAILED"
    yield from against_plan(report, bench.is_rehearsal)


@takes(40)
def profile(bench: Bench) -> Iterator[Row]:
    """Where the time of a batch of long rows goes, by kernel."""
    for model in (GEMMA, LLAMA):
        if bench.settings(model):
            yield f"{model.name}: fits in 4 bits only", "skipped"
            continue
        for text, verdict in _forward(bench, "profile", bench.model(model)):
            yield f"{model.name}: {text}", verdict


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


@takes(30)
def soft_cap(bench: Bench) -> Iterator[Row]:
    """What is taken by default for Gemma-2 keeps its soft cap; one so small that all is different without."""
    path, uncapped = str(bench.model(CAPPED)), str(bench.model(UNCAPPED))
    members: list[dict[str, Any]] = [{"name": "eager", "dtype": "float32", "attn_implementation": "eager"}]
    members += [{"name": f"default-{dtype}", "dtype": dtype} for dtype in ("float32", "bfloat16")]
    members = [{"model_name_or_path": path, "replicas": 1, **member} for member in members]
    members.append({**members[0], "name": "uncapped", "model_name_or_path": uncapped})
    bench.measure("cap", *members, rows=200, workers_per_gpu=_TOGETHER)
    eager = bench.probabilities("cap", "eager")
    without = Apart.of(bench.probabilities("cap", "uncapped"), eager)
    for dtype, limit in (("float32", 1e-5), ("bfloat16", _HALF_PRECISION["bfloat16"])):
        apart = Apart.of(bench.probabilities("cap", f"default-{dtype}"), eager)
        # Two caps that give the same would hide that one is lost.
        tells = without.mean > 3 * apart.mean
        verdict = apart.verdict(mean=limit) if tells else "FAILED"
        yield f"{dtype}: {apart}; without the cap {without.mean:.1e}", verdict


@takes(45)
def turing(bench: Bench) -> Iterator[Row]:
    """A T4's rules on whatever GPU is there: it is said to have compute capability 7.5."""
    member = {"name": "m", "model_name_or_path": str(bench.model(GROUPED)), "replicas": 1}
    bench.measure("exact", {**member, "dtype": "float32"}, table="even", rows=EVEN_ROWS)
    report = bench.measure("turing", member, table="even", rows=EVEN_ROWS, capability="7.5")
    yield from follows_turing_rules(report["members"][0], bench.is_rehearsal)
    apart = Apart.of(bench.probabilities("turing", "m"), bench.probabilities("exact", "m"))
    yield str(apart), apart.verdict(mean=_HALF_PRECISION["float16"])
    yield from against_plan(report, bench.is_rehearsal)


# In the order of what a second of each is worth.
CHECKS: dict[str, Check] = {
    "environment": environment,
    "what the driver tells": driver,
    "a small run": small,
    "attention kernels": kernels,
    "float16 overflow": overflow,
    "same bytes": same_bytes,
    "kept room": kept_room,
    "two 9B-class members": large,
    "profile by kernel": profile,
    "4 and 8 bits, gemma9b": quantized(GEMMA),
    "4 and 8 bits, llama8b": quantized(LLAMA),
    "copies between GPUs": pair_copies,
    "types, attention, quantization": precision,
    "release between members": release,
    "soft cap": soft_cap,
    "out-of-memory recovery": recovery,
    "plan against the peak": forecast,
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
