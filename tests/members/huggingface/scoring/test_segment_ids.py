"""Segment ids of text pairs, which some tokenizers of transformers 5 leave out, against plain transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from ensemble.common.protocol import ChunkDone, Predict, Ready
from ensemble.members.huggingface.spec import ModelSettings
from ensemble.members.pooled_cls.training import Backbone
from tests.checkpoints import WORDS, make_texts
from tests.members.huggingface.scoring.test_compute import read_shard
from tests.members.huggingface.scoring.test_predict import LABELS, worker_spec
from tests.sampling import one_in
from tests.worker.test_session import publish, served

pytestmark = pytest.mark.usefixtures("one_thread")
SPECIAL = "<pad> <unk> [CLS] [SEP] [MASK] <sep> <cls> <s> </s> <mask> [PAD] [UNK] [QUESTION] .".split()
PIECES = [(name, 0.0) for name in SPECIAL] + [(f"▁{word}", -1.0) for word in dict.fromkeys(WORDS)]
PIECES += [("▁", -3.0)]
UNKNOWN_THIRD = [PIECES[0], PIECES[2], PIECES[1], *PIECES[3:]]  # where RemBertTokenizer looks for it
WHOLE_WORDS = {name.lstrip("▁"): number for number, (name, _) in enumerate(PIECES)}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
BYTE_PAIRS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}
BYTE_PAIRS |= {part: number for number, part in enumerate([*LETTERS, *(f"{a}</w>" for a in LETTERS)], 5)}
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
FUNNEL = {"block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}
# The tokenizer's class and arguments, and the kind of model with its numbers.
MODELS: Mapping[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "albert": ("AlbertTokenizer", {"vocab": PIECES}, "albert", {**ENCODER, "embedding_size": 16}),
    "rembert": (
        "RemBertTokenizer",
        {"vocab": UNKNOWN_THIRD},
        "rembert",
        {**ENCODER, "input_embedding_size": 16},
    ),
    "herbert": ("HerbertTokenizer", {"vocab": BYTE_PAIRS, "merges": []}, "bert", ENCODER),
    "xlnet": (
        "XLNetTokenizer",
        {"vocab": PIECES, "unk_id": 1},
        "xlnet",
        {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    ),
    "funnel": (
        "FunnelTokenizer",
        {"vocab": WHOLE_WORDS},
        "funnel",
        FUNNEL,
    ),
    "splinter": ("SplinterTokenizer", {"vocab": WHOLE_WORDS}, "splinter", ENCODER),
    "big_bird": (
        "BigBirdTokenizer",
        {"vocab": PIECES},
        "big_bird",
        {**ENCODER, "attention_type": "original_full"},
    ),
}
TEXTS = list(zip(make_texts(9, longest=12), make_texts(9, seed=1, longest=30), strict=True))


def make_model(
    folder: Path, kind: str, written: str | None, auto_class: str = "AutoModelForSequenceClassification"
) -> Path:
    """A tiny classifier with its own tokenizer, whose config.json is of this release of transformers."""
    tokenizer_class, arguments, model_type, numbers = MODELS[kind]
    make_tokenizer = getattr(transformers, tokenizer_class)
    make_tokenizer(**arguments).save_pretrained(folder)
    tokenizer = make_tokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)  # RemBertTokenizer has its special tokens only once it is loaded
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(LABELS)),
        label2id={label: number for number, label in enumerate(LABELS)},
        initializer_range=0.3,
        **numbers,
    )
    model = getattr(transformers, auto_class).from_config(config)
    for name, parameter in model.named_parameters():
        if "seg_embed" in name or "r_s_bias" in name:  # which are very small otherwise
            torch.nn.init.normal_(parameter, std=1.0)
    model.save_pretrained(folder)
    set_release(folder, written)
    return folder


def set_release(folder: Path, written: str | None) -> None:
    stored = json.loads((folder / "config.json").read_text())
    stored.pop("transformers_version")
    stored |= {} if written is None else {"transformers_version": written}
    (folder / "config.json").write_text(json.dumps(stored))


def plain(
    folder: Path, texts: list[tuple[str, ...]], max_length: int, with_ids: bool
) -> npt.NDArray[np.float64]:
    """Probabilities of plain transformers row by row, with segment ids that are passed by hand, or without."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager"
    )
    rows = []
    for text in texts:
        inputs = tokenizer(
            *([part] for part in text),
            truncation=True,
            max_length=max_length,
            return_token_type_ids=True,
            return_tensors="pt",
        )
        ids = {"token_type_ids": inputs["token_type_ids"]} if with_ids else {}
        with torch.no_grad():
            logits = model.eval()(inputs["input_ids"], attention_mask=inputs["attention_mask"], **ids).logits
        rows.append(logits[0].softmax(-1).double().numpy())
    return np.stack(rows)


