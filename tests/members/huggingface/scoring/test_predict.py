"""Probabilities against plain transformers run one row at a time in float32."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ensemble.common.protocol import CommonSpec, Event, Start, WorkerSpec
from ensemble.data.published_table import PublishedTable
from ensemble.members.huggingface.spec import AdapterSource, ModelSettings, ModelSpec
from ensemble.members.seq_cls.parent import SequenceClassification
from ensemble.worker.channel import HeartbeatThread
from ensemble.worker.session import Session
from tests.checkpoints import make_checkpoint, make_texts, reference
from tests.sampling import one_in

if TYPE_CHECKING:
    from ensemble.members.seq_cls.predictor import SequenceClassifier

pytestmark = pytest.mark.usefixtures("one_thread")
LABELS = ["yes", "no", "tie"]


def worker_spec(folder: Path, **changes: Any) -> ModelSpec:
    result: dict[str, Any] = {
        "model_name_or_path": str(folder),
        "revision": None,
        "trust_remote_code": False,
        "allow_pickle": False,
        "merge_adapter": False,
        "label_order": (0, 1, 2),
        "activation": "softmax",
        "prompt_template": None,
        "text_columns": ("text",),
        "max_length": None,
        "truncation_side": None,
        "add_special_tokens": True,
        "batch_size": None,
        "token_budget": None,
        "dtype": "auto",
        "allow_tf32": False,
        "expandable_segments": True,
        "max_split_size_mb": None,
        "quantization_config": None,
        "attn_implementation": None,
        "model_kwargs": {},
        "tokenizer_kwargs": {},
        "gpus": 0,
        "device_map": None,
        "max_memory": None,
        "offload_folder": None,
        "bytes_per_token": None,
        "bytes_per_token_pair": 0.0,
        "fixed_bytes": 0,
        "width": None,
        "memory_limit_bytes": None,
        "seed": 0,
        "table_path": "",
        "order_path": "",
        "shards_dir": "",
    }
    result["labels"] = tuple(LABELS)
    adapter = changes.pop("adapter_name_or_path", None)
    result["job_adapters"] = (None if adapter is None else AdapterSource((adapter,)),)
    keys = ("dtype", "attn_implementation", "max_length")
    result["asked"] = tuple(key for key in keys if changes.get(key, result[key]) not in (None, "auto"))
    return ModelSpec(**{**result, **changes})


def start(spec: ModelSpec) -> Start:
    """What the parent sends of it."""
    common = CommonSpec(**{field.name: getattr(spec, field.name) for field in fields(CommonSpec)})
    settings = {field.name: getattr(spec, field.name) for field in fields(ModelSettings)}
    return Start(WorkerSpec(common, SequenceClassification.child, settings))


def predictor(spec: ModelSpec) -> SequenceClassifier:
    from ensemble.members.seq_cls import predictor

    whole = predictor.ClassifierSpec(**vars(spec))
    return predictor.SequenceClassifier(whole, PublishedTable(Path(spec.table_path)))


def make_session(spec: ModelSpec, send: Callable[[Event], None] = lambda event: None) -> Session:
    """What a worker's process holds once it has started, in this one."""
    return Session(start(spec), send, HeartbeatThread(send), time.monotonic())


def compute(spec: ModelSpec, rows: list[dict[str, str]]) -> np.ndarray:
    """What the worker's own pieces make of the rows, in the rows' order."""
    from ensemble.members.huggingface.loading.load import load
    from ensemble.members.huggingface.scoring.batching import make_batches
    from ensemble.members.huggingface.scoring.classifier import Classifier, probabilities
    from ensemble.members.huggingface.scoring.encode import Prompt

    loaded = load(spec)
    prompt = Prompt(spec, loaded.tokenizer, loaded.max_length)
    classifier = Classifier(loaded.model, loaded.pad_token_id)
    encoded = prompt.encode(rows)
    values = np.empty((len(rows), 3))
    for batch in make_batches(encoded.lengths, loaded.token_budget, spec.batch_size):
        values[batch] = probabilities(classifier.logits(encoded, batch), spec.activation)
    return values


CASES = [
    ("gemma2", {"pad": "<pad>", "side": "left"}),
    ("gemma2", {"pad": "<pad>", "side": "right"}),
    ("llama", {"pad": None, "side": "right"}),
    ("llama", {"pad": "<eos>", "side": "right"}),
    ("llama", {"pad": "<eos>", "side": "left"}),
    ("gpt2", {"pad": None, "side": "right"}),
    ("gpt2", {"pad": "<eos>", "side": "left"}),
    ("gemma3", {"pad": "<eos>", "side": "left"}),
    ("bert", {"pad": "<pad>", "side": "right"}),
    ("bert", {"pad": "<pad>", "side": "left"}),
    ("roberta", {"pad": "<pad>", "side": "left"}),
    ("deberta-v2", {"pad": "<pad>", "side": "right"}),
]


