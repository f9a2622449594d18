"""Every file in configs/ is validated and run."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import cohen_kappa_score
from sklearn.naive_bayes import MultinomialNB
from transformers import AutoTokenizer, BitsAndBytesConfig

from bench.shapes import GEMMA_2_9B, LLAMA_3_8B, make_full_size
from ensemble.members.registry import KINDS
from tests.checkpoints import (
    adapter_reference,
    four_bits_tolerance,
    image_reference,
    label_reference,
    make_language_model,
    reference,
)
from tests.kaggle import LABELS, lay_out
from tests.members.endpoint.serving import STUB
from tests.members.pooled_cls.test_pooled_cls import pooled_reference, softmax
from tests.nvml.sim import GIB, Gpu, Memory, NvmlSim, gpu_uuid
from tests.project import ROOT, Project
from tests.test_winners import CASES, OVERLAYS

pytestmark = pytest.mark.usefixtures("warm")


def test_no_config_goes_untested() -> None:
    assert {path.name for path in (ROOT / "configs").glob("*.yaml")} == {
        *("demo.yaml", "kaggle.yaml"),
        *("kaggle_l4.yaml", "kaggle_rtx6000.yaml"),  # tests/test_kaggle_cards.py
        *("csv.yaml", "scripts.yaml", "python.yaml", "onnx.yaml", "mixed.yaml", "causal_lm.yaml"),
        *("pooled.yaml", "views.yaml", "image.yaml", "lora.yaml", "vllm_server.yaml", "jury.yaml"),
        *("train_demo.yaml", "train_command.yaml", "second_stage.yaml"),  # tests/training
    }
    assert {path.name for path in (ROOT / "configs" / "winners").glob("*.yaml")} == {*CASES, *OVERLAYS}


def read_demo(name: str) -> list[list[str]]:
    with (ROOT / "demo" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.mark.long
def test_the_demo_ensemble_beats_each_of_its_members(project: Project) -> None:
    config = str(ROOT / "configs" / "demo.yaml")
    done = project.ensemble("run", config)
    assert done.returncode == 0, done.stderr
    report = project.run_json("runs/demo")
    assert done.stdout.endswith("report: runs/demo/report.html\n")
    assert "could not be made" not in (project.folder / "runs/demo/report.html").read_text(encoding="utf-8")
    scores = {name: score["log_loss"] for name, score in report["scores"].items()}
    truth = [row[2] for row in read_demo("test.csv")[1:]]
    shares = np.unique(truth, return_counts=True)[1] / len(truth)
    prior = -(shares * np.log(shares)).sum()
    assert max(scores["gemma2"], scores["llama"]) < 0.6 * prior
    assert scores["ensemble"] < min(scores["gemma2"], scores["llama"])
    for score in scores.values():
        assert f"{score:.4f}" in done.stdout
    for member in report["members"]:
        assert member["counters"]["tokens"] > 0.95 * member["counters"]["padded_tokens"]
    header, rows = project.read("runs/demo/submission.csv")
    sample = read_demo("sample_submission.csv")
    assert header == sample[0]
    assert [row[0] for row in rows] == [row[0] for row in sample[1:]]


def test_predictions_made_elsewhere(project: Project) -> None:
    done = project.ensemble("run", str(ROOT / "configs" / "csv.yaml"), "--set", "report=false")
    assert done.returncode == 0, done.stderr
    header, rows = project.read("runs/csv/ensemble.csv")
    theirs = {row[0]: row[1:] for row in read_demo("sample_submission.csv")}
    assert header == ["id", *theirs.pop("id")]
    assert [row[0] for row in rows] == [row[0] for row in read_demo("test.csv")[1:]]
    assert {row[0]: row[1:] for row in rows} == theirs


@pytest.mark.long
def test_two_scripts_as_people_run_them(project: Project) -> None:
    """The run against what its two scripts make by hand, and pandas of their files."""
    config = ROOT / "configs" / "scripts.yaml"
    done = project.ensemble("run", str(config), "--set", "report=false", "--limit", "200")
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(ROOT / "demo" / "test.csv", dtype=str)
    table[:200].to_csv(project.folder / "first.csv", index=False)
    by_hand = []
    for name in ("gemma", "llama"):
        script, made = config.parent / "scripts" / f"infer_{name}.py", project.folder / f"{name}.csv"
        command = [sys.executable, str(script), "--rows", "first.csv", "--out", str(made)]
        subprocess.run(command, cwd=project.folder, check=True, capture_output=True)
        by_hand.append(pd.read_csv(made, index_col="id"))
    expected = sum(by_hand) / 2
    ensemble = pd.read_csv(project.folder / "runs/scripts/ensemble.csv", index_col="id")
    assert [*ensemble.index] == [*table["id"][:200]]
    np.testing.assert_allclose(ensemble, expected.loc[ensemble.index, ensemble.columns], atol=1e-6)


@pytest.mark.long
def test_each_row_in_two_views(project: Project) -> None:
    done = project.ensemble("run", str(ROOT / "configs" / "views.yaml"), "--set", "report=false")
    assert done.returncode == 0, done.stderr
    predictions = project.folder / "runs/views/predictions"
    mean, plain, other = (
        pd.read_csv(predictions / f"{name}.csv", index_col="id")
        for name in ("llama", "llama@as_is", "llama@no_brackets")
    )
    differ = (plain != other).any(axis=1)
    assert 0.05 < differ.mean() < 0.5, "some glosses begin with a bracket"
    np.testing.assert_allclose(mean, (3 * plain + other) / 4, atol=1e-12)
    test = pd.read_csv(ROOT / "demo" / "test.csv", index_col="id")
    texts = [gloss.partition(") ")[2] or gloss for gloss in test.loc[differ[differ].index[:20], "gloss"]]
    folder = ROOT / "demo" / "models" / "llama"
    names = json.loads((folder / "config.json").read_text(encoding="utf-8"))["id2label"]
    result = other[differ][:20][[names[str(number)] for number in range(len(names))]]
    np.testing.assert_allclose(result, reference(folder, texts, 128), atol=2e-5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft on transformers 5
def test_an_adapter_over_a_four_bit_base(project: Project) -> None:
    """Each row as plain transformers and peft have it, alone, in both views."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    done = project.ensemble("run", str(ROOT / "configs" / "lora.yaml"), "--set", "report=false")
    assert done.returncode == 0, done.stderr
    assert "160 of 600 rows of 2 views were cut at max_length 96" in done.stdout
    assert project.run_json("runs/lora")["scores"]["ensemble"]["log_loss"] < 0.3, "chance is 1.1"
    table = pd.read_csv(ROOT / "demo" / "pairs.csv", index_col="id")
    folder = project.folder / "runs/lora/predictions"
    mean, as_is, swapped = (
        pd.read_csv(folder / f"{name}.csv", index_col="id")[LABELS]
        for name in ("llama_lora", "llama_lora@as_is", "llama_lora@swapped")
    )
    np.testing.assert_allclose(mean, (as_is + swapped) / 2, atol=1e-12)
    prompts = table[["prompt", "response_a", "response_b"]].map(json.loads).map(" ".join)
    plain = prompts["prompt"] + " <a>: " + prompts["response_a"] + " <b>: " + prompts["response_b"]
    turned = prompts["prompt"] + " <a>: " + prompts["response_b"] + " <b>: " + prompts["response_a"]
    base = ROOT / "demo/models/llama"
    tokenizer = AutoTokenizer.from_pretrained(base)
    whole = [row for row, text in plain.items() if len(tokenizer(text)["input_ids"]) <= 96]
    assert len(whole) == 300 - 160 / 2, "a row is as long in both views"
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    texts = [*plain[whole[:40]], *turned[whole[:40]]]
    adapter = ROOT / "demo/adapters/llama_pairs"
    expected = adapter_reference(base, adapter, texts, 3, quantization_config=settings)
    tolerance = four_bits_tolerance()
    np.testing.assert_allclose(as_is.loc[whole[:40]], expected[:40], atol=tolerance)
    np.testing.assert_allclose(swapped.loc[whole[:40]], expected[40:][:, [1, 0, 2]], atol=tolerance)


