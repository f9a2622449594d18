"""Devices through the real pynvml, in processes of their own: simulated GPUs, and this machine as it is."""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ensemble.common.errors import DeviceError
from ensemble.common.gpus import Device, worker_environment
from tests.nvml.sim import (
    DRIVER_NOT_LOADED,
    GIB,
    GPU_IS_LOST,
    HANGS,
    LIBRARY_VERSION_MISMATCH,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    UNKNOWN,
    Fail,
    Gpu,
    Memory,
    NvmlSim,
    Slice,
    gpu_uuid,
    gpus,
)
from tests.project import ROOT
from tests.waiting import PATIENCE_SECONDS

MIB = 1 << 20
PARENT = gpu_uuid(0xA)
SLICES = [
    Slice(
        0, "MIG-10000000-1111-2222-3333-444444444444", 7, 0, "Simulated MIG 1g.5gb", Memory(5 * GIB, 10 * MIB)
    ),
    Slice(
        2,
        "MIG-20000000-1111-2222-3333-444444444444",
        9,
        0,
        "Simulated MIG 2g.10gb",
        Memory(10 * GIB, 20 * MIB),
    ),
    Slice(3, "MIG-30000000-1111-2222-3333-444444444444", 11, 1, "", Memory(5 * GIB, 0)),
]
MIG_GPU = Gpu(PARENT, "Simulated A100", (0, 9, 0), (8, 0), mig_mode=True, slices=SLICES)

EPILOGUE = "print(json.dumps(answer))"
INVENTORY = "answer = asdict(gpus.inventory())"