@pytest.mark.parametrize(("architecture", "options"), one_in(2, CASES), ids=str)
def test_probabilities_equal_plain_transformers_row_by_row(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "a model", architecture, LABELS, **options)
    texts = make_texts(45, longest=40)
    expected = reference(folder, texts)
    assert expected.max(axis=1).std() > 0.02, "the checkpoint must tell rows apart"
    rows = [{"text": text} for text in texts]
    for batching in ({}, {"token_budget": 50}, {"batch_size": 7}):
        got = compute(worker_spec(folder, **batching), rows)
        np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=str(batching))


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_text_pairs(architecture: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, architecture, LABELS)
    pairs = list(zip(make_texts(40, seed=1), make_texts(40, seed=2), strict=True))
    rows = [{"first": first, "second": second} for first, second in pairs]
    got = compute(worker_spec(folder, text_columns=("first", "second"), max_length=128), rows)
    np.testing.assert_allclose(got, reference(folder, pairs, max_length=128), atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_is_the_tokenizers_own(side: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", LABELS)
    texts = make_texts(30, longest=80)
    rows = [{"text": text} for text in texts]
    got = compute(worker_spec(folder, max_length=16, truncation_side=side), rows)
    np.testing.assert_allclose(got, reference(folder, texts, max_length=16, truncation_side=side), atol=1e-5)


def with_ends(texts: list[str]) -> list[str]:
    """Texts of which some end with the token that is also the pad token, and one that is nothing else."""
    ends = ("", "<eos>", "<eos><eos>", "<eos> a")
    return [text + ends[number % len(ends)] for number, text in enumerate(texts)] + ["<eos>"]


@pytest.mark.parametrize(
    ("architecture", "pad"), [("llama", "<eos>"), ("llama", None), ("gpt2", "<eos>"), ("gemma3", "<eos>")]
)
def test_a_head_reads_the_token_that_its_own_forward_pass_reads(
    architecture: str, pad: str | None, tmp_path: Path
) -> None:
    """That is the last token whose id is not the config's pad id, or the last one where the config has none."""
    folder = make_checkpoint(tmp_path, architecture, LABELS, pad=pad)
    texts = with_ends(make_texts(40))
    expected = reference(folder, texts)
    rows = [{"text": text} for text in texts]
    for pad_token in ("<eos>", "<bos>"):  # the tokenizer's own decides nothing
        got = compute(worker_spec(folder, tokenizer_kwargs={"pad_token": pad_token}), rows)
        np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=pad_token)


@pytest.mark.parametrize("problem_type", ["multi_label_classification", "regression"])
def test_other_activations(problem_type: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "bert", LABELS, problem_type=problem_type)
    activation = "sigmoid" if problem_type.startswith("multi") else "none"
    texts = make_texts(20)
    got = compute(worker_spec(folder, activation=activation), [{"text": text} for text in texts])
    np.testing.assert_allclose(got, reference(folder, texts, activation=activation), atol=1e-5, rtol=1e-5)


def test_a_head_that_would_be_random_is_refused(tmp_path: Path) -> None:
    import transformers

    from ensemble.members.huggingface.loading.load import load

    make_checkpoint(tmp_path, "llama", LABELS)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no weights for score\.weight.*would be random"):
        load(worker_spec(tmp_path))


def test_half_precision_checkpoints_run_as_float32_on_a_cpu(tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path, "gemma2", LABELS, dtype="float16")
    assert load(worker_spec(folder)).dtype == "float32"
    assert load(worker_spec(folder, dtype="bfloat16")).dtype == "bfloat16"


@pytest.mark.parametrize(("architecture", "limit"), [("bert", 128), ("roberta", 126), ("gpt2", 128)])
def test_max_length_stays_within_learnt_positions(architecture: str, limit: int, tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path, architecture, LABELS, pad="<pad>")
    loaded = load(worker_spec(folder, max_length=500))
    (note,) = (note for note in loaded.notes if note.startswith("max_length: "))
    assert f"{loaded.max_length} positions" in note
    for changes in ({}, {"max_length": loaded.max_length}):  # nobody asked for more
        notes = load(worker_spec(folder, **changes)).notes
        assert not any("positions" in note for note in notes)
    # RoBERTa counts positions from its pad id + 1; the pad id here is 0.
    assert loaded.max_length == (limit if architecture != "roberta" else 127)
    rows = [{"text": "a person who works " * 100}]
    assert np.isfinite(compute(worker_spec(folder, max_length=500), rows)).all()


def test_quantized_weights_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = make_checkpoint(tmp_path, "llama", LABELS)
    texts = make_texts(20)
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    got = compute(worker_spec(folder, quantization_config=settings), [{"text": text} for text in texts])
    np.testing.assert_allclose(got.sum(axis=1), 1, atol=1e-5)
    difference = np.abs(got - reference(folder, texts)).max()
    assert 1e-4 < difference < 0.6, "four bits change the numbers, but not beyond recognition"


def test_peaks_are_of_what_torch_reserved_and_of_what_tensors_took(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ensemble.members.seq_cls.predictor import SequenceClassifier

    member = object.__new__(SequenceClassifier)
    assert (member.peak_gpu_memory_bytes(), member.peak_gpu_allocated_bytes()) == (None, None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", [30, 50].__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", [20, 40].__getitem__)
    assert (member.peak_gpu_memory_bytes(), member.peak_gpu_allocated_bytes()) == (50, 40)
