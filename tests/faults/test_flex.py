"""Runs with flex attention: a compiler that fails, takes too long, or is shared by two; and a kill."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import label_reference, make_checkpoint, make_language_model, reference
from tests.members.causal_lm.test_causal_lm import ONE_TOKEN, TEMPLATE
from tests.members.huggingface.scoring.test_compiled import needs_compiler
from tests.project import LABELS, Project

pytestmark = pytest.mark.long
MAX_LENGTH = 128


@pytest.fixture
def flexible(project: Project) -> Project:
    """A table, a classifier with a window, and a language model with a cap."""
    make_checkpoint(project.models / "mistral", "mistral", LABELS)
    make_language_model(project.models / "lm", "gemma2", attn_logit_softcapping=0.5)
    project.write_table(60)
    return project


def config(project: Project, *names: str, **keys: Any) -> dict[str, Any]:
    """Members of these models, with flex attention."""
    of_kind: dict[str, dict[str, Any]] = {
        "mistral": {"text_column": "text"},
        "lm": {
            "task_type": "causal_lm",
            "prompt_template": TEMPLATE,
            "label_tokens": dict(zip(LABELS, ONE_TOKEN.values(), strict=True)),
        },
    }
    flex = {"attn_implementation": "flex", "dtype": "float32", "max_length": MAX_LENGTH, **keys}
    models = [
        {"name": name, "model_name_or_path": str(project.models / name), **of_kind[name], **flex}
        for name in names
    ]
    return project.config(models=models, defaults={}, submission=None)


def check_numbers(project: Project) -> None:
    texts = project.texts
    expected = {"mistral": reference(project.models / "mistral", texts, MAX_LENGTH)}
    prompts = [text + " " for text in texts]
    expected["lm"], _ = label_reference(
        project.models / "lm", prompts, list(ONE_TOKEN.values()), max_length=MAX_LENGTH
    )
    for name, numbers in expected.items():
        got = project.values(f"runs/first/predictions/{name}.csv")
        np.testing.assert_allclose(got, numbers, atol=2e-5)


def test_a_run_goes_on_where_compiling_takes_too_long(flexible: Project, tmp_path: Path) -> None:
    """While the thread that is left alone compiles, and stands within a pass over the language model's head."""
    flexible.write_config(config(flexible, "mistral", "lm", compile_timeout=0.1))
    done = flexible.ensemble(
        "run", "config.yaml", environment={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code")}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name, other in (("mistral", "sdpa"), ("lm", "capped_blocks")):
        note = (
            f"{name}: {other} attention instead of flex: it was not compiled within 0.1 s (compile_timeout)"
        )
        assert note in done.stdout
    check_numbers(flexible)


def test_a_run_goes_on_where_there_is_no_compiler(flexible: Project, tmp_path: Path) -> None:
    flexible.write_config(config(flexible, "mistral", "lm"))
    missing = {"CXX": "false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code")}
    done = flexible.ensemble("run", "config.yaml", environment=missing)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, other in (("mistral", "sdpa"), ("lm", "capped_blocks")):
        assert f"{name}: {other} attention instead of flex: " in done.stdout
    check_numbers(flexible)


@needs_compiler
def test_two_runs_share_what_they_compile_and_one_goes_on_after_a_kill(
    flexible: Project, tmp_path: Path
) -> None:
    flexible.write_table(400)
    flexible.write_config(config(flexible, "mistral", max_num_batched_tokens=1024, compile_timeout="500s"))
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code")}
    names = ("undisturbed", "killed")
    both = [flexible.start(*command(name), environment=environment, start_new_session=True) for name in names]
    work = flexible.folder / "runs" / "killed" / "work"
    while both[1].poll() is None and not list(work.glob("*/*.csv")):
        time.sleep(0.01)
    os.kill(both[1].pid, signal.SIGKILL)
    printed = [run.communicate(timeout=500)[0] for run in both]
    assert both[0].returncode == 0, printed[0]
    again = flexible.ensemble(*command("killed"), environment=environment)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "instead of flex" not in printed[0] + again.stdout
    results = [
        (flexible.folder / "runs" / name / "predictions" / "mistral.csv").read_bytes() for name in names
    ]
    assert results[0] == results[1]


def command(name: str) -> tuple[str, ...]:
    return ("run", "config.yaml", "--set", f"output_dir=runs/{name}")
