"""Backbones with heads of their own, against plain transformers and torch run one row at a time."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from ensemble.common.errors import CheckpointError
from ensemble.common.protocol import CommonSpec
from ensemble.data.published_table import PublishedTable
from ensemble.members.base import Assigned, OutputColumns
from ensemble.members.huggingface.spec import BACKBONE
from ensemble.members.pooled_cls.parent import PooledClassification, PooledSettings
from ensemble.members.pooled_cls.predictor import PooledSpec
from tests.checkpoints import make_checkpoint, make_language_model, make_texts, prime
from tests.members.huggingface.scoring.test_float32 import make_overflowing
from tests.members.huggingface.scoring.test_predict import worker_spec
from tests.sampling import one_in
from tests.worker.test_session import publish

if TYPE_CHECKING:
    from torch import nn

    from ensemble.members.pooled_cls.predictor import PooledMember
    from ensemble.members.predictor import Prediction

pytestmark = pytest.mark.usefixtures("one_thread")
LABELS = ("yes", "no", "tie")


def make_backbone(folder: Path, architecture: str, saved_as: str = "AutoModel", **options: Any) -> Path:
    """A checkpoint without a head, or with that of another task."""
    import transformers

    if saved_as == "AutoModelForCausalLM":
        return prime(make_language_model(folder, architecture, **options), BACKBONE)
    make_checkpoint(folder, architecture, LABELS, **options)
    if saved_as != "AutoModelForSequenceClassification":
        model = getattr(transformers, saved_as).from_pretrained(folder)
        model.save_pretrained(folder)
    return prime(folder, BACKBONE)


def save_head(path: Path, head: nn.Module, prefix: str = "fc.") -> Path:
    from safetensors.torch import save_file

    save_file({f"{prefix}{name}": tensor for name, tensor in head.state_dict().items()}, path)
    return path


def linear(inputs: int = 64, outputs: int = 3, seed: int = 0) -> nn.Linear:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


def pooled_reference(
    folder: Path,
    head: nn.Module,
    pooling_mode: str,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    max_length: int = 1024,
    **options: Any,
) -> npt.NDArray[np.float64]:
    """The head's outputs by plain transformers, one row at a time and so without padding, in float32."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(
        folder, **{"dtype": torch.float32, "attn_implementation": "eager", **options}
    ).eval()
    rows = []
    for text in texts:
        arguments = [[part] for part in text] if isinstance(text, tuple) else [[text]]
        inputs = tokenizer(*arguments, truncation=True, max_length=max_length, return_tensors="pt")
        with torch.no_grad():
            states = model(**inputs).last_hidden_state[0].float()
            pooled = {"mean": states.mean(0), "cls": states[0], "lasttoken": states[-1]}[pooling_mode]
            rows.append(head(pooled[None])[0].double().numpy())
    return np.stack(rows)


def softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(1, keepdims=True))


def member(
    where: Path,
    folder: Path,
    head: Path,
    columns: dict[str, list[str]],
    labels: Sequence[str] = LABELS,
    **keys: Any,
) -> PooledMember:
    """The child side, made of what the parent side tells it, and loaded."""
    from ensemble.members.pooled_cls.predictor import PooledMember

    given = {
        **{"name": "m", "model_name_or_path": str(folder), "head": head, "pooling_mode": "mean"},
        "text_column": next(iter(columns)) if len(columns) == 1 else tuple(columns),
        **keys,
    }
    parent = PooledClassification(PooledSettings(**given))
    inspected = parent.inspect(OutputColumns("id", tuple(labels)))
    attention = parent.settings.attn_implementation
    assigned = Assigned(gpus=0, dtype=keys.get("dtype", "auto"), attention=attention)
    settings = parent.worker_settings(inspected, assigned, None)
    places = publish(Path(tempfile.mkdtemp(dir=where)), columns)
    plain = worker_spec(folder, labels=tuple(labels), activation=inspected.activation, **places)
    common = CommonSpec(**{field.name: getattr(plain, field.name) for field in fields(CommonSpec)})
    made = PooledMember(PooledSpec.of(common, settings), PublishedTable(Path(common.table_path)))
    made.load()
    return made


def predict(made: PooledMember, rows: int) -> Prediction:
    return made.predict(np.arange(rows), lambda *_: None)


