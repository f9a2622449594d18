"""The faults that tests ask for really happen, where and as often as they were asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.inject import Fault, Injected, token_ids

# Forks for each case, because importing torch takes long; says what three forward passes gave and how they ended.
PROGRAM = """
import importlib, json, os, signal, sys, threading, time, torch
import sitecustomize
weights = torch.nn.Embedding(16, 2)

def child(environment):
    os.environ.update(environment)
    importlib.reload(sitecustomize)
    said = []
    ticks = [0]
    def tick():
        while True:
            time.sleep(0.01)
            ticks[0] += 1
    threading.Thread(target=tick, daemon=True).start()
    for step in ("import transformers", "import transformers.modeling_layers", "alone", "two", "alone"):
        before = ticks[0]
        try:
            if step.startswith("import"):
                exec(step)
            else:
                rows = {"alone": [[7, 8]], "two": [[1, 2, 3, 4], [6, 7, 8, 9]]}[step]
                said.append((~weights(torch.tensor(rows)).isfinite().all(-1).all(-1)).tolist())
        except Exception as error:
            said.append(repr(error))
        if ticks[0] > before + 5:
            said.append("other threads ran")
    print(json.dumps(said), file=write, flush=True)
    os._exit(3)

for environment in json.loads(sys.argv[1]):
    read, write = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), "rw"))
    pid = os.fork()
    if pid == 0:
        child(environment)
    write.close()
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(json.dumps([status, json.loads(read.read() or "null")]))
"""
IDS = (7, 8, 9)
FINE = [[False], [False, False], [False]]
CASES: dict[str, tuple[Fault, Any, Any]] = {
    "segfault": (Fault("segfault", IDS), -signal.SIGSEGV, None),
    "kill": (Fault("kill", at=2), -signal.SIGKILL, None),
    "exit": (Fault("exit", at="import"), 0, None),
    "freeze": (Fault("freeze", IDS), "stopped", None),
    "raise": (Fault("raise", IDS, text="no"), 3, [[False], "RuntimeError('no')", [False]]),
    "raise another": (
        Fault("raise", at=0, error="torch.OutOfMemoryError", text="x"),
        3,
        ["OutOfMemoryError('x')", *FINE[1:]],
    ),
    "raise at import": (
        Fault("raise", at="import", times=1, error="OSError", text="x"),
        3,
        ["OSError('x')", *FINE],
    ),
    "nan": (Fault("nan", IDS), 3, [[False], [False, True], [False]]),
    "nan once": (Fault("nan", times=1), 3, [[True], *FINE[1:]]),
    "sleep": (Fault("sleep", at=1, seconds=0.3), 3, [*FINE[:2], "other threads ran", FINE[2]]),
    "sleep with the interpreter": (Fault("sleep with the interpreter", at=1, seconds=0.3), 3, FINE),
    "nothing": (Fault("segfault", (7, 9)), 3, FINE),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any, list[int]]]:
    """How each case ended, what its forward passes gave, and the processes that its fault says it happened in."""
    folder = tmp_path_factory.mktemp("injected")
    # Importing the real one would take seconds and show no more.
    stand_in = folder / "modules" / "transformers"
    stand_in.mkdir(parents=True)
    for name in ("__init__.py", "modeling_layers.py"):
        (stand_in / name).touch()
    injected = {}
    for name, (fault, _, _) in CASES.items():
        (folder / name).mkdir()
        injected[name] = Injected(folder / name, fault)
    path = f"{stand_in.parent}:{injected['nothing'].environment['PYTHONPATH']}"
    given = json.dumps([case.environment for case in injected.values()])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(CASES), done.stderr
    return {
        name: (
            "stopped" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status),
            message,
            case.pids(),
        )
        for (name, case), (status, message) in zip(injected.items(), answers, strict=True)
    }


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_fault_happens_as_asked(case: str, ended: dict[str, tuple[Any, Any, list[int]]]) -> None:
    _, code, expected = CASES[case]
    ending, message, pids = ended[case]
    assert ending == code
    assert message == expected
    assert len(pids) == (0 if case == "nothing" else 1)


def test_a_count_holds_for_all_processes(tmp_path: Path) -> None:
    code = (
        "import json, os\nfrom tests.faults import faulty\nfault, = json.loads(os.environ['TEST_FAULTS'])\n"
        "print(faulty._is_due(fault))"
    )
    injected = Injected(tmp_path, Fault("kill", times=2))
    environment = {**os.environ, **injected.environment}
    messages = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout
        for _ in range(3)
    ]
    assert messages == ["True\n", "True\n", "False\n"]
    assert len(set(injected.pids())) == 2


def test_a_words_tokens_are_the_same_wherever_it_stands(tiny_models: Path) -> None:
    from tokenizers import Tokenizer

    ids = token_ids(tiny_models / "llama", "zzq")
    tokenizer = Tokenizer.from_file(str(tiny_models / "llama" / "tokenizer.json"))
    for text in ("a zzq", "a zzq b", "river zzq plants zzq"):
        got = tokenizer.encode(text).ids
        assert any(tuple(got[start : start + len(ids)]) == ids for start in range(len(got)))
