"""What adapters of views, and means of adapters, take in the plan, against what a worker loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.members.base import OutputColumns
from ensemble.members.huggingface.memory import CheckpointMemory
from ensemble.members.huggingface.spec import AdapterSource
from ensemble.members.seq_cls.parent import SequenceClassification, SequenceClassifierSettings
from tests.checkpoints import make_adapter, make_base
from tests.members.huggingface.scoring.test_predict import worker_spec

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
LABELS = ("a", "b", "c")


def loaded_bytes(base: Path, *sources: AdapterSource) -> int:
    """The bytes of all that is the adapters' in a loaded model."""
    from ensemble.members.huggingface.loading.load import load

    model = load(worker_spec(base, job_adapters=sources)).model
    return sum(tensor.nbytes for name, tensor in model.named_parameters() if "adapter0" in name)


def test_the_plan_counts_every_adapter(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    adapters = [str(make_adapter(tmp_path / f"a{n}", base, 3, seed=n, r=8 * (n + 1))) for n in range(3)]
    label_map = {f"LABEL_{number}": label for number, label in enumerate(LABELS)}

    def memory(**keys: Any) -> CheckpointMemory:
        given = {"name": "m", "model_name_or_path": str(base), "text_column": "text", "label_map": label_map}
        kind = SequenceClassification(SequenceClassifierSettings(**{**given, **keys}))
        estimate = kind.memory(kind.inspect(OutputColumns("id", LABELS)), np.array([40]), 3)
        assert isinstance(estimate, CheckpointMemory)
        return estimate

    views = [{"name": f"v{n}", "adapter_name_or_path": adapter} for n, adapter in enumerate(adapters)]
    twice = memory(views=[*views, {**views[0], "name": "again", "prompt_template": "{{ text }}"}])
    sources = [AdapterSource((adapter,)) for adapter in adapters]
    assert twice.adapter_bytes == pytest.approx(loaded_bytes(base, *sources), rel=0.1)
    assert twice.lora == (128, 24), "they take turns: the widest counts"
    mean = memory(adapters={"average": adapters})
    assert mean.adapter_bytes == pytest.approx(
        loaded_bytes(base, AdapterSource(tuple(adapters), "cat")), rel=0.1
    )
    assert mean.lora == (128, 8 + 16 + 24)
    assert memory(adapters={"average": adapters}, merge_adapter=True).lora == (0, 0)
    equal = [adapters[0], str(make_adapter(tmp_path / "equal", base, 3, r=8))]
    linear = memory(adapters={"average": equal, "combination_type": "linear"})
    expected = loaded_bytes(base, AdapterSource(tuple(equal), "linear"))
    assert linear.adapter_bytes == pytest.approx(expected, rel=0.1)
    assert linear.lora == (128, 8)
