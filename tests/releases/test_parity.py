"""Every architecture family against plain transformers with eager attention, row by row, in float32.

On each supported release of transformers: what the plan decides and the worker computes must not lean on a default
that differs between them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ensemble.common.protocol import ChunkDone, Predict, Ready
from tests.checkpoints import make_texts, reference
from tests.members.huggingface.scoring.test_compute import read_shard
from tests.members.huggingface.scoring.test_predict import with_ends, worker_spec
from tests.releases.families import FAMILIES, make_family
from tests.sampling import one_in
from tests.worker.test_session import publish, served

# Other releases deprecate other things.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]
LABELS = ["yes", "no", "tie"]
TEXTS = make_texts(24, longest=40)


def planned_attention(folder: Path) -> str:
    """What ``plan`` says that a member of this checkpoint takes on a CPU."""
    from ensemble.members.huggingface.memory import checkpoint_memory
    from ensemble.members.seq_cls.parent import SequenceClassifierSettings
    from tests.checkpoints import inspect_folder

    model = SequenceClassifierSettings.model_validate(
        {"name": "one", "model_name_or_path": str(folder), "text_column": "text"}
    )
    checkpoint = inspect_folder(folder, LABELS)
    memory = checkpoint_memory(model, checkpoint, np.array([len(text) for text in TEXTS]), len(LABELS))
    chosen = memory.attention("float32", 0, None)
    assert chosen is not None
    return chosen


def worker_result(
    folder: Path, place: Path, *, texts: Sequence[str] = TEXTS, **settings: Any
) -> tuple[npt.NDArray[np.float64], Ready, ChunkDone]:
    """A worker's probabilities of all texts, [rows, labels], and what it says of itself."""
    place.mkdir()
    spec = worker_spec(folder, **publish(place, {"text": list(texts)}), **settings)
    code, events = served(spec, Predict(0, 0, len(texts)))
    assert code == 0, events
    ready = next(event for event in events if isinstance(event, Ready))
    done = next(event for event in events if isinstance(event, ChunkDone))
    part = read_shard(place / "shards", done.shard)
    return part[np.argsort(part[:, 0]), 1:], ready, done


@pytest.mark.fault(30)
@pytest.mark.parametrize("family", one_in(6, FAMILIES))
def test_every_family_equals_eager_attention_row_by_row(family: str, tmp_path: Path) -> None:
    folder = make_family(tmp_path / "a model", family, LABELS)
    expected = reference(folder, TEXTS)
    assert expected.max(axis=1).std() > 0.02, "the checkpoint must tell rows apart"
    attention = planned_attention(folder)
    batchings: list[dict[str, Any]] = [{}, {"batch_size": 5}]
    for number, batching in enumerate(batchings):
        got, ready, _ = worker_result(
            folder,
            tmp_path / str(number),
            attn_implementation=attention,
            asked=(),
            **batching,
        )
        np.testing.assert_allclose(got, expected, atol=2e-5, err_msg=str(batching))
        assert ready.attn_implementation == attention  # what plan says is what the run does


# A decoder's head reads one token; transformers' generic head does, and forward passes of their own.
@pytest.mark.parametrize(
    "family", one_in(5, ["gpt2", "falcon", "opt", "gptj", "bloom", "llama", "mpt", "qwen3"])
)
def test_texts_that_end_with_the_pad_token_are_read_as_by_their_own_forward_pass(
    family: str, tmp_path: Path
) -> None:
    folder = make_family(tmp_path / "a model", family, LABELS, pad="<eos>")
    texts = with_ends(TEXTS)
    got, _, _ = worker_result(
        folder, tmp_path / "place", texts=texts, attn_implementation=planned_attention(folder), asked=()
    )
    np.testing.assert_allclose(got, reference(folder, texts), atol=2e-5)


@pytest.mark.long
def test_a_head_that_reads_at_eos_counts_no_padding(tmp_path: Path) -> None:
    """BART's, where the config's pad id is that of eos and its tokenizer pads with another token."""
    folder = make_family(tmp_path / "a model", "bart", LABELS)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**config, "pad_token_id": config["eos_token_id"]}), encoding="utf-8"
    )
    got, _, done = worker_result(folder, tmp_path / "place", attn_implementation="eager", asked=())
    assert not done.bad_rows
    np.testing.assert_allclose(got, reference(folder, TEXTS), atol=2e-5)
