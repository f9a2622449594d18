"""What only a real GPU can show, as one table: ``make test-gpu``.

Every check runs the command that users run, on checkpoints of real shapes with random weights made on the spot,
and reads run.json.  ``--rehearse`` runs the same checks on tiny models and whatever device there is: it tests
this script and nothing else.  A check is ``skipped`` only for what the machine lacks, with the reason in its row.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.gpu.place import (
    GEMMA,
    GIB,
    LLAMA,
    NF4,
    ROOT,
    RUN_SECONDS,
    SMALL,
    Failed,
    Skip,
    has_bitsandbytes,
    why_no_gpu,
)
from ensemble.common.gpus import driver_session, inventory, telemetry, used_memory
from tests.gpu.bench import EVEN_ROWS, Bench
from tests.gpu.verdicts import (
    Apart,
    Row,
    against_plan,
    load_and_speed,
    releases,
    too_little,
)

# Mean distance from float32. A CPU's was 0.0003 and 0.003 for these shapes and weights.
_HALF_PRECISION = {"float16": 0.005, "bfloat16": 0.02}
# Two batches of 16,384 tokens: enough for the peak, and a T4 gets through them in 4 bits.
_LARGE_ROWS = 64


def release(bench: Bench) -> Iterator[Row]:
    """The memory is back between members that share a GPU, and how soon."""
    small = {"model_name_or_path": str(bench.model(SMALL)), "replicas": 1}
    devices = [bench.roomiest.uuid] if bench.roomiest is not None else None
    members = ({"name": "first", **small}, {"name": "second", **small})
    report = bench.measure("release", *members, rows=50, devices=devices)
    used_before = {gpu.uuid: gpu.used_bytes for gpu in bench.gpus}
    yield from releases(report, used_before, bench.is_rehearsal)


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


def precision(bench: Bench) -> Iterator[Row]:
    """Half precision against float32."""
    small = {"name": "m", "model_name_or_path": str(bench.model(SMALL))}
    bench.measure("float32", {**small, "dtype": "float32"}, rows=200)
    for dtype, limit in _HALF_PRECISION.items():
        bench.measure(dtype, {**small, "dtype": dtype}, rows=200)
        apart = Apart.of(bench.probabilities(dtype, "m"), bench.probabilities("float32", "m"))
        yield f"{dtype}: {apart}", apart.verdict(mean=limit)


def four_bits(bench: Bench) -> Iterator[Row]:
    """bitsandbytes on the device, against the same weights in float16.

    Random weights lose more in 4 bits than trained ones: on a CPU rows were 0.10 apart, strangers 0.25.
    """
    if not has_bitsandbytes():
        raise Skip("bitsandbytes is not installed")
    small = {"name": "m", "model_name_or_path": str(bench.model(SMALL)), "dtype": "float16"}
    bench.measure("whole", small, rows=200)
    report = bench.measure("nf4", {**small, "quantization_config": NF4}, rows=200)
    apart = Apart.of(bench.probabilities("nf4", "m"), bench.probabilities("whole", "m"))
    yield f"{load_and_speed(report['members'][0])}; {apart}", apart.verdict()


def forecast(bench: Bench) -> Iterator[Row]:
    """The plan against the measured peak, for a small model."""
    member = {"name": "g270", "model_name_or_path": str(bench.model(SMALL)), "replicas": 1}
    yield from against_plan(bench.measure("plan", member, table="even", rows=EVEN_ROWS), bench.is_rehearsal)


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


def kernels(bench: Bench) -> Iterator[Row]:
    """Fused attention serves every type, also by a T4's rules, and plans nothing anew for a new shape."""
    yield from _forward(bench, "attention")


def overflow(bench: Bench) -> Iterator[Row]:
    """Rows that overflow float16 get float32's numbers, and the next chunk starts there."""
    yield from _forward(bench, "overflow")


def _forward(bench: Bench, part: str) -> Iterator[Row]:
    printed = bench.call(part, ["-m", "tests.gpu.forward", part, str(bench.folder / part)], ROOT, RUN_SECONDS)
    for line in printed.splitlines():
        text, verdict = json.loads(line)
        yield text, verdict


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


def driver(bench: Bench) -> Iterator[Row]:
    """What NVML tells of each GPU in one session, and whether it agrees with itself."""
    if not (found := inventory().gpus):
        raise Skip("NVML shows no GPU")
    uuids = [gpu.uuid for gpu in found]
    with driver_session():
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


CHECKS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "what the driver tells": driver,
    "release between members": release,
    "out-of-memory recovery": recovery,
    "half precision": precision,
    "4-bit on the device": four_bits,
    "plan against the peak": forecast,
    "two 9B-class members": large,
    "attention kernels": kernels,
    "float16 overflow": overflow,
    "a member over two GPUs": spread,
}


def rows_of(check: Callable[[Bench], Iterator[Row]], bench: Bench) -> Iterator[Row]:
    """A check's rows; whatever ends it early becomes one."""
    if bench.seconds_left <= 0:
        yield bench.too_late(), "skipped"
        return
    try:
        yield from check(bench)
    except Skip as reason:
        yield str(reason), "skipped"
    except Failed as error:
        yield str(error), "FAILED"
    except Exception as error:  # whatever it is, the other checks are to run
        yield f"{type(error).__name__}: {error}", "FAILED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny models, any device")
    parser.add_argument("--only", default="", help="checks whose name has this in it")
    arguments = parser.parse_args()
    chosen = {name: check for name, check in CHECKS.items() if arguments.only in name}
    if not chosen:
        parser.error(f"--only {arguments.only}: no such check; there are {', '.join(CHECKS)}")
    if not arguments.rehearse and (reason := why_no_gpu()):
        print(f"skipped: {reason}")
        return 0
    found = inventory()
    if not arguments.rehearse and not found.gpus:
        print(f"FAILED: torch can use a GPU, but {found.mask_problem or found.note}")
        return 1
    bench = Bench(Path(tempfile.mkdtemp(prefix="ensemble gpu ")), found.gpus, arguments.rehearse)
    failed = False
    try:
        bench.write_tables()
        print("| check | result | | seconds |\n|---|---|---|---|", flush=True)
        for name, check in chosen.items():
            began = time.monotonic()
            for text, verdict in rows_of(check, bench):
                failed |= verdict == "FAILED"
                cell = " ".join(text.replace("|", "/").split())
                print(f"| {name} | {cell} | {verdict} | {time.monotonic() - began:.0f} |", flush=True)
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
