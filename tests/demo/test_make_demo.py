"""What the demo's files promise, and the reading of WordNet behind them; torch stays out."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
DEMO = ROOT / "demo"
MEMBERS = {
    "gemma2": "Gemma2ForSequenceClassification",
    "llama": "LlamaForSequenceClassification",
    "smollm3": "SmolLM3ForCausalLM",
    "vit": "ViTForImageClassification",
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while they are made
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def demo_data() -> Iterator[ModuleType]:
    yield load("demo_data")
    del sys.modules["demo_data"]


@pytest.fixture(scope="module")
def demo_pictures(demo_data: ModuleType) -> Iterator[ModuleType]:
    yield load("demo_pictures")
    del sys.modules["demo_pictures"]


def rows(name: str) -> list[dict[str, str]]:
    with (DEMO / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def model_json(member: str, name: str = "config.json") -> dict[str, Any]:
    path = DEMO / "models" / member / name
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def labels_in_order(member: str) -> list[str]:
    id2label = model_json(member)["id2label"]
    return [id2label[str(index)] for index in range(len(id2label))]


@pytest.mark.usefixtures("demo_pictures")
def test_a_missing_source_names_the_package(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    heavy = {"torch", "transformers", "tokenizers"} - sys.modules.keys()
    make_demo = load("make_demo")
    monkeypatch.delitem(sys.modules, "make_demo")
    missing = tmp_path / "data.noun"
    assert make_demo.main(["--data-noun", str(missing), "--output", str(tmp_path / "demo")]) == 1
    message = capsys.readouterr().err
    assert str(missing) in message
    assert "apt-get install wordnet-base" in message
    assert not (tmp_path / "demo").exists()
    assert not heavy & sys.modules.keys(), "importing the script must stay cheap"


def test_test_table(demo_data: ModuleType) -> None:
    table = rows("test.csv")
    assert list(table[0]) == ["id", "gloss", "label"]
    assert len(table) == 2000
    assert len({row["id"] for row in table}) == len(table)
    assert all(row["id"][0] == "n" and len(row["id"]) == 9 for row in table)
    assert len({row["gloss"].casefold() for row in table}) == len(table)
    assert {row["label"] for row in table} == set(demo_data.TOPICS.values())
    # Shuffled, so that a run with `limit: 100` meets every topic.
    assert {row["label"] for row in table[:100]} == set(demo_data.TOPICS.values())


def test_training_rows_of_the_repository_are_none_of_the_test(demo_data: ModuleType) -> None:
    table, test = rows("train.csv"), rows("test.csv")
    assert list(table[0]) == ["id", "gloss", "label"]
    assert len(table) == demo_data.TRAIN_TABLE_ROWS
    assert {row["label"] for row in table} == set(demo_data.TOPICS.values())
    assert {row["gloss"].casefold() for row in table}.isdisjoint(row["gloss"].casefold() for row in test)


def test_small_tables_have_topics_and_glosses_of_their_own(demo_data: ModuleType) -> None:
    """No model of the demo saw them; scripts/demo_small_tables.py leaves out what occurs under two topics."""
    train, test, sample = (rows(f"small/{name}.csv") for name in ("train", "test", "sample_submission"))
    labels = sorted({row["label"] for row in train})
    assert set(labels).isdisjoint(demo_data.TOPICS.values())
    assert list(sample[0]) == ["id", *labels]
    texts = [row["gloss"].casefold() for row in (*train, *test)]
    assert len(set(texts)) == len(texts) == 1600
    seen = {row["gloss"].casefold() for name in ("train.csv", "test.csv") for row in rows(name)}
    assert seen.isdisjoint(texts)
    assert {row["id"] for row in sample} == {row["id"] for row in test}
    assert [row["id"] for row in sample] != [row["id"] for row in test]


def test_sample_submission_has_the_same_ids_in_another_order(demo_data: ModuleType) -> None:
    table, sample = rows("test.csv"), rows("sample_submission.csv")
    topics = sorted(demo_data.TOPICS.values())
    assert list(sample[0]) == ["id", *topics]
    assert len(sample) == len(table)
    assert {row["id"] for row in sample} == {row["id"] for row in table}
    assert [row["id"] for row in sample] != [row["id"] for row in table]
    assert len({row[topic] for row in sample for topic in topics}) == 1


def test_licence_notice_is_complete() -> None:
    notice = (DEMO / "LICENSE.WordNet").read_text(encoding="utf-8")
    assert notice.startswith("This software and database is being provided to you, the LICENSEE")
    assert "WordNet 3.0 Copyright 2006 by Princeton University.  All rights reserved." in notice
    assert "MERCHANT-\nABILITY OR FITNESS FOR ANY PARTICULAR PURPOSE" in notice
    assert notice.rstrip().endswith("LICENSEE agrees to preserve same.")


def test_models_are_small_and_safetensors_only() -> None:
    files = [path for path in (DEMO / "models").rglob("*") if path.is_file()]
    blocks = sum(-(-path.stat().st_size // 4096) * 4096 for path in files)
    assert blocks <= 10 * 1024 * 1024
    assert {path.parent.name for path in files} == set(MEMBERS)
    assert not [path for path in files if path.suffix not in {".json", ".safetensors"}]


@pytest.mark.parametrize("member", MEMBERS)
def test_member_is_the_real_architecture(demo_data: ModuleType, member: str) -> None:
    config = model_json(member)
    assert config["architectures"] == [MEMBERS[member]]
    assert config["model_type"] == member
    if member == "smollm3":
        return
    labels = labels_in_order(member)
    assert sorted(labels) == sorted(demo_data.TOPICS.values())
    assert config["label2id"] == {label: index for index, label in enumerate(labels)}


def test_members_order_their_labels_differently() -> None:
    assert labels_in_order("gemma2") != labels_in_order("llama")


def test_gemma_keeps_what_makes_it_gemma_and_llama_has_no_pad_token() -> None:
    gemma, llama = model_json("gemma2"), model_json("llama")
    assert gemma["attn_logit_softcapping"] == 50.0
    assert gemma["layer_types"] == ["sliding_attention", "full_attention"]
    assert gemma["pad_token_id"] == 0
    assert llama.get("pad_token_id") is None
    assert gemma["vocab_size"] != llama["vocab_size"]


@pytest.mark.parametrize("member", ["gemma2", "llama", "smollm3"])
def test_tokenizer_matches_its_model(member: str) -> None:
    tokenizer = model_json(member, "tokenizer.json")
    settings = model_json(member, "tokenizer_config.json")
    assert len(tokenizer["model"]["vocab"]) == model_json(member)["vocab_size"]
    assert tokenizer["truncation"] is None
    assert tokenizer["padding"] is None
    assert bool(settings.get("pad_token")) == (member != "llama")


def test_each_topic_is_a_token_of_the_language_model(demo_data: ModuleType) -> None:
    vocabulary = model_json("smollm3", "tokenizer.json")["model"]["vocab"]
    assert {f"\u0120{topic}" for topic in demo_data.TOPICS.values()} <= vocabulary.keys()


def test_pictures_are_those_of_the_first_glosses(demo_data: ModuleType, demo_pictures: ModuleType) -> None:
    table = rows("test.csv")[: demo_data.PICTURE_ROWS]
    assert {path.name for path in (DEMO / "pictures").iterdir()} == {f"{row['id']}.png" for row in table}
    for row in table:
        with Image.open(DEMO / "pictures" / f"{row['id']}.png") as picture:
            np.testing.assert_array_equal(np.asarray(picture), demo_pictures.draw(row["gloss"]))
