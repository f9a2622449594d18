"""What is done before a device is free: the right files read, no more of them than allowed, nothing that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ensemble.common.protocol import encode
from tests.checkpoints import make_checkpoint, make_texts
from tests.waiting import PATIENCE_SECONDS
from tests.worker.test_predict import LABELS, predictor, start, worker_spec
from tests.worker.test_session import publish


def names(folder: Path, **changes: object) -> list[str]:
    from ensemble.members.huggingface.loading.preload import weight_files

    return [str(path.relative_to(folder)) for path in weight_files(worker_spec(folder, **changes))]


def test_the_files_that_loading_reads(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "optimizer.pt", "model.gguf", "config.json"):
        (tmp_path / name).write_bytes(b"x")
    assert names(tmp_path) == []
    assert names(tmp_path, allow_pickle=True) == ["pytorch_model.bin"]
    assert names(tmp_path, gguf_file="model.gguf") == ["model.gguf"]
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert names(tmp_path, allow_pickle=True) == ["model.safetensors"]
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for shard in shards[:2]:
        (tmp_path / shard).write_bytes(b"x")
    (tmp_path / "model.safetensors").unlink()  # which transformers would take first
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shards[1], "b": shards[0], "c": shards[2]}}))
    assert names(tmp_path) == shards[:2]
    index.write_text("[")
    assert names(tmp_path) == []
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"x")
    adapter = str(tmp_path / "adapter")
    assert names(tmp_path, adapter_name_or_path=adapter) == ["adapter/adapter_model.safetensors"]
    assert names(tmp_path, adapter_name_or_path="nobody/has-this") == []


def test_no_more_is_read_than_allowed_and_loading_ends_it_where_not_all_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ensemble.members.huggingface.loading import preload

    monkeypatch.setattr(preload, "_PIECE_BYTES", 100)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(b"x" * 250)

    def read(paths: list[Path], limit_bytes: int = 10_000) -> int:
        reading = preload.ReadAhead(paths, limit_bytes)
        reading.join(PATIENCE_SECONDS)
        assert not reading.is_alive()
        return reading.read_bytes

    for limit in (0, 90, 420, 750, 10_000):
        assert read(paths, limit) == min(limit, 750)
    assert read([tmp_path / "nothing", *paths]) == 0
    # Loading begins while it waits for the first file: only if all of them may be kept, the others are read.
    for number, (limit, after) in enumerate([(10_000, 750), (750, 750), (749, 0)]):
        os.mkfifo(slow := tmp_path / f"slow {number}")
        reading = preload.ReadAhead([slow, *paths], limit)
        reading.begin_load()
        with slow.open("wb", buffering=0):  # it waits for what comes
            pass
        reading.join(PATIENCE_SECONDS)
        assert not reading.is_alive()
        assert reading.read_bytes == after


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
        "member.preload(1 << 30)\n"
        "member.prepare(np.arange(5))\n"
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
    member.preload(1 << 20)
    member.prepare(np.arange(1))
    with pytest.raises(ValueError, match="no safetensors weights"):
        member.load()