def run(code: str, environ: Mapping[str, str], *arguments: str) -> Any:
    """``answer`` as ``code`` leaves it in a new process, through JSON."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "NVIDIA_"))}
    program = (
        f"import json, sys, time\nfrom dataclasses import asdict\nfrom ensemble.common import gpus\n{code}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program + EPILOGUE, *arguments],
        env={**inherited, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


def look(sim: NvmlSim, *, old_driver: bool = False) -> Any:
    return run(INVENTORY, sim.environment(old_driver))


def look_with(sim: NvmlSim, *environs: Mapping[str, str], old_driver: bool = False) -> list[Any]:
    """One look per environment, all in one process for speed."""
    code = "answer = [asdict(gpus.inventory(environ)) for environ in json.loads(sys.argv[1])]"
    outcome: list[Any] = run(code, sim.environment(old_driver), json.dumps(environs))
    return outcome


def mask(text: str, order: str | None = "PCI_BUS_ID") -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": text} | ({} if order is None else {"CUDA_DEVICE_ORDER": order})


def uuids(result: Any) -> list[str]:
    return [gpu["uuid"] for gpu in result["gpus"]]


def test_this_machine_as_it_is() -> None:
    outcome = run(INVENTORY, {})
    assert bool(outcome["gpus"]) != bool(outcome["note"])
    if ctypes.util.find_library("nvidia-ml") is None:
        assert outcome["note"].startswith("no NVIDIA driver found")


def test_a_driver_library_that_cannot_be_loaded_is_none(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()
    assert run(INVENTORY, {"LD_LIBRARY_PATH": str(tmp_path)}) == {
        "gpus": [],
        "note": "no NVIDIA driver found: running on the CPU",
        "driver_version": None,
        "warnings": [],
        "mask_problem": "",
        "hosts": [],
    }


def test_helpers_without_a_driver_tell_nothing() -> None:
    code = 'answer = [gpus.used_memory(["cpu", "GPU-none"]), gpus.processes_on("GPU-none")]'
    assert run(code, {}) == [{"cpu": None, "GPU-none": None}, []]


def test_without_pynvml_there_is_the_cpu(nvml_sim: NvmlSim) -> None:
    # None in sys.modules makes the import fail as a missing package does.
    code = f'import pynvml; sys.modules["pynvml"] = None; {INVENTORY}; sys.modules["pynvml"] = pynvml'
    outcome = run(code, nvml_sim.environment())
    assert (
        outcome["note"] == "nvidia-ml-py is not installed, so no NVIDIA GPU can be seen: running on the CPU"
    )


@pytest.mark.parametrize(
    ("code", "note"),
    [
        (DRIVER_NOT_LOADED, "the NVIDIA driver is installed but not loaded"),
        (LIBRARY_VERSION_MISMATCH, "answer (RM has detected"),
        (UNKNOWN, "answer (Unknown Error)"),
    ],
)
def test_a_driver_that_does_not_start_means_the_cpu(nvml_sim: NvmlSim, code: int, note: str) -> None:
    nvml_sim.write(gpus(2), fails=[Fail("Init", code)])
    inspection = look(nvml_sim)
    assert inspection["gpus"] == []
    assert note in inspection["note"]
    assert inspection["note"].endswith(": running on the CPU")


@pytest.mark.parametrize("count", [0, 1, 2, 8])
def test_every_gpu_is_listed(nvml_sim: NvmlSim, count: int) -> None:
    nvml_sim.write(gpus(count))
    inspection = look(nvml_sim)
    assert uuids(inspection) == [gpu_uuid(index) for index in range(count)]
    assert inspection["note"].partition(":")[0] == ("" if count else "the NVIDIA driver shows no GPU")
    assert inspection["warnings"] == []
    assert inspection["driver_version"] == "550.90.07"


def test_what_is_said_of_a_gpu(nvml_sim: NvmlSim) -> None:
    nvml_sim.write(
        [Gpu(PARENT, "Simulated H100 80GB", (0, 1, 0), (9, 0), Memory(80 * GIB, 5 * MIB), mig_mode=False)]
    )
    expected = Device(PARENT, "Simulated H100 80GB", (9, 0), 80 * GIB, 5 * MIB)
    assert run(f"answer = gpus.inventory().gpus == (gpus.{expected!r},)", nvml_sim.environment()) is True
    assert expected.is_gpu


def test_unknown_facts_are_none(nvml_sim: NvmlSim) -> None:
    nvml_sim.write([Gpu(PARENT, compute_capability=None)], fails=[Fail("SystemGetDriverVersion", UNKNOWN)])
    inspection = look(nvml_sim)
    assert inspection["driver_version"] is None
    assert inspection["gpus"][0]["compute_capability"] is None
    assert inspection["warnings"] == []


def test_order_is_pcis_and_not_nvmls(nvml_sim: NvmlSim) -> None:
    first, second, third = gpu_uuid(1), gpu_uuid(2), gpu_uuid(3)
    nvml_sim.write([Gpu(third, pci=(1, 0, 0)), Gpu(second, pci=(0, 0x81, 0)), Gpu(first, pci=(0, 0x0A, 0))])
    everything, masked = look_with(nvml_sim, {}, mask("2,0"))
    assert uuids(everything) == [first, second, third]
    assert uuids(masked) == [third, first]


# A mask over four GPUs, what it leaves, and which entry is warned of.
MASKS: list[tuple[str, list[int], str | None]] = [
    ("3,1", [3, 1], None),
    (" 2 , 0 ", [2, 0], None),
    (f"{gpu_uuid(2)},{gpu_uuid(0)}", [2, 0], None),
    ("GPU-2,GPU-0000", [2, 0], None),
    (f"1,{gpu_uuid(3)}", [1, 3], None),
    ("0,-1", [0], None),
    ("0,", [0], None),
    ("0,-1,1", [0], None),
    ("1,,2", [1], None),
    ("0,4,1", [0], "'4' names"),
    ("0,first,1", [0], "'first' names"),
    ("2,GPU-,1", [2], "'GPU-' names"),
    ("2,GPU-9,1", [2], "'GPU-9' names"),
    ("2,MIG-1,1", [2], "'MIG-1' names"),
    ("2,2222,1", [2], "'2222' names"),
    ("2,02,1", [2], "'02' names"),
    ("2," + "9" * 5000, [2], "9' names"),
    ("1,1,0", [1, 0], None),
    ("1,GPU-1111,0", [1, 0], None),
]


def test_the_inherited_mask_is_read_as_cuda_reads_it(nvml_sim: NvmlSim) -> None:
    nvml_sim.write(gpus(4))
    looked = look_with(nvml_sim, *(mask(text) for text, _, _ in MASKS))
    for (text, kept, warned), result in zip(MASKS, looked, strict=True):
        assert uuids(result) == [gpu_uuid(index) for index in kept], text
        assert result["note"] == ""
        assert len(result["warnings"]) == (warned is not None), result["warnings"]
        assert warned is None or f"CUDA_VISIBLE_DEVICES={text}: " in result["warnings"][0]
        assert warned is None or warned in result["warnings"][0]


def test_a_mask_may_hide_every_gpu(nvml_sim: NvmlSim) -> None:
    nvml_sim.write(gpus(2))
    texts = ["", "-1", "NoDevFiles"]
    for text, result in zip(texts, look_with(nvml_sim, *map(mask, texts)), strict=True):
        assert result["gpus"] == []
        assert result["note"] == f"CUDA_VISIBLE_DEVICES={text} leaves no GPU: running on the CPU"
        assert result["warnings"] == []


def test_the_mask_is_read_from_the_process_itself(nvml_sim: NvmlSim) -> None:
    nvml_sim.write(gpus(2))
    assert uuids(run(INVENTORY, nvml_sim.environment() | mask("1"))) == [gpu_uuid(1)]


def test_indices_are_ambiguous_only_between_unlike_gpus(nvml_sim: NvmlSim) -> None:
    nvml_sim.write([gpus(2)[0], Gpu(gpu_uuid(1), "Simulated H100", (0, 2, 0), (9, 0))])
    surprising, *others = look_with(
        nvml_sim, mask("1", order=None), mask("1"), mask(gpu_uuid(1), order=None), {}
    )
    assert uuids(surprising) == [gpu_uuid(1)]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in surprising["warnings"][0]
    assert all(result["warnings"] == [] for result in others)
    nvml_sim.write(gpus(2))
    assert look_with(nvml_sim, mask("1", order=None))[0]["warnings"] == []


@pytest.mark.parametrize(
    ("lost_at", "label"),
    [
        ("DeviceGetHandleByIndex", "GPU 1"),
        ("DeviceGetPciInfo", f"GPU 1 ({gpu_uuid(1)})"),
        ("DeviceGetMemoryInfo", f"GPU 1 ({gpu_uuid(1)})"),
    ],
)
def test_a_lost_gpu_is_left_out_and_named(nvml_sim: NvmlSim, lost_at: str, label: str) -> None:
    whole = gpus(3)
    nvml_sim.write([whole[0], Gpu(gpu_uuid(1), pci=(0, 2, 0), fails=[Fail(lost_at, GPU_IS_LOST)]), whole[2]])
    everything, by_number, by_uuid = look_with(
        nvml_sim, {}, mask("1,2"), mask(f"{gpu_uuid(1)},{gpu_uuid(2)}")
    )
    assert uuids(everything) == [gpu_uuid(0), gpu_uuid(2)]
    assert everything["warnings"] == [f"{label} is left out: GPU is lost"]
    # It keeps its number, and neither its number nor its UUID hides what comes after.
    assert uuids(by_number) == uuids(by_uuid) == [gpu_uuid(2)]


def test_when_all_gpus_are_lost_there_is_the_cpu(nvml_sim: NvmlSim) -> None:
    nvml_sim.write([Gpu(PARENT, fails=[Fail("*", GPU_IS_LOST)])])
    inspection = look(nvml_sim)
    assert inspection["note"] == "no GPU can be used: running on the CPU"
    assert len(inspection["warnings"]) == 1


def test_a_gpu_that_may_not_be_opened_is_not_numbered(nvml_sim: NvmlSim) -> None:
    barred = Gpu(gpu_uuid(0), fails=[Fail("DeviceGetHandleByIndex", NO_PERMISSION)])
    nvml_sim.write([barred, *gpus(3)[1:]])
    (result,) = look_with(nvml_sim, mask("0"))
    assert uuids(result) == [gpu_uuid(1)]
    assert result["warnings"] == []


def test_mig_slices_stand_for_their_gpu(nvml_sim: NvmlSim) -> None:
    nvml_sim.write([*gpus(1), MIG_GPU])
    inspection = look(nvml_sim)
    assert uuids(inspection) == [gpu_uuid(0), *(part.uuid for part in SLICES)]
    assert inspection["gpus"][2] == {
        "uuid": SLICES[1].uuid,
        "name": "Simulated MIG 2g.10gb",
        "compute_capability": [8, 0],
        "total_bytes": 10 * GIB,
        "used_bytes": 20 * MIB,
        "node": "",
        "is_held": False,
        "torch_problem": "",
    }
    assert inspection["gpus"][3]["name"] == "Simulated A100"
    assert inspection["warnings"] == []


def test_a_mask_may_name_mig_slices(nvml_sim: NvmlSim) -> None:
    nvml_sim.write([*gpus(1), MIG_GPU])
    item, two, three = (part.uuid for part in SLICES)
    cases: list[tuple[str, list[str], str | None]] = [
        (f"{two},{item}", [two, item], None),
        ("MIG-3", [three], None),
        (f"{two},0,MIG-{PARENT}/9/3", [two, gpu_uuid(0)], "/9/3' names no single GPU"),
        # CUDA takes one slice of a GPU that is named as a whole.
        ("1", [item], "to use all 3"),
        (PARENT, [item], "to use all 3"),
    ]
    looked = look_with(nvml_sim, *(mask(text) for text, _, _ in cases))
    for (text, kept, warned), result in zip(cases, looked, strict=True):
        assert uuids(result) == kept, text
        assert len(result["warnings"]) == (warned is not None), result["warnings"]
        assert warned is None or warned in result["warnings"][0]


def test_an_old_drivers_mig_uuid_is_its_old_name(nvml_sim: NvmlSim) -> None:
    old_name = f"MIG-{PARENT}/1/0"
    nvml_sim.write([Gpu(PARENT, mig_mode=True, slices=[Slice(0, old_name, 1)])])
    (result,) = look_with(nvml_sim, mask(old_name), old_driver=True)
    assert uuids(result) == [old_name]


def test_mig_mode_without_slices_is_left_out(nvml_sim: NvmlSim) -> None:
    nvml_sim.write([*gpus(1), Gpu(PARENT, pci=(0, 9, 0), mig_mode=True)])
    inspection = look(nvml_sim)
    assert uuids(inspection) == [gpu_uuid(0)]
    assert inspection["warnings"] == [f"GPU 1 ({PARENT}) is left out: MIG mode is on, without a slice to use"]


def test_all_memory_is_read_by_one_version(nvml_sim: NvmlSim) -> None:
    """What the driver reserves nobody can have: with version 2 it is no part of the total."""
    nvml_sim.write([Gpu(PARENT, memory=Memory(16 * GIB, GIB, reserved=300 * MIB))])
    code = f"""