@pytest.mark.long
def test_a_function_of_scikit_learn_beside_a_model(project: Project) -> None:
    done = project.ensemble("run", str(ROOT / "configs" / "python.yaml"), "--set", "report=false")
    assert done.returncode == 0, done.stderr
    scores = {name: score["log_loss"] for name, score in project.run_json("runs/python")["scores"].items()}
    assert scores["ensemble"] < scores["llama"] < scores["tfidf"] < 1.1
    train = pd.read_csv(ROOT / "demo" / "train.csv")
    table = pd.read_csv(ROOT / "demo" / "test.csv", index_col="id")
    words = TfidfVectorizer(sublinear_tf=True).fit(train["gloss"])
    model = MultinomialNB(alpha=0.03).fit(words.transform(train["gloss"]), train["label"])
    header, rows = project.read("runs/python/predictions/tfidf.csv")
    assert header == ["id", *model.classes_], "the labels are in alphabetical order here"
    expected = model.predict_proba(words.transform(table.loc[[row[0] for row in rows], "gloss"]))
    np.testing.assert_allclose([[float(cell) for cell in row[1:]] for row in rows], expected, atol=1e-12)


@pytest.mark.long
def test_members_of_many_kinds(project: Project) -> None:
    """Who computes which rows, what the language model and the image classifier say, and the merge by hand."""
    path = ROOT / "configs" / "mixed.yaml"
    done = project.ensemble("run", str(path), "--set", "report=false")
    assert done.returncode == 0, done.stderr
    members = {
        member["name"]: member for member in yaml.safe_load(path.read_text(encoding="utf-8"))["models"]
    }
    kinds = {member.get("task_type", "seq_cls") for member in members.values()}
    assert kinds == set(KINDS.built_in) - {"command", "endpoint"}, "which have configs of their own"
    report = project.run_json("runs/mixed")
    scores = {name: score["log_loss"] for name, score in report["scores"].items()}
    assert scores["ensemble"] < scores["llama"] < scores["llama_mean"] < scores["tfidf"] < scores["mate"]
    assert max(scores["llama"], scores["smollm3"]) < scores["vit"] < 0.8 * scores["mate"]
    assert "cut at max_length 32" in done.stdout
    assert report["versions"].keys() >= {"torch", "transformers", "pandas"}
    table = pd.read_csv(ROOT / "demo" / "test.csv", nrows=300, index_col="id")
    result = {
        name: pd.read_csv(project.folder / f"runs/mixed/predictions/{name}.csv", index_col="id")
        for name in members
    }
    views = [
        pd.read_csv(project.folder / f"runs/mixed/predictions/llama@{view}.csv", index_col="id")
        for view in ("as_is", "no_brackets")
    ]
    np.testing.assert_allclose(result["llama"], (3 * views[0] + views[1]) / 4, atol=1e-12)
    demo, shown = ROOT / "demo", table.index[::15]
    texts = members["smollm3"]["label_tokens"]
    prompts = [f"{gloss} Topic:" for gloss in table.loc[shown, "gloss"]]
    expected, _ = label_reference(demo / "models" / "smollm3", prompts, [*texts.values()])
    np.testing.assert_allclose(result["smollm3"].loc[shown, [*texts]], expected, atol=3e-5)
    pictures = [demo / "pictures" / f"{name}.png" for name in shown]
    labels = sorted(result["vit"].columns)
    np.testing.assert_allclose(
        result["vit"].loc[shown, labels], image_reference(demo / "models" / "vit", pictures), atol=2e-5
    )
    weights = {member["name"]: member["weight"] for member in report["members"]}
    before = [name for name in result if name != "gemma2"]
    mean = sum(weights[name] * result[name] for name in before) / sum(weights[name] for name in before)
    ordered = np.sort(mean.to_numpy(), axis=1)
    asked = ordered[:, -1] - ordered[:, -2] < 0.8
    assert 0.2 < asked.mean() < 0.8
    assert result["gemma2"].index.tolist() == table.index[asked].tolist()
    logs = sum(weights[name] * np.log(item) for name, item in result.items() if name in before)
    logs.loc[asked] += weights["gemma2"] * np.log(result["gemma2"])
    total = np.where(asked, sum(weights.values()), sum(weights[name] for name in before))
    merged = np.exp(logs.div(total, axis=0))
    merged = merged.div(merged.sum(axis=1), axis=0)
    ruled = table["gloss"].str.startswith("someone who ")
    assert ruled.sum() == report["rules"][0]["rows"] > 0
    others = merged.columns != "person"
    merged.loc[ruled, others] *= 0.01 / (1 - merged.loc[ruled, ["person"]].to_numpy())
    merged.loc[ruled, "person"] = 0.99
    ensemble = pd.read_csv(project.folder / "runs/mixed/ensemble.csv", index_col="id")
    pd.testing.assert_frame_equal(ensemble, merged, rtol=1e-9)


