"""Adapters that take turns on one base, against a load of each by itself and against plain peft row by row."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ensemble.data.published_table import PublishedTable
from ensemble.members.huggingface.spec import AdapterSource, ModelSpec
from tests.checkpoints import (
    adapter_reference,
    four_bits_tolerance,
    make_adapter,
    make_base,
    make_checkpoint,
    make_texts,
    reference,
)
from tests.members.huggingface.scoring.test_predict import LABELS, worker_spec
from tests.sampling import one_in
from tests.worker.test_session import publish

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft on transformers 5
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),  # GPT-2; peft fixes it by itself
    pytest.mark.filterwarnings("ignore:Found missing adapter keys"),  # an error of ours
]
Values = npt.NDArray[np.float64]
TEXTS = make_texts(16, longest=25)
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# Of different ranks, scalings and layers; what the files say of other tasks and of heads differs, too.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"r": 2, "lora_alpha": 3, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    {"r": 8, "task_type": None, "target_modules": ["v_proj"], "modules_to_save": ["score"]},
    {"task_type": None, "target_modules": ["k_proj"]},  # no head of its own
]


def member(spec: ModelSpec, adapters: Sequence[Path | None], where: Path) -> Any:
    """A worker's predictor, loaded, with a view for each adapter; None: the base alone."""
    from ensemble.members.seq_cls.predictor import ClassifierSpec, SequenceClassifier

    sources = tuple(None if adapter is None else AdapterSource((str(adapter),)) for adapter in adapters)
    places: dict[str, Any] = publish(Path(tempfile.mkdtemp(dir=where)), {"text": TEXTS})
    spec = replace(spec, **places, job_adapters=sources, job_templates=(None,) * len(sources))
    whole = ClassifierSpec(**vars(spec))
    made = SequenceClassifier(whole, PublishedTable(Path(spec.table_path)))
    made.load()
    return made


def predict(made: Any, view: int) -> Values:
    made.use_job(view)
    values: Values = made.predict(np.arange(len(TEXTS)), lambda *_: None).values
    return values


def make_adapters(where: Path, base: Path, settings: Sequence[dict[str, Any]]) -> list[Path]:
    return [make_adapter(where / f"a{n}", base, 3, seed=n, **keys) for n, keys in enumerate(settings)]


def make_adapter_of(config: Any, base: Path, folder: Path) -> Path:
    """An adapter of another kind than LoRA, without a head."""
    from transformers import AutoModelForSequenceClassification

    peft.get_peft_model(AutoModelForSequenceClassification.from_pretrained(base), config).save_pretrained(
        folder
    )
    return folder


