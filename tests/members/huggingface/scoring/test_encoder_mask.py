"""Encoders get masks that are made on the host: the same numbers, and no pass asks the device for an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.checkpoints import make_checkpoint, make_texts, make_tokenizer, reference
from tests.members.huggingface.devices import Machine
from tests.members.huggingface.scoring.test_predict import LABELS, predictor, worker_spec
from tests.members.huggingface.scoring.test_warmup import softmax
from tests.releases.families import make_family
from tests.worker.test_session import publish

pytestmark = pytest.mark.usefixtures("one_thread")
READY = "READY_MASK"
TEXTS = make_texts(14, longest=40)
# Those whose masks are made by masking_utils in all releases that are supported.
FAMILIES = ["albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"]
# Each has its reason: relative attention, no attention, local attention, causal, encoder and decoder.
OTHERS = ["deberta-v2", "fnet", "modernbert", "gpt2", "gemma3_text", "bart"]


def names_of(shortcuts: Any) -> set[str]:
    return {shortcut.name for shortcut in shortcuts}


def loaded_member(folder: Path, **changes: Any) -> tuple[Any, Any]:
    """A member after its warm-up, and what the worker says of it."""
    places = publish(folder, {"text": TEXTS})
    member = predictor(worker_spec(folder, **places, **changes))
    return member, member.load()


def encoded_of(*lengths: int) -> Any:
    from ensemble.members.huggingface.scoring.encode import Encoded

    return Encoded({"input_ids": [np.arange(3, 3 + length) for length in lengths]}, np.array(lengths), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_the_same_bits_and_those_of_plain_transformers(family: str, tmp_path: Path) -> None:
    folder = make_family(tmp_path, family, LABELS)
    member, _ = loaded_member(folder)
    classifier = member._classifier
    assert READY in names_of(classifier.taken)
    encoded = member._prompts[0].encode([{"text": text} for text in TEXTS])
    expected = reference(folder, TEXTS)
    assert expected.max(axis=1).std() > 0.02, "the checkpoint must tell rows apart"
    rows = np.arange(len(TEXTS))
    equal = np.flatnonzero(encoded.lengths == np.bincount(encoded.lengths).argmax())
    assert len(equal) > 1
    for batch in (rows, equal, rows[:1]):
        ready = classifier.logits(encoded, batch)
        plain = classifier.logits(encoded, batch, with_mask=True)
        np.testing.assert_array_equal(ready.numpy(), plain.numpy())
        np.testing.assert_allclose(softmax(ready), expected[batch], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.filterwarnings("ignore")  # of kernels that are missing
def test_other_masks_are_left_to_transformers(family: str, tmp_path: Path) -> None:
    member, _ = loaded_member(make_family(tmp_path, family, LABELS))
    assert READY not in names_of(member._classifier.possible)


def test_eager_attention_gets_no_boolean_mask(tmp_path: Path) -> None:
    """It would add it to the scores."""
    folder = make_checkpoint(tmp_path, "bert", LABELS)
    member, _ = loaded_member(folder, attn_implementation="eager")
    assert READY not in names_of(member._classifier.possible)
    actual = member.predict(np.arange(len(TEXTS)), lambda *_: None).values
    np.testing.assert_allclose(actual, reference(folder, TEXTS), rtol=0, atol=1e-5)


def test_a_model_that_reads_its_mask_itself_keeps_the_old_way_and_says_so(tmp_path: Path) -> None:
    """ESM multiplies its embeddings with the mask of tokens, which has two dimensions."""
    tokenizer = make_tokenizer(tmp_path, kind="encoder")
    config = transformers.EsmConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        mask_token_id=tokenizer.unk_token_id or 3,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        position_embedding_type="rotary",
        token_dropout=True,
        num_labels=len(LABELS),
    )
    torch.manual_seed(0)
    transformers.EsmForSequenceClassification(config).save_pretrained(tmp_path)
    member, ready = loaded_member(tmp_path)
    assert names_of(member._classifier.possible) - names_of(member._classifier.taken) == {READY}
    assert not ready.notes, "it makes no difference on a CPU"


@pytest.mark.parametrize("pooling_mode", [None, "mean"])
def test_no_pass_asks_the_device_so_that_several_are_queued(pooling_mode: str | None, tmp_path: Path) -> None:
    from accelerate import dispatch_model

    from ensemble.members.huggingface.loading.load import load
    from ensemble.members.huggingface.scoring.classifier import Classifier
    from ensemble.members.huggingface.scoring.forward import Shortcut
    from ensemble.members.pooled_cls.predictor import PooledClassifier

    model = load(worker_spec(make_checkpoint(tmp_path, "bert", LABELS))).model
    encoded, batches = encoded_of(9, 4, 7, 5, 5), [np.array(rows) for rows in ([0, 1, 2], [3, 4], [0])]

    def make_classifier(model: Any) -> Classifier:
        if pooling_mode is None:
            return Classifier(model, 0)
        torch.manual_seed(1)
        linear = nn.Linear(64, 3).eval()
        device = next(model.parameters()).device
        linear.weight = nn.Parameter(torch.randn(3, 64).to(device))
        linear.bias = nn.Parameter(torch.randn(3).to(device))
        return PooledClassifier(model, 0, nn.Sequential(linear), pooling_mode)

    backbone = model if pooling_mode is None else model.bert
    expected = [make_classifier(backbone).logits(encoded, batch, with_mask=True) for batch in batches]
    with Machine() as machine, torch.inference_mode():
        model = dispatch_model(backbone, {"": "ipu:0"}, force_hooks=True)
        classifier = make_classifier(model)
        classifier.taken |= classifier.possible & {Shortcut.READY_MASK}
        for with_mask in (False, True):
            machine.busy_until.clear()
            machine.looks.clear()
            machine._host = 0
            steps, logits = [], []
            for batch in batches:
                logits.append(classifier.logits(encoded, batch, with_mask))
                steps.append(machine.busy_until[torch.device("ipu:0")])
            if with_mask:
                assert len(machine.looks) == len(batches), "transformers asks once in each pass"
                assert machine._host > steps[-2], "the last pass was given when those before were over"
            else:
                assert not machine.looks
                assert machine._host == 0, "all passes were given before the first one began"
            for actual, plain in zip(logits, expected, strict=True):
                np.testing.assert_array_equal(actual.value.numpy(), plain.numpy())  # type: ignore[attr-defined]