def ours(
    folder: Path, checkpoint: Path, texts: list[tuple[str, ...]], **settings: Any
) -> tuple[npt.NDArray[np.float64], str]:
    """The probabilities that a worker computes, [rows, labels], and its notes about segment ids."""
    columns = ("a", "b")[: len(texts[0])]
    places = publish(folder, {name: [text[place] for text in texts] for place, name in enumerate(columns)})
    spec = worker_spec(checkpoint, **places, text_columns=columns, **settings)
    code, events = served(spec, Predict(0, 0, len(texts)))
    assert code == 0, events
    done = next(event for event in events if isinstance(event, ChunkDone))
    notes = [note for event in events if isinstance(event, Ready) for note in event.notes]
    rows = read_shard(folder / "shards", done.shard)
    return rows[np.argsort(rows[:, 0]), 1:], " ".join(note for note in notes if "segment ids" in note)


@pytest.mark.parametrize(
    ("kind", "written"),
    one_in(2, product(["albert", "rembert", "herbert", "xlnet", "funnel"], ["4.57.3", "5.1.0", None])),
)
def test_pairs_get_the_segment_ids_that_their_model_was_trained_with(
    kind: str, written: str | None, tmp_path: Path
) -> None:
    checkpoint = make_model(tmp_path / "model", kind, written)
    got, note = ours(tmp_path, checkpoint, list(TEXTS), max_length=24)
    with_ids, without = (plain(checkpoint, list(TEXTS), 24, given) for given in (True, False))
    is_asked = written != "5.1.0"
    np.testing.assert_allclose(got, with_ids if is_asked else without, atol=2e-5)
    assert np.abs(with_ids - without).max() > 1e-3
    assert note.count("token_type_ids") == 1
    assert ("asked for" in note, f"transformers {written or 'before 4.2'}" in note) == (is_asked, True)


@pytest.mark.parametrize("kind", ["xlnet", "albert"])
def test_single_texts_get_the_mark_of_the_heads_token_that_transformers_4_gave(
    kind: str, tmp_path: Path
) -> None:
    checkpoint = make_model(tmp_path / "model", kind, "4.40.0")
    texts: list[tuple[str, ...]] = [(text,) for _, text in TEXTS]
    got, note = ours(tmp_path, checkpoint, texts, max_length=24)
    with_ids, without = (plain(checkpoint, texts, 24, given) for given in (True, False))
    np.testing.assert_allclose(got, with_ids, atol=2e-5)
    matters = kind != "albert"
    assert (np.abs(with_ids - without).max() > 0.01, bool(note)) == (matters, matters)


@pytest.mark.parametrize(
    ("kind", "written", "names"),
    [
        ("big_bird", "4.57.3", None),  # transformers 4 gave it none, either
        ("albert", "4.57.3", ["input_ids", "attention_mask"]),
        ("albert", "5.1.0", ["input_ids", "token_type_ids", "attention_mask"]),
    ],
)
def test_names_of_inputs_decide_before_the_release(
    kind: str, written: str, names: list[str] | None, tmp_path: Path
) -> None:
    checkpoint = make_model(tmp_path / "model", kind, written)
    kwargs = {} if names is None else {"model_input_names": names}
    got, note = ours(tmp_path, checkpoint, list(TEXTS), max_length=24, tokenizer_kwargs=kwargs)
    expected = plain(checkpoint, list(TEXTS), 24, "token_type_ids" in (names or ()))
    np.testing.assert_allclose(got, expected, atol=2e-5)
    assert not note


@pytest.mark.parametrize("kind", ["splinter", "albert"])
def test_pooled_states_of_pairs_are_computed_with_segment_ids(kind: str, tmp_path: Path) -> None:
    checkpoint = make_model(tmp_path / "model", kind, "4.57.3", "AutoModel")
    places = publish(tmp_path, {"a": [a for a, _ in TEXTS], "b": [b for _, b in TEXTS]})
    spec = worker_spec(checkpoint, **places, text_columns=("a", "b"), max_length=24)
    settings = {field.name: getattr(spec, field.name) for field in fields(ModelSettings)}
    member = Backbone(Path(places["table_path"]), settings, "mean").load()
    _, features, _ = member.features(np.arange(len(TEXTS)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModel.from_pretrained(checkpoint, attn_implementation="eager").eval()
    for row, text in enumerate(TEXTS):
        texts = ([part] for part in text)
        inputs = tokenizer(
            *texts, truncation=True, max_length=24, return_token_type_ids=True, return_tensors="pt"
        )
        with torch.no_grad():
            states = model(**inputs).last_hidden_state[0]
        np.testing.assert_allclose(features[row], states.mean(0), atol=2e-5)