gpu = gpus.inventory().gpus[0]
answer = [gpu.total_bytes, gpu.used_bytes, *gpus.used_memory(["{PARENT}"]).values()]
"""
    assert run(code, nvml_sim.environment()) == [16 * GIB - 300 * MIB, GIB, GIB]
    # Version 1, all that an old driver has, counts what is reserved as used: as much is free.
    assert run(code, nvml_sim.environment(old_driver=True)) == [16 * GIB, *[GIB + 300 * MIB] * 2]


# The session


def test_nvml_is_opened_once(nvml_sim: NvmlSim) -> None:
    nvml_sim.write([Gpu(PARENT, memory=Memory(used=GIB))])
    code = f"""
answer = [gpus.used_memory(["{PARENT}"])["{PARENT}"] for _ in range(5)]
gpus.inventory(), gpus.processes_on("{PARENT}")
"""
    assert run(code, nvml_sim.environment()) == [GIB] * 5
    assert [what for what, _ in nvml_sim.sessions()] == ["open"]


RELOADED = """
import os
from pathlib import Path
state = Path(os.environ["NVML_SIM_STATE"])
def look():
    answer.append(gpus.used_memory([sys.argv[1]])[sys.argv[1]])
answer = []
look()
first = state.read_text()
state.write_text(first.replace("loaded 0", sys.argv[2]))
look(), look()
state.write_text(first.replace("loaded 0", "loaded 2"))
look(), look()
"""


def test_a_driver_that_goes_and_comes_back_in_a_session(nvml_sim: NvmlSim) -> None:
    """What was open is stale then: it is opened anew, and the same question is answered."""
    nvml_sim.write([Gpu(PARENT, memory=Memory(used=GIB))])
    gone = run(RELOADED, nvml_sim.environment(), PARENT, f"loaded 1\nfail Init {DRIVER_NOT_LOADED}")
    assert gone == [GIB, None, None, GIB, GIB]
    assert [what for what, _ in nvml_sim.sessions()] == ["open", "close", "open"]
    nvml_sim.write([Gpu(PARENT, memory=Memory(used=GIB))])
    assert run(RELOADED, nvml_sim.environment(), PARENT, "loaded 1") == [GIB] * 5


def test_a_driver_that_hangs_is_not_waited_for_again(nvml_sim: NvmlSim) -> None:
    """The last answer counts for half a minute, and is unknown then."""
    hangs = Fail("DeviceGetMemoryInfo", HANGS, after_calls=5)
    nvml_sim.write([Gpu(PARENT, memory=Memory(used=GIB), fails=[hangs])])
    code = f"""
