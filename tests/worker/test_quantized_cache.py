"""Quantize once: kept 4-bit weights give the same numbers, and nothing that is not whole is loaded."""

from __future__ import annotations

import fcntl
import json
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_adapter, make_base, make_checkpoint, make_texts, make_tokenizer
from tests.worker.test_predict import LABELS, compute, worker_spec
from tests.worker.test_quantization import FOUR_BITS, quantized

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft on transformers 5
]
ROWS = [{"text": text} for text in make_texts(15, longest=25)]
KEPT = "are kept in the run directory for later loads"
LOADED = "loaded from the quantized weights in the run directory"


def load(spec: Any) -> Any:
    from ensemble.members.huggingface.loading.load import load

    return load(spec)


def bits(model: Any) -> dict[str, tuple[str, bytes]]:
    """Every number of a model, the scales of its 4-bit layers among them."""
    import torch

    return {
        name: (str(tensor.dtype), tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in model.state_dict().items()
        if tensor.dim()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", LABELS)


def asked(folder: Path, cache: Path, **changes: Any) -> Any:
    return worker_spec(folder, **{"quantization_config": FOUR_BITS, "cache_dir": str(cache), **changes})


@pytest.mark.parametrize(
    ("architecture", "dtype"), [("llama", "float32"), ("gemma2", "bfloat16"), ("bert", "float16")]
)
def test_what_was_kept_is_what_was_quantized(architecture: str, dtype: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", architecture, LABELS)
    plain = worker_spec(folder, quantization_config=FOUR_BITS, dtype=dtype)
    spec = asked(folder, tmp_path / "cache", dtype=dtype)
    first = load(spec)
    assert [KEPT in note for note in first.notes if "quantized weights" in note] == [True]
    weights = folder / "model.safetensors"
    weights.rename(tmp_path / "away")  # what is loaded now is not the checkpoint
    second = load(spec)
    got = compute(spec, ROWS)
    (tmp_path / "away").rename(weights)
    assert LOADED in second.notes
    assert bits(load(plain).model) == bits(second.model) == bits(load(spec).model)
    np.testing.assert_array_equal(got, compute(plain, ROWS))
    assert second.dtype == first.dtype == dtype
    assert second.parameters == first.parameters
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {".lock", "quantized"}


def test_of_an_adapter_the_base_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = make_base(tmp_path / "base", "llama")
    one, other = (make_adapter(tmp_path / f"adapter {seed}", base, 3, seed=seed) for seed in (0, 5))
    values = []
    for adapter in (one, other):
        keys = {"adapter_name_or_path": str(adapter)}
        wanted = compute(worker_spec(base, quantization_config=FOUR_BITS, **keys), ROWS)
        assert any(KEPT in note for note in load(asked(base, tmp_path / adapter.name, **keys)).notes)
        assert LOADED in load(asked(base, tmp_path / adapter.name, **keys)).notes
        np.testing.assert_array_equal(compute(asked(base, tmp_path / adapter.name, **keys), ROWS), wanted)
        values.append(wanted)
    assert np.abs(values[0] - values[1]).max() > 0.01
    broken = tmp_path / "headless"  # the base has no head, and an adapter without one leaves it random
    headless = make_adapter(broken, base, 3, task_type=None, target_modules=["q_proj", "v_proj"])
    for _ in range(2):  # from the checkpoint, and from what is kept
        with pytest.raises(ValueError, match="score"):
            load(asked(base, tmp_path / one.name, adapter_name_or_path=str(headless)))


def cut_short(kept: Path) -> None:
    path = kept / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def broken_header(kept: Path) -> None:
    path = kept / "model.safetensors"
    path.write_bytes(b"\xff" * 100 + path.read_bytes()[100:])


def lost(kept: Path) -> None:
    (kept / "model.safetensors").unlink()


def half_written(kept: Path) -> None:
    kept.rename(kept.with_name(".quantized.tmp-1-abc"))


def by_another_version(kept: Path) -> None:
    note = json.loads((kept / "made_of.json").read_text())
    note["made_by"]["bitsandbytes"] = "0.1"
    (kept / "made_of.json").write_text(json.dumps(note))


def without_a_layer(kept: Path) -> None:
    """As large as it was by its note, and of another model."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(kept / "model.safetensors")
    save_file({k: t for k, t in tensors.items() if "layers.1." not in k}, kept / "model.safetensors")
    note = json.loads((kept / "made_of.json").read_text())
    note["bytes"]["model.safetensors"] = (kept / "model.safetensors").stat().st_size
    (kept / "made_of.json").write_text(json.dumps(note))


@pytest.mark.parametrize(
    "harm", [cut_short, broken_header, lost, half_written, by_another_version, without_a_layer]
)
def test_what_is_not_whole_is_quantized_anew(
    harm: Callable[[Path], None], folder: Path, tmp_path: Path
) -> None:
    spec = asked(folder, tmp_path / "cache")
    wanted = bits(load(spec).model)
    kept = tmp_path / "cache" / "quantized"
    harm(kept)
    again = load(spec)
    assert LOADED not in again.notes
    assert any(KEPT in note for note in again.notes), again.notes
    assert bits(again.model) == wanted
    assert LOADED in load(spec).notes
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {".lock", "quantized"}


def test_other_settings_are_other_weights(folder: Path, tmp_path: Path) -> None:
    load(asked(folder, tmp_path))
    for keys in ({"quantization_config": {**FOUR_BITS, "bnb_4bit_quant_type": "fp4"}}, {"dtype": "float16"}):
        spec = worker_spec(folder, **{"quantization_config": FOUR_BITS, "cache_dir": str(tmp_path), **keys})
        assert LOADED not in load(spec).notes
        assert LOADED in load(spec).notes


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 64 KiB: writing fails with EFBIG (setrlimit(2), RLIMIT_FSIZE)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_is_no_failure(folder: Path, tmp_path: Path, small_files: None) -> None:
    loaded = load(asked(folder, tmp_path))
    assert [note for note in loaded.notes if note.startswith("its quantized weights are not kept (")]
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}


def test_plan_and_worker_leave_the_same_room(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ensemble.common.files import may_keep
    from ensemble.members.huggingface.loading import quantized_cache

    model = load(worker_spec(folder, quantization_config=FOUR_BITS)).model
    size = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    enough = next(free for free in range(size, size + (2 << 30), 1 << 20) if may_keep(size, free))
    monkeypatch.setattr(quantized_cache, "free_bytes", lambda _: enough - (1 << 20))
    (said,) = load(asked(folder, tmp_path)).notes
    assert said.startswith("its quantized weights (0.1 MiB) are not kept: the disk has ")
    monkeypatch.setattr(quantized_cache, "free_bytes", lambda _: enough)
    (said,) = load(asked(folder, tmp_path)).notes
    assert KEPT in said


def test_one_replica_writes(folder: Path, tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another replica that is writing
        assert not any("quantized weights" in note for note in load(asked(folder, tmp_path)).notes)
        assert not (tmp_path / "quantized").exists()
    assert any(KEPT in note for note in load(asked(folder, tmp_path)).notes)


def test_a_checkpoint_that_changes_meanwhile_is_not_kept(folder: Path, tmp_path: Path) -> None:
    from ensemble.common.files import folder_states

    changing = tmp_path / "model"
    shutil.copytree(folder, changing)
    states = folder_states(changing)
    (changing / "model.safetensors").touch()
    loaded = load(asked(changing, tmp_path / "cache", files=states))
    assert any("not kept (FilesChanged" in note for note in loaded.notes), loaded.notes
    assert not (tmp_path / "cache/quantized").exists()


STORED = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("stored", "capability", "expected"),
    [
        (STORED, (7, 5), "float16"),
        ({**STORED, "bnb_4bit_compute_dtype": "torch.bfloat16"}, (7, 0), "float16"),
        (STORED, (8, 0), None),
        (STORED, (9, 0), None),
        (STORED, None, None),
        ({**STORED, "bnb_4bit_compute_dtype": "float32"}, (7, 5), None),
        ({"load_in_8bit": True, "bnb_4bit_compute_dtype": "bfloat16"}, (7, 5), None),
        (None, (7, 5), None),
    ],
)
def test_bfloat16_of_stored_layers_is_float16_before_ampere(
    stored: dict[str, Any] | None, capability: tuple[int, int] | None, expected: str | None
) -> None:
    from ensemble.members.huggingface.loading.quantization import compute_notes
    from ensemble.members.huggingface.spec import choose_compute_dtype

    assert choose_compute_dtype(stored, capability) == expected
    # Where the config asks for the same, it is obeyed, and said.
    notes = compute_notes(stored, capability)
    assert len(notes) == (expected is not None)
    assert all(
        "bfloat16 is only emulated" in note and "float16 is what this GPU has" in note for note in notes
    )


def test_bfloat16_that_is_asked_for_is_obeyed_and_noted_before_ampere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ensemble.members.huggingface.loading import quantization
    from ensemble.members.huggingface.spec import choose_compute_dtype

    monkeypatch.setattr(  # a T4's rules on this CPU
        quantization, "choose_compute_dtype", lambda settings, _: choose_compute_dtype(settings, (7, 5))
    )
    settings = {**FOUR_BITS, "bnb_4bit_compute_dtype": "bfloat16"}
    spec = asked(folder, tmp_path, quantization_config=settings)
    for what in (KEPT, LOADED):
        loaded = load(spec)
        assert what in " ".join(loaded.notes)
        assert [note.split(";")[0] for note in loaded.notes if "emulated" in note] == [
            "bnb_4bit_compute_dtype: bfloat16 is only emulated below compute capability 8.0: slow"
        ]
        layer = loaded.model.model.layers[0].mlp.down_proj
        assert str(layer.compute_dtype) == "torch.bfloat16"
    quiet = load(worker_spec(folder, quantization_config=FOUR_BITS))
    assert not [note for note in quiet.notes if "emulated" in note]


def test_stored_layers_compute_as_the_plan_says(folder: Path, tmp_path: Path) -> None:
    import torch

    saved = tmp_path / "four bits"
    quantized(folder, {**FOUR_BITS, "bnb_4bit_compute_dtype": torch.bfloat16}).save_pretrained(saved)
    make_tokenizer(saved)

    def compute_dtypes(loaded: Any) -> set[torch.dtype]:
        return {one.compute_dtype for one in loaded.model.modules() if hasattr(one, "compute_dtype")}

    before, after = load(worker_spec(saved)), load(worker_spec(saved, compute_dtype="float16"))
    assert compute_dtypes(before) == {torch.bfloat16}
    assert compute_dtypes(after) == {torch.float16}
    assert before.notes == ()
    assert [note.split(":")[0] for note in after.notes] == ["4-bit layers compute in float16"]
    seen = []
    layer = after.model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda module, inputs, output: seen.append(module.compute_dtype))
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        in_float16 = after.model(tokens).logits.double().softmax(-1)
        as_stored = before.model(tokens).logits.double().softmax(-1)
    assert seen == [torch.float16], "bitsandbytes has not chosen another at the first pass"
    assert 0 < (in_float16 - as_stored).abs().max() < 0.2