@pytest.mark.long
def test_a_chat_model_scored_at_label_tokens(project: Project) -> None:
    """With a tiny stand-in for the model of the hub."""
    folder = make_language_model(project.folder / "chat", "llama")
    chat = "<bos>{% for one in messages %}[{{ one.role }}] {{ one.content }}<eos>{% endfor %}[assistant] "
    (folder / "chat_template.jinja").write_text(chat, encoding="utf-8")
    path = ROOT / "configs" / "causal_lm.yaml"
    done = project.ensemble(
        *("run", str(path), "--set", f"models.smollm2.model_name_or_path={folder}"),
        *("--set", "report=false", "--limit", "40"),
    )
    assert done.returncode == 0, done.stderr
    assert "tokens of no label" in done.stdout
    (model,) = yaml.safe_load(path.read_text(encoding="utf-8"))["models"]
    rows = read_demo("test.csv")[1:41]
    prompts = [
        f"<bos>[user] {model['prompt_template'].replace('{{ gloss }}', row[1])}<eos>[assistant] "
        for row in rows
    ]
    header, values_read = project.read("runs/causal_lm/predictions/smollm2.csv")
    assert header == ["id", *model["label_tokens"]]
    expected, _ = label_reference(
        folder, prompts, [*model["label_tokens"].values()], add_special_tokens=False
    )
    np.testing.assert_allclose(
        [[float(cell) for cell in row[1:]] for row in values_read], expected, atol=3e-5
    )