answer, seconds = [], []
for _ in range(8):
    began = time.monotonic()
    answer.append(gpus.used_memory(["{PARENT}"])["{PARENT}"])
    seconds.append(time.monotonic() - began)
gpus._MAX_AGE_SECONDS = 0.0
answer.append(gpus.used_memory(["{PARENT}"])["{PARENT}"])
answer.append(sum(each > 0.2 for each in seconds) >= 1)
"""
    assert run(code, nvml_sim.environment()) == [*[GIB] * 8, None, True]


def test_an_answer_that_comes_late_counts(nvml_sim: NvmlSim) -> None:
    nvml_sim.write([Gpu(PARENT, memory=Memory(used=GIB))])
    code = f"""
import os
from pathlib import Path
import pynvml
read = pynvml.nvmlDeviceGetMemoryInfo
def read_slowly(*arguments, **options):
    time.sleep(1.5)
    return read(*arguments, **options)
answer = [gpus.used_memory(["{PARENT}"])["{PARENT}"]]
pynvml.nvmlDeviceGetMemoryInfo = read_slowly
state = Path(os.environ["NVML_SIM_STATE"])
state.write_text(state.read_text().replace("{GIB}", "{2 * GIB}"))
give_up = time.monotonic() + 25
while answer[-1] == {GIB} and time.monotonic() < give_up:
    answer.append(gpus.used_memory(["{PARENT}"])["{PARENT}"])
    time.sleep(0.1)