CASES = [
    ("deberta-v2", "mean", {}),
    ("bert", "cls", {"saved_as": "AutoModelForMaskedLM"}),
    ("roberta", "mean", {"side": "left", "saved_as": "AutoModelForSequenceClassification"}),
    ("gpt2", "lasttoken", {"pad": None, "saved_as": "AutoModelForSequenceClassification"}),
    ("qwen2", "lasttoken", {"pad": "<eos>", "side": "left", "saved_as": "AutoModelForCausalLM"}),
    ("gemma2", "mean", {"side": "left"}),
]


@pytest.mark.parametrize(
    ("architecture", "pooling_mode", "options"), one_in(2, CASES), ids=[" ".join(case[:2]) for case in CASES]
)
def test_probabilities_equal_plain_transformers_whatever_the_batch(
    architecture: str, pooling_mode: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder, head = make_backbone(tmp_path / "a model", architecture, **options), linear()
    path, texts = save_head(tmp_path / "head.safetensors", head), make_texts(30, longest=40)
    expected = softmax(pooled_reference(folder, head, pooling_mode, texts))
    assert expected.max(axis=1).std() > 0.02, "the checkpoint must tell rows apart"
    chooser = random.Random(architecture)
    batchings: list[dict[str, Any]] = [
        {},
        {"max_num_batched_tokens": chooser.randint(20, 200)},
        {"batch_size": chooser.randint(2, 9)},
    ]
    for batching in batchings:
        made = member(tmp_path, folder, path, {"text": texts}, pooling_mode=pooling_mode, **batching)
        predictions = predict(made, len(texts))
        np.testing.assert_allclose(predictions.values, expected, atol=2e-5, err_msg=str(batching))
        assert not predictions.bad_rows


def test_each_view_has_its_own_head(tmp_path: Path) -> None:
    from torch import nn

    folder, texts = make_backbone(tmp_path / "model", "bert"), make_texts(10, longest=20)
    heads: list[nn.Module] = [linear(seed=1), nn.Sequential(nn.LayerNorm(64), linear(seed=2))]
    paths = [save_head(tmp_path / f"{number}.safetensors", head) for number, head in enumerate(heads)]
    views = [{"name": "own"}, {"name": "other", "head": paths[1]}, {"name": "again", "head": paths[0]}]
    made = member(tmp_path, folder, paths[0], {"text": texts}, views=views)
    for view, head in ((1, heads[1]), (0, heads[0]), (2, heads[0])):
        made.use_job(view)
        predictions = made.predict(np.arange(10), lambda *_: None)
        expected = softmax(pooled_reference(folder, head, "mean", texts))
        np.testing.assert_allclose(predictions.values, expected, atol=2e-5)
    kind = PooledClassification(
        PooledSettings.model_validate(
            {
                **{"name": "m", "model_name_or_path": str(folder), "text_column": "text"},
                **{"head": paths[0], "pooling_mode": "mean", "views": views},
            }
        )
    )
    assert kind.sources() == (str(folder), str(paths[0]), str(paths[1]))
    save_head(paths[1], linear(outputs=5))
    with pytest.raises(CheckpointError, match=r"1\.safetensors has 5 outputs, and the config has 3 labels"):
        kind.inspect(OutputColumns("id", LABELS))


def test_the_epsilon_of_a_norm_counts_only_where_there_is_one(tmp_path: Path) -> None:
    from torch import nn

    folder = make_backbone(tmp_path / "model", "bert")
    plain = save_head(tmp_path / "plain.safetensors", linear())
    normed = save_head(tmp_path / "normed.safetensors", nn.Sequential(nn.LayerNorm(64), linear()))

    def settings(head: Path, eps: float) -> str:
        given: dict[str, Any] = {"name": "m", "model_name_or_path": str(folder), "text_column": "text"}
        kind = PooledClassification(
            PooledSettings(**given | {"pooling_mode": "cls", "head": head, "head_layer_norm_eps": eps})
        )
        return str(kind.fingerprint(kind.inspect(OutputColumns("id", LABELS)), Assigned(gpus=0)))

    assert settings(plain, 1e-5) == settings(plain, 1e-12)
    assert settings(normed, 1e-5) != settings(normed, 1e-12)


def test_the_first_token_of_a_decoder_sees_nothing_and_that_is_told(tmp_path: Path) -> None:
    head = save_head(tmp_path / "head.safetensors", linear())
    message = {}
    for architecture in ("llama", "bert"):
        folder = make_backbone(tmp_path / architecture, architecture)
        made = member(tmp_path, folder, head, {"text": ["one", "two"]}, pooling_mode="cls")
        message[architecture] = " ".join(made.load().notes)
    assert "rows that begin with the same token get the same numbers" in message["llama"]
    assert "the same numbers" not in message["bert"]


def test_an_mlp_with_norms_is_run_in_the_order_that_the_config_says(tmp_path: Path) -> None:
    import torch
    from torch import nn

    torch.manual_seed(1)
    head = nn.Sequential(
        nn.LayerNorm(64),
        nn.Linear(64, 16),
        nn.GELU(),
        nn.LayerNorm(16, eps=1e-3),
        nn.Dropout(),
        nn.Linear(16, 3),
    ).eval()
    for layer in (head[0], head[3]):
        assert isinstance(layer, nn.LayerNorm)
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    folder, texts = make_backbone(tmp_path / "model", "deberta-v2"), make_texts(20)
    path = save_head(tmp_path / "head.safetensors", head, prefix="")
    assert isinstance(head[0], nn.LayerNorm)
    head[0].eps = 1e-3
    expected = pooled_reference(folder, head, "mean", texts)
    keys: dict[str, Any] = {
        "head_layers": [0, 1, "gelu", 3, 5],
        "head_layer_norm_eps": 1e-3,
        "problem_type": "regression",
        "max_num_batched_tokens": 60,
    }
    result = predict(member(tmp_path, folder, path, {"text": texts}, **keys), len(texts)).values
    np.testing.assert_allclose(result, expected, atol=2e-5, rtol=1e-5)
    # Outputs in another order than the labels.
    made = member(tmp_path, folder, path, {"text": texts}, head_labels=["tie", "yes", "no"], **keys)
    np.testing.assert_allclose(predict(made, len(texts)).values[:, [2, 0, 1]], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("architecture", "pooling_mode"), [("bert", "mean"), ("llama", "lasttoken")])
def test_pairs_of_texts_and_labels_that_do_not_exclude_each_other(
    architecture: str, pooling_mode: str, tmp_path: Path
) -> None:
    folder, head = make_backbone(tmp_path / "model", architecture), linear()
    path = save_head(tmp_path / "head.safetensors", head, prefix="")
    first, second = make_texts(25, seed=1), make_texts(25, seed=2)
    pairs = list(zip(first, second, strict=True))
    logits = pooled_reference(folder, head, pooling_mode, pairs, max_length=50)
    keys: dict[str, Any] = {"pooling_mode": pooling_mode, "problem_type": "multi_label_classification"}
    made = member(
        tmp_path, folder, path, {"first": first, "second": second}, **keys, max_length=50, batch_size=6
    )
    predictions = predict(made, len(pairs))
    np.testing.assert_allclose(predictions.values, 1 / (1 + np.exp(-logits)), atol=2e-5)
    assert np.abs(predictions.values.sum(1) - 1).max() > 0.1


def test_a_quantized_backbone_keeps_its_head_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    import torch
    from transformers import BitsAndBytesConfig

    from tests.checkpoints import four_bits_tolerance

    folder, head = make_backbone(tmp_path / "model", "llama"), linear()
    path, texts = save_head(tmp_path / "head.safetensors", head), make_texts(20)
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    quantized = BitsAndBytesConfig(**settings, bnb_4bit_compute_dtype=torch.float32)
    expected = softmax(
        pooled_reference(folder, head, "mean", texts, quantization_config=quantized, device_map={"": "cpu"})
    )
    made = member(tmp_path, folder, path, {"text": texts}, quantization_config=settings)
    np.testing.assert_allclose(predict(made, len(texts)).values, expected, atol=four_bits_tolerance())
    assert {parameter.dtype for parameter in made._classifier.head.parameters()} == {torch.float32}  # type: ignore[attr-defined]


def test_rows_that_overflow_half_precision_run_again_in_float32(tmp_path: Path) -> None:
    folder, head = make_overflowing(tmp_path / "model", "llama"), linear()
    path, texts = save_head(tmp_path / "head.safetensors", head), make_texts(60)
    expected = softmax(pooled_reference(folder, head, "mean", texts))
    made = member(tmp_path, folder, path, {"text": texts}, dtype="float16")
    predictions = predict(made, len(texts))
    assert not predictions.bad_rows
    assert predictions.counters.recomputed_rows + predictions.counters.float32_rows > 0
    np.testing.assert_allclose(predictions.values, expected, atol=1e-2)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's
def test_an_adapter_of_the_backbone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder, head = make_backbone(tmp_path / "model", "llama"), linear()
    path, texts = save_head(tmp_path / "head.safetensors", head), make_texts(12)
    torch.manual_seed(3)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(AutoModel.from_pretrained(folder), settings).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = []
    for text in texts:
        with torch.no_grad():
            states = adapted(**tokenizer([text], return_tensors="pt")).last_hidden_state[0]
            expected.append(head(states[-1:]).softmax(-1)[0].double().numpy())
    keys = {"pooling_mode": "lasttoken", "adapter_name_or_path": str(tmp_path / "adapter")}
    result = predict(member(tmp_path, folder, path, {"text": texts}, **keys), len(texts)).values
    np.testing.assert_allclose(result, np.stack(expected), atol=2e-5)
    assert np.abs(result - softmax(pooled_reference(folder, head, "lasttoken", texts))).max() > 1e-3


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_the_head_is_where_the_pass_of_a_spread_backbone_ends(architecture: str, tmp_path: Path) -> None:
    import torch
    from accelerate import dispatch_model
    from torch import nn

    from ensemble.members.huggingface.loading.load import load
    from ensemble.members.huggingface.scoring.encode import Encoded
    from ensemble.members.pooled_cls.predictor import PooledClassifier
    from tests.members.huggingface.devices import Machine
    from tests.members.huggingface.loading.test_spread import device_map

    folder, head = make_backbone(tmp_path / "model", architecture, layers=4), linear()
    loaded, lengths = load(worker_spec(folder, auto_class="AutoModel")), np.array([9, 4, 7])
    encoded = Encoded({"input_ids": [np.arange(3, 3 + length) for length in lengths]}, lengths, 0)
    for mode in ("mean", "lasttoken"):
        expected = PooledClassifier(loaded.model, 0, nn.Sequential(head), mode).logits(encoded, np.arange(3))
        alone = [
            PooledClassifier(loaded.model, 0, nn.Sequential(head), mode).logits(encoded, np.array([row]))
            for row in range(3)
        ]
        torch.testing.assert_close(torch.cat(alone), expected, atol=2e-5, rtol=1e-5)
    with Machine() as machine, torch.inference_mode():
        model = dispatch_model(
            loaded.model,
            device_map(loaded.model, 2),
            skip_keys=list(loaded.model._skip_keys_device_placement or ()),
            force_hooks=True,
        )
        for name, parameter in list(head.named_parameters()):
            setattr(head, name, nn.Parameter(parameter.detach().to("ipu:1"), requires_grad=False))
        classifier = PooledClassifier(model, 0, nn.Sequential(head), "lasttoken")
        machine.copies.clear()
        actual_logits = classifier.logits(encoded, np.arange(3))
        assert actual_logits.device == torch.device("ipu:1")
        assert all(source.device.index < device.index for source, device in machine.copies)
        np.testing.assert_array_equal(actual_logits.value.numpy(), expected.numpy())  # type: ignore[attr-defined]


def test_memory_is_that_of_the_backbone_and_the_head(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel

    folder, head = make_backbone(tmp_path / "model", "gemma2"), linear()
    path = save_head(tmp_path / "head.safetensors", head)
    whole = make_checkpoint(tmp_path / "whole", "gemma2", LABELS)
    lengths = np.array([100, 300])
    results = []
    for place in (folder, whole):  # another head in the weights takes nothing
        settings = PooledSettings(
            name="m", model_name_or_path=str(place), text_column="text", head=path, pooling_mode="mean"
        )
        parent = PooledClassification(settings)
        memory = parent.memory(parent.inspect(OutputColumns("id", LABELS)), lengths, 3)
        assert memory is not None
        results.append(memory.footprint(1, (8, 0)))
    assert results[0] is not None
    assert results[0].weights == results[1].weights  # type: ignore[union-attr]
    held = AutoModel.from_pretrained(folder, dtype=torch.float32)
    parameters = sum(parameter.numel() for parameter in held.parameters())
    of_head = sum(parameter.numel() for parameter in head.parameters())
    assert results[0].weights.parameters == parameters + of_head
    assert results[0].weights.bytes == 4 * (parameters + of_head)
