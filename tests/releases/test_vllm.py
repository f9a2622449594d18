"""Members of vLLM's own server on the CPU against members that compute the same checkpoint here, row by row.

``make test-releases`` installs vLLM into an environment of its own, whose Python ``ENSEMBLE_TEST_VLLM`` names.
That the server's processes are gone behind a run is seen as after any test (``tests/leftovers.py``).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.checkpoints import make_checkpoint, make_language_model
from tests.project import LABELS, Project
from tests.releases.vllm_environment import PYTHON

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        PYTHON not in os.environ,
        reason=f"{PYTHON} names no Python that has vLLM; make test-releases installs one where it can",
    ),
]

ROWS = 60
# Of several tokens, of which the later ones stand behind the first, and of one.
TEXTS = {"winner_a": " act", "winner_b": " plant", "tie": "x"}
LETTERS = {"winner_a": "a", "winner_b": "b", "tie": "c"}
# Little memory, nothing from the network, and nothing compiled at the first request.
_SMALL = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def server(checkpoint: Path, dtype: str, *options: str) -> dict[str, Any]:
    """How a member starts vLLM; ``vllm serve`` of this wheel looks for a package called vllm, and ends."""
    module = ["-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--max-num-seqs", "16"]
    address = ["--host", "127.0.0.1", "--port", "{port}", "--served-model-name", "tiny"]
    model = ["--model", str(checkpoint), "--dtype", dtype]
    words = [os.environ[PYTHON], *module, *address, *model, *options]
    return {"command": words, "ready_timeout": "10m"}


def compared(project: Project, *models: dict[str, Any]) -> list[npt.NDArray[np.float64]]:
    """The probabilities of a run's members."""
    project.write_table(ROWS)
    project.write_config(project.config(models=list(models), submission=None, defaults=None))
    with tempfile.TemporaryDirectory() as folder:  # vLLM leaves its sockets there, however it ends
        done = project.ensemble("run", "config.yaml", environment={**_SMALL, "TMPDIR": folder})
    logs = [path.read_text(errors="replace")[-3000:] for path in project.folder.glob("runs/first/logs/*")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    return [project.values(f"runs/first/predictions/{model['name']}.csv") for model in models]


# Rounded to bfloat16 at each step, probabilities differ by a hundredth of what tells rows apart, whoever computes.
@pytest.mark.parametrize(
    ("api", "label_tokens", "dtype", "spread", "tolerance"),
    [
        ("completions", TEXTS, "float32", 0.21, 1e-5),
        ("chat", LETTERS, "float32", 0.21, 1e-5),
        ("completions", LETTERS, "bfloat16", 0.01, 1e-3),
    ],
)
def test_a_language_model(
    project: Project, api: str, label_tokens: dict[str, str], dtype: str, spread: float, tolerance: float
) -> None:
    checkpoint = make_language_model(
        project.folder / "tiny",
        "llama",
        hidden_size=128,
        # With 32 or 64 bfloat16 takes AMX, and vLLM dies of an illegal instruction at a short first prompt.
        head_dim=80,
        max_position_embeddings=512,
        initializer_range=spread,
    )
    chat = "<bos>{% for one in messages %}[{{ one.role }}] {{ one.content }}<eos>{% endfor %}[assistant] "
    (checkpoint / "chat_template.jinja").write_text(chat, encoding="utf-8")
    prompt = {"prompt_template": "{{ text }} .", "label_tokens": label_tokens}
    served, here = compared(
        project,
        {
            **{"name": "served", "task_type": "endpoint", "model": "tiny", "api": api},
            **{"server": server(checkpoint, dtype), **prompt},
        },
        {
            **{
                "name": "here",
                "task_type": "causal_lm",
                "model_name_or_path": str(checkpoint),
                "dtype": dtype,
            },
            **{"apply_chat_template": api == "chat", **prompt},
        },
    )
    assert here.std(axis=0).max() > 5 * tolerance  # rows are told apart
    np.testing.assert_allclose(served, here, atol=tolerance)


def test_a_classifier(project: Project) -> None:
    labels = ["tie", "winner_a", "winner_b"]  # not the order of the config
    checkpoint = make_checkpoint(project.folder / "tiny", "llama", labels, width=128)
    served, here = compared(
        project,
        {
            **{"name": "served", "task_type": "endpoint", "model": "tiny", "api": "classify"},
            **{
                "server": server(checkpoint, "float32", "--runner", "pooling"),
                "prompt_template": "{{ text }}",
            },
            "label_map": {label: label for label in labels},
        },
        {"name": "here", "model_name_or_path": str(checkpoint), "text_column": "text", "dtype": "float32"},
    )
    assert labels != LABELS
    assert here.std(axis=0).min() > 0.01
    np.testing.assert_allclose(served, here, atol=1e-5)