answer = [answer[0], answer[-1]]
"""
    assert run(code, nvml_sim.environment()) == [GIB, 2 * GIB]


def test_a_driver_that_hangs_from_the_start_is_a_problem_and_not_the_cpu(nvml_sim: NvmlSim) -> None:
    nvml_sim.write([Gpu(PARENT, fails=[Fail("*", HANGS)])])
    outcome = run(f"gpus._PATIENCE_SECONDS = 0.5\n{INVENTORY}", nvml_sim.environment())
    assert not outcome["gpus"]
    assert "respond (no answer in 0.5 s), nor will" in outcome["mask_problem"]
    assert "set CUDA_VISIBLE_DEVICES=-1 to run on the CPU" in outcome["mask_problem"]


def test_a_driver_that_answers_unknown_for_good_is_opened_anew_once(nvml_sim: NvmlSim) -> None:
    nvml_sim.write([Gpu(PARENT, fails=[Fail("*", UNKNOWN, after_calls=2)])])
    code = f"""
answer = [gpus.used_memory(["{PARENT}"])["{PARENT}"] for _ in range(10)][-1]
"""
    assert run(code, nvml_sim.environment()) is None
    assert [what for what, _ in nvml_sim.sessions()] == ["open", "close", "open"]


def test_a_gpu_that_stays_lost_is_asked_beside_others_without_opening_the_driver_each_time(
    nvml_sim: NvmlSim,
) -> None:
    lost = Gpu(PARENT, fails=[Fail("*", GPU_IS_LOST, after_calls=2)])
    other = Gpu(gpu_uuid(1), pci=(0, 2, 0), memory=Memory(used=GIB))
    nvml_sim.write([lost, other])
    code = f"""
answer = [list(gpus.used_memory(["{PARENT}", "{gpu_uuid(1)}"]).values()) for _ in range(10)][-1]
"""
    assert run(code, nvml_sim.environment()) == [None, GIB]
    assert [what for what, _ in nvml_sim.sessions()] == ["open", "close", "open"]


def test_a_gpu_without_memory_of_its_own_has_the_hosts(nvml_sim: NvmlSim) -> None:
    nvml_sim.write([Gpu(PARENT, "Simulated GB10", fails=[Fail("DeviceGetMemoryInfo", NOT_SUPPORTED)])])
    code = f"""
from ensemble.common.host import total_memory_bytes
gpu = gpus.inventory().gpus[0]
used = gpus.used_memory(["{PARENT}"])["{PARENT}"]
answer = [gpu.total_bytes == total_memory_bytes(), 0 < gpu.used_bytes < gpu.total_bytes, 0 < used < gpu.total_bytes]
"""
    assert run(code, nvml_sim.environment()) == [True, True, True]


def test_a_lost_gpu_hides_no_other(nvml_sim: NvmlSim) -> None:
    lost = Gpu(PARENT, pci=(0, 9, 0), fails=[Fail("*", GPU_IS_LOST, 2)])
    nvml_sim.write([lost, *gpus(1)])
    code = """
answer = [list(gpus.used_memory(sys.argv[1:]).values()) for _ in range(3)]
"""
    assert run(code, nvml_sim.environment(), PARENT, gpu_uuid(0)) == [[0, 0], [None, 0], [None, 0]]


def test_a_fork_leaves_its_parents_session_alone(nvml_sim: NvmlSim) -> None:
    nvml_sim.write([Gpu(PARENT, memory=Memory(used=GIB))])
    code = f"""
