"""What is done before a device is free: the model's code is imported, and nothing fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ensemble.common.protocol import encode
from tests.checkpoints import make_checkpoint, make_texts
from tests.worker.test_predict import LABELS, predictor, start, worker_spec
from tests.worker.test_session import publish


@pytest.mark.long
def test_a_member_that_stands_by_has_its_code_and_neither_model_nor_device(tmp_path: Path) -> None:
    """In a process of its own, since this one has imported too much already."""
    folder = make_checkpoint(tmp_path / "m", "gemma2", LABELS)
    places = publish(tmp_path, {"text": make_texts(5)})
    spec = worker_spec(folder, **places)
    code = (
        "import sys, numpy as np, torch\n"
        "from ensemble.common.protocol import decode\n"
        "from ensemble.members.huggingface.spec import ModelSpec\n"
        "from ensemble.data.published_table import PublishedTable\n"
        "from ensemble.members.seq_cls.predictor import SequenceClassifier\n"
        "assert 'transformers.models.gemma2.modeling_gemma2' not in sys.modules\n"
        "spec = decode(sys.argv[1]).spec\n"
        "table = PublishedTable(spec.common.table_path)\n"
        "member = SequenceClassifier(ModelSpec.of(spec.common, spec.settings), table)\n"
        "assert 'transformers.models.gemma2.modeling_gemma2' in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
        "import gc\n"
        "assert not [one for one in gc.get_objects() if isinstance(one, torch.nn.Parameter)]\n"
        "print(member.load().parameters)\n"
    )
    line = encode(start(spec))
    done = subprocess.run([sys.executable, "-c", code, line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


@pytest.mark.usefixtures("one_thread")
def test_what_is_wrong_with_a_checkpoint_shows_when_it_is_loaded(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama", LABELS)
    (folder / "model.safetensors").unlink()
    member = predictor(worker_spec(folder, **publish(tmp_path, {"text": ["a"]})))
    with pytest.raises(ValueError, match="no safetensors weights"):
        member.load()