@pytest.mark.long
def test_a_language_model_in_a_server_of_vllm(project: Project, nvml_sim: NvmlSim) -> None:
    """With a stub for vLLM, which `make test-releases` runs itself, against plain transformers."""
    folder = make_language_model(project.folder / "model", "llama")
    chat = "<bos>{% for one in messages %}[{{ one.role }}] {{ one.content }}<eos>{% endfor %}[assistant] "
    (folder / "chat_template.jinja").write_text(chat, encoding="utf-8")
    path = ROOT / "configs" / "vllm_server.yaml"
    (model,) = yaml.safe_load(path.read_text(encoding="utf-8"))["models"]
    (project.folder / "behaviour.json").write_text(json.dumps({"models": [model["model"]]}))
    nvml_sim.write([Gpu(gpu_uuid(0), memory=Memory(16 * GIB))])
    command = [*STUB, "--port", "{port}", str(project.folder)]
    options = ["--set", f"models.qwen.server.command={json.dumps(command)}", "--set", "report=false"]
    done = project.ensemble("run", str(path), *options, "--limit=12", environment=nvml_sim.environment())
    assert done.returncode == 0, done.stderr

    header, values_read = project.read("runs/vllm_server/predictions/qwen.csv")
    assert header == ["id", *model["label_tokens"]]
    questions = [
        model["prompt_template"].replace("{{ gloss }}", row[1]) for row in read_demo("test.csv")[1:13]
    ]
    prompts = [f"<bos>[user] {question}<eos>[assistant] " for question in questions]
    letters = [*model["label_tokens"].values()]
    expected, _ = label_reference(folder, prompts, letters, max_length=2048, add_special_tokens=False)
    np.testing.assert_allclose(
        [[float(cell) for cell in row[1:]] for row in values_read], expected, atol=1e-5
    )

    (found,) = [word for word in model["server"]["command"] if word.startswith("--served-model-name=")]
    assert found.partition("=")[2] == model["model"]
    no_program = {**nvml_sim.environment(), "PATH": str(project.folder)}
    done = project.ensemble("validate", str(path), environment=no_program)
    assert done.returncode == 2
    assert (
        "server.command: the program vllm is not on the PATH; name an installed program, or its path"
        in done.stderr
    )


