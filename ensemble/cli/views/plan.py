"""What ``plan`` shows: the devices, each member's memory, where it runs and why, and how long all of it takes."""

from __future__ import annotations

from collections.abc import Iterator

from ensemble.cli.layout import Table
from ensemble.common.text import duration, gib, plural, shown_path
from ensemble.pipeline.validate import Prepared
from ensemble.pipeline.wait_for_gpus import held_texts
from ensemble.planning.cascade import when_text
from ensemble.planning.plan import MemberPlan

_HEADERS = "member,parameters,weights,batch tokens,activations,attention,overhead,peak,usable,fit".split(",")
_VERDICTS = {
    "fits": "",
    "tight": "tight",
    "short": "tight: others use it",
    "held": "held by others",
    "never": "does not fit",
}


def view(prepared: Prepared) -> Iterator[str | Table]:
    """The table and the devices; what one replica of each member takes, with a full batch of the longest rows, of
    each of its devices; where it runs and why, its chunks and its time; then the whole run."""
    plan, gpus, host = prepared.plan, prepared.plan.gpus, prepared.plan.host
    yield f"{shown_path(prepared.config.data.path)}: {plural(prepared.table.rows, 'row')}"
    yield prepared.inventory.note
    for number, gpu in enumerate(gpus):
        of = gpu.compute_capability
        capability = "" if of is None else f", compute capability {of[0]}.{of[1]}"
        free = gib(gpu.total_bytes - gpu.used_bytes)
        yield f"GPU {number}: {gpu.name} ({gpu.uuid}){capability}, {free} of {gib(gpu.total_bytes)} free"
    yield from prepared.warnings
    yield from held_texts(gpus)
    if host is not None and any(one.needs_worker and not one.gpus for one in plan.members):
        yield f"CPU: {gib(host.total_bytes - host.used_bytes)} of {gib(host.total_bytes)} memory free"
    if any(one.needs_worker for one in plan.members):
        yield Table(_HEADERS, [[one.name, *_memory_cells(one)] for one in plan.members], texts=["fit"])
    else:
        yield "no member needs a worker: nothing is loaded, and a run merges what was made elsewhere"
    for member in plan.members:
        yield f"{member.name}: {'; '.join(_member_facts(prepared, member))}"
    yield plan.why
    yield from plan.warnings
    if plan.problems:
        return
    if plan.seconds is not None:
        report = shown_path(prepared.config.output_dir / "run.json")
        yield f"the whole run takes about {duration(plan.seconds)}, by the speeds in {report}"
    elif any(member.needs_worker for member in plan.members):
        yield "how long it takes is not known until a run, such as one with --limit 100, has measured the speed"


def _memory_cells(member: MemberPlan) -> list[str]:
    placement, needed = member.placement, member.placement.footprint
    if not member.needs_worker:
        return ["", "none"]
    if needed is None:
        return ["", "not known"]
    # The fit on the device with the least room, of those it runs on.
    usable = [placement.fits[uuid] for uuid in placement.devices if uuid in placement.fits]
    found = min(usable or placement.fits.values(), key=lambda one: one.room_bytes, default=None)
    tokens = max(found.token_budget if found is not None else 0, needed.width)
    per_token, per_pair = needed.activation.line(needed.width)
    return [
        _count(needed.weights.parameters),
        gib(needed.weights.bytes),
        f"{tokens:,}",
        gib(per_token * tokens + needed.activation.fixed_bytes),
        gib(per_pair * tokens * needed.width),
        gib(needed.context_bytes),
        gib(needed.peak_bytes(member.gpus, tokens)),
        gib(found.room_bytes) if found is not None else "",
        _VERDICTS[found.verdict] if found is not None else "",
    ]


def _member_facts(prepared: Prepared, member: MemberPlan) -> Iterator[str]:
    placement, needed = member.placement, member.placement.footprint
    if placement.problems:
        yield "cannot run here"
        return
    if not member.needs_worker:
        yield f"{prepared.inspected[member.name].summary}, which need no worker"
        return
    yield _where(prepared, member)
    if placement.reason:
        yield placement.reason
    if needed is not None:
        stored = f"{needed.quantization} weights, {needed.dtype}" if needed.quantization else needed.dtype
        yield f"{stored}, {needed.attention} attention"
        labels = len(prepared.config.labels)
        yield f"rows of up to {plural(needed.width, 'token')}, {plural(labels, 'label')} each"
    if (cache := member.load_cache).is_kept:
        size = "" if cache.bytes is None else f" ({gib(cache.bytes)})"
        yield f"quantized once: its weights are kept in the run directory for later loads{size}"
    elif cache.reason:
        yield f"quantized at each load: {cache.reason}"
    yield plural(len(member.chunks), "chunk")
    if (expected := prepared.shares.get(member.name)) is not None and member.model.when is not None:
        yield f"runs {when_text(member.model.when)}: {expected.share:.0%} of the rows, {expected.why}"
    if member.speed.is_measured:
        job = member.job
        text = f"about {duration(job.startup_seconds + job.compute_seconds / member.replicas)}"
        if saved := (member.whole_seconds - job.compute_seconds) / member.replicas:
            text += f", {duration(saved)} less than for all rows"
        yield text


def _where(prepared: Prepared, member: MemberPlan) -> str:
    replicas = plural(member.replicas, "replica")
    if not member.gpus:
        return "on the CPU" if member.replicas == 1 else f"{replicas} on the CPU"
    numbers = {gpu.uuid: str(number) for number, gpu in enumerate(prepared.plan.gpus)}
    there = [numbers[uuid] for uuid in member.placement.devices]
    where = f"GPU {there[0]}" if len(there) == 1 else f"GPUs {', '.join(there)}"
    if member.gpus > 1 and len(there) == member.gpus:
        return f"1 replica over {where}"
    if member.gpus == member.replicas == 1 and len(there) > 1:
        return f"1 replica on GPU {' or '.join(there)}"
    spread = f" over {member.gpus} GPUs each" if member.gpus > 1 else ""
    later = "" if member.first_replicas == member.replicas else ", all but the first when GPUs are left over"
    return f"{replicas}{spread} on {where}{later}" if there else "no GPU has room now"


def _count(parameters: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= size:
            return f"{parameters / size:.2f} {letter}"
    return str(parameters)