@pytest.mark.parametrize("order", one_in(3, ["0123", "3210", "2031"]))
def test_each_view_equals_a_load_of_its_adapter_alone(order: str, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", LABELS)
    adapters = make_adapters(tmp_path, base, SETTINGS)
    chosen: list[Path | None] = [adapters[int(number)] for number in order]
    chosen.insert(2, None)
    spec = worker_spec(base, dtype="float32")
    together = member(spec, chosen, tmp_path)
    views = [predict(together, view) for view in range(len(chosen))]
    for view in (3, 0, 2, 2, 4, 1, 0):
        np.testing.assert_array_equal(predict(together, view), views[view])
    for adapter, values in zip(chosen, views, strict=True):
        alone = predict(member(spec, [adapter], tmp_path), 0)
        np.testing.assert_allclose(values, alone, rtol=0, atol=1e-6)
        plain = reference(base, TEXTS) if adapter is None else adapter_reference(base, adapter, TEXTS, 3)
        np.testing.assert_allclose(values, plain, rtol=0, atol=1e-5)
    differences = [np.abs(views[0] - other).max() for other in views[1:]]
    assert min(differences) > 0.05, "the adapters must matter"


@pytest.mark.parametrize("architecture", one_in(5, ["bert", "roberta", "gpt2", "gemma2", "deberta-v2"]))
def test_heads_and_layers_of_other_families(architecture: str, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", architecture, LABELS)
    adapters = make_adapters(tmp_path, base, [{}, {"r": 2}])
    together = member(worker_spec(base, dtype="float32"), [*adapters, None], tmp_path)
    for view in (1, 0, 2, 1):
        plain = reference(base, TEXTS) if view == 2 else adapter_reference(base, adapters[view], TEXTS, 3)
        np.testing.assert_allclose(predict(together, view), plain, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("dtype", one_in(2, ["float32", "bfloat16"]))
def test_on_a_base_of_four_bits(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    base = make_base(tmp_path / "base", "llama")
    adapters = make_adapters(tmp_path, base, SETTINGS[:3])
    spec = worker_spec(base, dtype=dtype, quantization_config=NF4)
    together = member(spec, adapters, tmp_path)
    views = [predict(together, view) for view in (0, 1, 2)]
    np.testing.assert_array_equal(predict(together, 0), views[0])
    whole = BitsAndBytesConfig(**NF4, llm_int8_skip_modules=["score"])
    for adapter, values in zip(adapters, views, strict=True):
        alone = predict(member(spec, [adapter], tmp_path), 0)
        np.testing.assert_allclose(values, alone, rtol=0, atol=1e-6)
        if dtype == "float32":
            plain = adapter_reference(
                base, adapter, TEXTS, 3, quantization_config=whole, device_map={"": "cpu"}
            )
            np.testing.assert_allclose(values, plain, rtol=0, atol=four_bits_tolerance())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")  # peft's
def test_an_adapter_that_was_left_beside_the_base_is_not_used(tmp_path: Path) -> None:
    """transformers loads it and makes it active."""
    pytest.importorskip("peft.utils.transformers_weight_conversion", reason="transformers asks for it")
    base = make_base(tmp_path / "base", "llama")
    adapters = make_adapters(tmp_path, base, [{}, {"r": 2}, {}])
    plain = [adapter_reference(base, adapter, TEXTS, 3) for adapter in adapters]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapters[2] / name, base)
    together = member(worker_spec(base, dtype="float32"), adapters, tmp_path)
    for view in (0, 1, 2, 0):
        np.testing.assert_allclose(predict(together, view), plain[view], rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")  # peft's
def test_an_adapter_that_brings_a_part_of_the_base(tmp_path: Path) -> None:
    """peft saves an embedding beside the LoRA on it, and loads it into the base that other views use."""
    base = make_base(tmp_path / "base", "llama")
    adapters = make_adapters(tmp_path, base, [{}, {"target_modules": ["q_proj", "embed_tokens"]}])
    with pytest.raises(
        ValueError, match=r"adapter .*a1 brings model\.embed_tokens\..* of the base, which other"
    ):
        member(worker_spec(base), adapters, tmp_path)


def test_a_second_adapter_that_does_not_fit(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    adapters = make_adapters(tmp_path, base, [{}])
    bert = make_adapter(tmp_path / "bert", make_checkpoint(tmp_path / "b", "bert", LABELS), 3)
    with pytest.raises(
        ValueError, match=r"adapter .*bert (is not for .*base: .*it was trained|has no weights)"
    ):
        member(worker_spec(base), [*adapters, bert], tmp_path)
    ia3 = make_adapter_of(
        peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), base, tmp_path / "ia3"
    )
    with pytest.raises(ValueError, match=r"ia3 is not for .*base: Cannot combine adapters with"):
        member(worker_spec(base), [*adapters, ia3], tmp_path)
    beside = {"task_type": None, "target_modules": ["q_proj", "score"]}
    with pytest.raises(ValueError, match=r"a1 is not for .*base: Target module ModulesToSaveWrapper"):
        member(worker_spec(base), make_adapters(tmp_path / "beside", base, [{}, beside]), tmp_path)
    five = make_adapter(tmp_path / "five", base, 5)
    with pytest.raises(ValueError, match=r"five is not for .*base: size mismatch for .*score"):
        member(worker_spec(base), [*adapters, five], tmp_path)
    config = adapters[0] / "adapter_config.json"
    shutil.copytree(adapters[0], tmp_path / "rank")
    (tmp_path / "rank" / config.name).write_text(config.read_text().replace('"r": 4', '"r": 6'))
    with pytest.raises(ValueError, match=r"rank is not for .*base: size mismatch for .*lora_"):
        member(worker_spec(base), [*adapters, tmp_path / "rank"], tmp_path)
    with pytest.raises(ValueError, match=r"has no weights for score\.weight; they would be random"):
        member(worker_spec(base), [*adapters, None], tmp_path)