@pytest.mark.long
def test_a_jury_of_three_judges_in_both_orders(project: Project) -> None:
    """With tiny stand-ins for the models of the hub; the report's figures once more by pandas and scikit-learn."""
    path = ROOT / "configs" / "jury.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    chat = "<bos>{% for one in messages %}[{{ one.role }}] {{ one.content }}<eos>{% endfor %}[assistant] "
    judges = {"qwen": "qwen2", "smollm2": "llama", "tinyllama": "llama"}
    sets = []
    for seed, (name, architecture) in enumerate(judges.items()):
        folder = make_language_model(project.folder / name, architecture, seed=seed)
        (folder / "chat_template.jinja").write_text(chat, encoding="utf-8")
        sets += ["--set", f"models.{name}.model_name_or_path={folder}"]
    header, *rows = read_demo("pairs.csv")[:61]
    project.write_csv("people.csv", header, rows)
    sets += ["--set", "data.path=people.csv"]
    done = project.ensemble("run", str(path), *sets)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(ROOT / "demo" / "pairs.csv", index_col="id", nrows=60)
    columns = ["prompt", "response_a", "response_b"]
    texts = table[columns].map(json.loads).map(" ".join)
    swapped = texts.rename(columns={"response_a": "response_b", "response_b": "response_a"})
    predictions = project.folder / "runs/jury/predictions"
    tokens = config["defaults"]["label_tokens"]
    template = config["defaults"]["prompt_template"]
    for column in columns:
        template = template.replace(f"{{{{ {column} | fromjson | join(' ') }}}}", f"{{{column}}}")
    page = re.sub(r"<[^>]*>", " ", (project.folder / "runs/jury/report.html").read_text(encoding="utf-8"))
    page = " ".join(page.replace("\N{NO-BREAK SPACE}", " ").split())
    errors, truth = [], np.eye(3)[[LABELS.index(label) for label in table["label"]]]
    for name in judges:
        mean, as_is, turned = (
            pd.read_csv(predictions / f"{file}.csv", index_col="id")[LABELS]
            for file in (name, f"{name}@as_is", f"{name}@swapped")
        )
        np.testing.assert_allclose(mean, (as_is + turned) / 2, atol=1e-12)
        for result, cells in ((as_is, texts), (turned[[LABELS[1], LABELS[0], LABELS[2]]], swapped)):
            prompts = [
                f"<bos>[user] {template.format(**row)}<eos>[assistant] " for _, row in cells[:5].iterrows()
            ]
            expected, _ = label_reference(
                project.folder / name, prompts, [*tokens.values()], add_special_tokens=False
            )
            np.testing.assert_allclose(result[:5], expected, atol=3e-5)
        bias = 100 * (as_is.idxmax(axis=1) != turned.idxmax(axis=1)).mean()
        assert f"{name} as_is / swapped {bias:.1f} % (" in page
        kappa = cohen_kappa_score(table["label"], mean.idxmax(axis=1))
        assert re.search(rf"{name} {kappa:.4f} \(".replace("-", "\N{MINUS SIGN}"), page)
        errors.append((mean.to_numpy() - truth).ravel())
    votes = 9 / np.asarray(np.corrcoef(errors)).sum()
    assert f"Together the 3 members count as {votes:.1f} members with independent errors:" in page
    # Where people judged: weights by what they said.
    done = project.ensemble("fit", str(path), *sets, "--method", "auto")
    assert done.returncode == 0, done.stderr
    weights = yaml.safe_load((project.folder / "weights.yaml").read_text(encoding="utf-8"))
    assert [model["name"] for model in weights["models"]] == [*judges]