import os, pynvml, warnings
warnings.simplefilter("ignore")  # of forks beside threads
gpus.used_memory(["{PARENT}"])
if not (child := os.fork()):
    seen = gpus.used_memory(["{PARENT}"])["{PARENT}"]
    os._exit(0 if seen == {GIB} else 1)
answer = [os.waitpid(child, 0)[1], gpus.used_memory(["{PARENT}"])["{PARENT}"]]
"""
    assert run(code, nvml_sim.environment()) == [0, GIB]
    assert [what for what, _ in nvml_sim.sessions()].count("close") == 0


def test_used_memory_of_slices_lost_and_unknown_devices(nvml_sim: NvmlSim) -> None:
    lost = Gpu(gpu_uuid(1), pci=(0, 2, 0), fails=[Fail("*", GPU_IS_LOST)])
    nvml_sim.write([MIG_GPU, lost])
    asked = [SLICES[1].uuid, gpu_uuid(1), gpu_uuid(5), "cpu"]
    outcome = run("answer = gpus.used_memory(sys.argv[1:])", nvml_sim.environment(), *asked)
    assert outcome == {SLICES[1].uuid: 20 * MIB, gpu_uuid(1): None, gpu_uuid(5): None, "cpu": None}


@pytest.mark.parametrize("old_driver", [False, True])
def test_processes_are_named_as_far_as_can_be(nvml_sim: NvmlSim, old_driver: bool) -> None:
    here, elsewhere, named = os.getpid(), 4_000_000_001, 4_000_000_002
    processes = {here: 3 * GIB, elsewhere: None, named: 5}
    nvml_sim.write([Gpu(PARENT, processes=processes)], process_names={named: "/opt/my python"})
    answer = run(f'answer = gpus.processes_on("{PARENT}")', nvml_sim.environment(old_driver))
    told = [[here, None, 3 * GIB], [elsewhere, None, None], [named, "/opt/my python", 5]]
    assert answer == ([] if old_driver else told), "no call that such a driver knows tells of processes"


def test_processes_of_idle_lost_and_unknown_devices(nvml_sim: NvmlSim) -> None:
    lost = Gpu(gpu_uuid(1), processes={1: 1}, fails=[Fail("*", GPU_IS_LOST)])
    barred = Gpu(
        gpu_uuid(2), processes={1: 1}, fails=[Fail("DeviceGetComputeRunningProcesses", NOT_SUPPORTED)]
    )
    nvml_sim.write([*gpus(1), lost, barred])
    asked = [gpu_uuid(index) for index in range(4)] + ["cpu"]
    code = "answer = [gpus.processes_on(uuid) for uuid in sys.argv[1:]]"
    assert run(code, nvml_sim.environment(), *asked) == [[]] * 5


def test_a_name_cut_inside_a_character_does_not_stop_anything(nvml_sim: NvmlSim) -> None:
    nvml_sim.write(
        [Gpu(PARENT, processes={4_000_000_001: 1})], fails=[Fail("SystemGetProcessName", NOT_FOUND)]
    )
    code = f"""
import pynvml
def cut(pid):
    return b"caf\\xc3".decode()
pynvml.nvmlSystemGetProcessName = cut
answer = gpus.processes_on("{PARENT}")
"""
    assert run(code, nvml_sim.environment()) == [[4_000_000_001, None, 1]]


def device(uuid: str) -> Device:
    return Device(uuid, "any", None, 0, 0)


def test_a_worker_is_pinned_in_the_leases_order() -> None:
    pinned = worker_environment([device("GPU-b"), device("GPU-a")])
    assert pinned == {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert worker_environment([device("MIG-a")])["CUDA_VISIBLE_DEVICES"] == "MIG-a"


def test_a_cpu_worker_sees_no_gpu() -> None:
    assert worker_environment([])["CUDA_VISIBLE_DEVICES"] == ""
    assert not device("cpu").is_gpu
    assert worker_environment([device("cpu")])["CUDA_VISIBLE_DEVICES"] == ""


def test_mig_slices_do_not_go_together() -> None:
    with pytest.raises(DeviceError, match="MIG-a, MIG-b"):
        worker_environment([device("MIG-a"), device("MIG-b")])


def test_pynvml_is_imported_only_when_asked() -> None:
    code = 'answer = "pynvml" in sys.modules'
    assert run(code, {}) is False