def test_a_backbone_with_a_head_of_its_own(project: Project) -> None:
    done = project.ensemble(
        "run", str(ROOT / "configs" / "pooled.yaml"), "--set", "report=false", "--limit", "500"
    )
    assert done.returncode == 0, done.stderr
    assert project.run_json("runs/pooled")["scores"]["llama_mean"]["log_loss"] < 1.2, "the prior has 2.5"
    header, rows = project.read("runs/pooled/predictions/llama_mean.csv")
    head = torch.nn.Linear(128, len(header) - 1)
    stored = load_file(ROOT / "demo" / "heads" / "llama_mean.safetensors")
    head.load_state_dict({name.removeprefix("fc."): value.float() for name, value in stored.items()})
    texts = {row[0]: row[1] for row in read_demo("test.csv")[1:]}
    shown = rows[::25]
    logits = pooled_reference(
        ROOT / "demo" / "models" / "llama", head, "mean", [texts[row[0]] for row in shown], max_length=128
    )
    results = [[float(cell) for cell in row[1:]] for row in shown]
    np.testing.assert_allclose(results, softmax(logits), atol=1e-5)


@pytest.mark.long
def test_an_image_classifier(project: Project) -> None:
    script = ROOT / "scripts" / "make_images.py"
    made = subprocess.run(
        [sys.executable, script, "runs/images"], cwd=project.folder, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    done = project.ensemble("run", str(ROOT / "configs" / "image.yaml"), "--set", "report=false")
    assert done.returncode == 0, done.stderr
    assert project.run_json("runs/image")["scores"]["resnet"]["accuracy"] > 0.8
    assert "has no sdpa" not in done.stdout, "it has no attention"
    header, rows = project.read("runs/image/predictions/resnet.csv")
    model = project.folder / "runs/images/model"
    paths = [project.folder / "runs/images/images" / f"{int(row[0]):03}.png" for row in rows[:20]]
    actual = np.array([[float(cell) for cell in row[1:]] for row in rows[:20]])
    assert header == ["id", "red", "green", "blue"]
    np.testing.assert_allclose(actual, image_reference(model, paths), atol=2e-6)


@pytest.mark.long
def test_a_classifier_in_onnx_runtime_has_the_numbers_of_its_twin(project: Project) -> None:
    for package in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    script, model = ROOT / "scripts" / "export_onnx.py", ROOT / "demo" / "models" / "gemma2"
    (project.folder / "tmp").mkdir()
    folder = {"TMPDIR": str(project.folder / "tmp")}  # where ONNX Runtime leaves a file for its telemetry
    made = subprocess.run(
        [sys.executable, script, model, "runs/gemma2.onnx"],
        cwd=project.folder,
        env={**os.environ, **folder},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    config = str(ROOT / "configs" / "onnx.yaml")
    done = project.ensemble("run", config, "--set", "report=false", "--limit", "400", environment=folder)
    assert done.returncode == 0, done.stderr
    (header, rows), (own_header, own_rows) = (
        project.read(f"runs/onnx/predictions/{name}.csv") for name in ("gemma2", "gemma2_onnx")
    )
    assert (own_header, [row[0] for row in own_rows]) == (header, [row[0] for row in rows])
    values, own = (np.array([[float(cell) for cell in row[1:]] for row in some]) for some in (rows, own_rows))
    assert len(values) == 400
    np.testing.assert_allclose(own, values, atol=1e-5)


@pytest.fixture
def kaggle(project: Project) -> Project:
    """The folders that configs/kaggle.yaml reads, with small stand-ins of the same architectures."""
    pytest.importorskip("bitsandbytes")
    root = project.folder / "kaggle"
    lay_out(root)
    text = (ROOT / "configs" / "kaggle.yaml").read_text(encoding="utf-8")
    assert text.count("/kaggle/") >= 6
    (project.folder / "kaggle.yaml").write_text(text.replace("/kaggle/", f"{root}/"), encoding="utf-8")
    return project


@pytest.mark.long
def test_the_kaggle_config_with_stand_ins(kaggle: Project) -> None:
    assert kaggle.ensemble("validate", "kaggle.yaml").returncode == 0
    done = kaggle.ensemble("run", "kaggle.yaml")
    assert done.returncode == 0, done.stderr
    header, rows = kaggle.read("kaggle/working/submission.csv")
    assert header == ["id", *LABELS]
    assert [row[0] for row in rows] == [str(136060 + index) for index in range(40)]
    values = np.array([[float(cell) for cell in row[1:]] for row in rows])
    np.testing.assert_allclose(values.sum(axis=1), 1, atol=1e-8)
    assert values.std(axis=0).min() > 0.01
    _check_labels_are_not_mixed_up(kaggle, values)
    report = kaggle.run_json("kaggle/working/run")
    # [text, null] in a JSON list: one null a row in response_a
    assert report["null_texts"]["response_a"] >= 40
    done = kaggle.ensemble("plan", "kaggle.yaml")
    assert done.returncode == 0, done.stderr
    assert "the whole run takes about " in done.stdout, "by the speeds of the run before"


def test_the_kaggle_config_fits_two_t4(kaggle: Project, nvml_sim: NvmlSim) -> None:
    """With checkpoints of the real size, of which only the headers are there."""
    names = {"gemma-2-9b-lmsys": GEMMA_2_9B, "llama-3-8b-lmsys": LLAMA_3_8B}
    for name, shape in names.items():
        make_full_size(kaggle.folder / "kaggle/input" / name, shape, ["LABEL_0", "LABEL_1", "LABEL_2"])
    nvml_sim.write(
        [Gpu(gpu_uuid(index), "Tesla T4", (0, 1 + index, 0), memory=Memory(15 * GIB)) for index in range(2)]
    )
    done = kaggle.ensemble("plan", "kaggle.yaml", environment=nvml_sim.environment())
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert " 9.24 B " in lines["gemma2"]
    assert " 7.50 B " in lines["llama3"]
    assert "float16, capped_blocks attention" in lines["gemma2:"]
    assert "float16, sdpa attention" in lines["llama3:"]
    assert all("1 replica on GPU 0 or 1" in lines[name] for name in ("gemma2:", "llama3:"))
    assert "tight" not in done.stdout
    done = kaggle.ensemble(
        "plan",
        "kaggle.yaml",
        "--set",
        "defaults.quantization_config=null",
        environment=nvml_sim.environment(),
    )
    assert done.stdout.count("so a replica takes 2") == 2
    assert "17.2 GiB" in done.stdout
    assert "makes its weights 4.3 GiB, to fit one, and gives other numbers" in " ".join(done.stdout.split())
    nvml_sim.write([Gpu(gpu_uuid(0), memory=Memory(4 * GIB))])
    for command in ("plan", "run"):
        done = kaggle.ensemble(command, "kaggle.yaml", environment=nvml_sim.environment())
        assert done.returncode == 2
        assert "models[0] (gemma2): its weights take " in done.stderr
        assert "models[1] (llama3): its weights take " in done.stderr
    assert not (kaggle.folder / "kaggle/working/run").exists()


def _check_labels_are_not_mixed_up(kaggle: Project, values: np.ndarray) -> None:
    """Each column must follow the same label of the models in the same four bits, and no other."""
    import torch
    from transformers import BitsAndBytesConfig

    _, rows = kaggle.read("kaggle/input/lmsys-chatbot-arena/test.csv")
    prompts = []
    for row in rows:
        turns = ["\n".join(turn or "" for turn in json.loads(cell)) for cell in row[1:]]
        prompt, first, second = (turn.replace("\ud83d", "\ufffd") for turn in turns)
        prompts.append(f"<prompt>: {prompt}\n\n<response_a>: {first}\n\n<response_b>: {second}")
    models = kaggle.folder / "kaggle" / "input"
    settings = yaml.safe_load((kaggle.folder / "kaggle.yaml").read_text())["defaults"]["quantization_config"]
    bits = BitsAndBytesConfig(**settings, llm_int8_skip_modules=["score"])
    options: dict[str, Any] = {"quantization_config": bits, "device_map": {"": "cpu"}, "dtype": torch.float32}
    expected = 0.6 * reference(models / "gemma-2-9b-lmsys", prompts, max_length=2048, **options)
    expected += 0.4 * reference(models / "llama-3-8b-lmsys", prompts, max_length=2048, **options)
    likeness = np.corrcoef(values.T, expected.T)[:3, 3:]
    assert likeness.argmax(axis=1).tolist() == [0, 1, 2], likeness
    assert likeness.diagonal().min() > 0.99, likeness
