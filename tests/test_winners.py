"""Every config in configs/winners/ is validated as it stands, and run with tiny models of the same architectures.

Tables have the competition's columns, and folders lie as on Kaggle, or below the working directory. GPUs are
simulated: workers compute on the CPU, also in 4 and 8 bits. Each submission is compared with what pandas makes of
the members' predictions.
"""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.stats import rankdata

from ensemble.members.huggingface.spec import BACKBONE, CLASSIFIER, LANGUAGE_MODEL
from ensemble.pipeline.load import load
from tests.checkpoints import make_adapter, make_checkpoint, make_texts, make_tokenizer, prime
from tests.members.endpoint.serving import serving
from tests.nvml.sim import GIB, Gpu, Memory, NvmlSim, gpu_uuid
from tests.project import ROOT, Project
from tests.sampling import one_in

pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft on transformers 5
]
WINNERS = ROOT / "configs" / "winners"
MAP = "map-charting-student-math-misunderstandings"
CHAT = "{% for one in messages %}[{{ one.role }}] {{ one.content }}<eos>{% endfor %}[assistant] "
# As Kaggle has them: name, compute capability, GiB, and how many.
T4, L4 = ("Tesla T4", (7, 5), 15, 2), ("NVIDIA L4", (8, 9), 22, 4)


def make_model(
    folder: Path,
    model_type: str,
    auto_class: str,
    labels: Sequence[str] = (),
    words: Sequence[str] = (),
    seed: int = 0,
    **settings: Any,
) -> Path:
    """A tiny random model.

    Args:
        labels: of a classifier's outputs.
        words: that are a token each.
        settings: of its config.
    """
    import torch
    import transformers

    is_encoder = model_type in ("modernbert", "xlm-roberta", "electra")
    tokenizer = make_tokenizer(folder, kind="encoder" if is_encoder else "decoder")
    tokenizer.add_tokens(list(words))
    tokenizer.save_pretrained(folder)
    numbers = {
        "vocab_size": len(tokenizer) + 8,  # some classes of tokenizers add a token of their own
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.21,
    }
    if labels:
        numbers["id2label"] = dict(enumerate(labels))
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **{**numbers, **settings})
    getattr(transformers, auto_class).from_config(config).save_pretrained(folder)
    return prime(folder, auto_class)


def numbered(count: int) -> list[str]:
    """What transformers calls the outputs of a head without names."""
    return [f"LABEL_{number}" for number in range(count)]


def write(path: Path, table: pd.DataFrame) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, index=False)


@dataclass
class Kaggle:
    """Kaggle's folders, here below ``root``; other paths are below the project's folder.

    Args:
        servers: ends what was started.
        sets: further options of ``--set``.
    """

    project: Project
    root: Path
    servers: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    sets: list[str] = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.input, self.working = self.root / "input", self.root / "working"
        self.working.mkdir(parents=True)

    def config(self, name: str) -> dict[str, Any]:
        """Write the config with this folder's paths, and return it."""
        text = (WINNERS / name).read_text(encoding="utf-8")
        assert text.count("/kaggle/") >= 5 or text.count(" task") >= 5
        text = text.replace("${CONFIG_DIR}", str(WINNERS)).replace("/kaggle/", f"{self.root}/")
        (self.project.folder / name).write_text(text, encoding="utf-8")
        self.document = yaml.safe_load(text)
        return self.document

    def run_header(self, name: str, when: str) -> None:
        """Run the command that stands in a config's first lines."""
        (line,) = re.findall(f"# {when}: python configs/winners/(.*)", (WINNERS / name).read_text("utf-8"))
        script, *arguments = shlex.split(line)
        subprocess.run(
            [sys.executable, str(WINNERS / script), *arguments], cwd=self.project.folder, check=True
        )

    def predictions(self, name: str, id_column: str, labels: Sequence[str]) -> pd.DataFrame:
        """What a member, or one of its views, predicts."""
        path = self.project.folder / self.document["output_dir"] / "predictions" / f"{name}.csv"
        return pd.read_csv(path, dtype={id_column: str}).set_index(id_column)[list(labels)]

    def submission(self, key: str = "path") -> pd.DataFrame:
        return pd.read_csv(self.project.folder / self.document["submission"][key], dtype=str)


def lay_out_lmsys(kaggle: Kaggle) -> None:
    from safetensors.torch import save_file
    from torch import nn

    for seed, (name, model_type) in enumerate(
        [("lmsys-gemma-2-9b-it", "gemma2"), ("lmsys-armorm-llama-3-8b", "llama")]
    ):
        folder = make_model(kaggle.input / name, model_type, BACKBONE, seed=seed)
        head = nn.Sequential(nn.Dropout(), nn.Linear(64, 32), nn.Dropout(), nn.GELU(), nn.Linear(32, 3))
        save_file(
            {f"score.{key}": value for key, value in head.state_dict().items()}, folder / "head.safetensors"
        )
    texts = make_texts(180, seed=5)
    rows = []
    for index in range(30):
        turns = [[*texts[6 * index + 2 * part :][:2]] for part in range(3)]
        rows.append([136060 + index, *map(json.dumps, turns)])
    test = pd.DataFrame(rows, columns=["id", "prompt", "response_a", "response_b"])
    write(kaggle.input / "lmsys-chatbot-arena" / "test.csv", test)
    sample = test[["id"]].assign(winner_model_a=1 / 3, winner_model_b=1 / 3, winner_tie=1 / 3)
    write(kaggle.input / "lmsys-chatbot-arena" / "sample_submission.csv", sample)


def expect_lmsys(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    members = [kaggle.predictions(name, "id", config["labels"]) for name in ("gemma2", "llama3")]
    return sum(members) / 2


def lay_out_jigsaw(kaggle: Kaggle) -> None:
    yes_no = [" Yes", " No"]
    base = make_model(kaggle.input / "qwen-3/transformers/4b-base/1", "qwen3", LANGUAGE_MODEL, words=yes_no)
    make_adapter(kaggle.working / "qwen3_lora", base, 0, r=32, lora_alpha=64)
    make_checkpoint(kaggle.working / "deberta_v3_base", "deberta-v2", numbered(2))
    tokens: Any = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    make_model(kaggle.working / "gte_modernbert_base", "modernbert", BACKBONE, **tokens)
    texts = make_texts(240, seed=6)
    rules = ["No advertising", "No legal advice", "Be kind"]
    columns = [f"{side}_example_{number}" for side in ("positive", "negative") for number in (1, 2)]
    rows = [
        [2029 + index, texts[6 * index], rules[index % 3], f"sub{index % 5}", *texts[6 * index + 1 :][:4]]
        for index in range(40)
    ]
    test = pd.DataFrame(rows, columns=["row_id", "body", "rule", "subreddit", *columns])
    folder = kaggle.input / "jigsaw-agile-community-rules"
    write(folder / "test.csv", test)
    write(folder / "sample_submission.csv", test[["row_id"]].assign(rule_violation=0.5))


def expect_jigsaw(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    _check_centroids(kaggle)
    total = 0.0
    for name, weight in {"qwen3": 0.7, "deberta": 0.5, "gte": 0.3}.items():
        broke = kaggle.predictions(name, "row_id", ["Yes"])
        total = total + weight / 1.5 * (rankdata(broke) - 0.5) / len(broke)
    return pd.DataFrame({"rule_violation": total}, index=broke.index)


def _check_centroids(kaggle: Kaggle) -> None:
    """A few rows of the member gte, each text encoded alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = kaggle.working / "gte_modernbert_base"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()

    def encode(text: str) -> np.ndarray:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        unit: np.ndarray = torch.nn.functional.normalize(states[0, 0], dim=-1).numpy()
        return unit

    test = pd.read_csv(
        kaggle.input / "jigsaw-agile-community-rules" / "test.csv", dtype=str, keep_default_na=False
    )
    same = test[test["rule"] == "Be kind"]
    probabilities = kaggle.predictions("gte", "row_id", ["Yes"])["Yes"]
    to_side = {}
    for side in ("positive", "negative"):
        examples = [*same[f"{side}_example_1"], *same[f"{side}_example_2"]]
        mean = np.mean([encode(text) for text in examples], axis=0)
        centroid = mean / np.linalg.norm(mean)
        to_side[side] = np.array([np.linalg.norm(encode(text) - centroid) for text in same["body"]])
    expected = (to_side["negative"] - to_side["positive"] + 2) / 4
    np.testing.assert_allclose(probabilities[same["row_id"]], expected, atol=1e-5)


def lay_out_map(kaggle: Kaggle) -> None:
    """MAP's tables, with all 65 labels, and the one that prepare_map.py makes of them."""
    labels = yaml.safe_load((WINNERS / "map_45th.yaml").read_text(encoding="utf-8"))["labels"]
    misconceptions = sorted({label.partition("Misconception:")[2] for label in labels} - {""})
    questions = [f"{31772 + number}" for number in range(15)]
    of_question = {question: misconceptions[number::15] for number, question in enumerate(questions)}
    texts = iter(make_texts(400, seed=7))
    rows: list[list[Any]] = []
    for question in questions:
        kinds = ["Correct:NA", "Neither:NA", *(f"Misconception:{name}" for name in of_question[question])]
        for kind in kinds:
            for is_correct in ("True", "False"):
                if f"{is_correct}_{kind}" in labels:
                    category, _, misconception = f"{is_correct}_{kind}".partition(":")
                    answer = f"\\( {question[-2:]} \\)" if is_correct == "True" else "\\( 0 \\)"
                    cells = [question, f"What is {question}?", answer, next(texts), category, misconception]
                    rows.append([len(rows), *cells])
    columns = ["row_id", "QuestionId", "QuestionText", "MC_Answer", "StudentExplanation"]
    train = pd.DataFrame(rows, columns=[*columns, "Category", "Misconception"])
    # One was marked wrongly, as some are.
    train.loc[len(train)] = [
        len(train),
        questions[0],
        "What is it?",
        "\\( 0 \\)",
        "null",
        "True_Correct",
        "NA",
    ]
    test = train.sample(30, random_state=8)[columns].reset_index(drop=True)
    test["row_id"] = 36696 + test.index
    write(kaggle.input / MAP / "train.csv", train)
    write(kaggle.input / MAP / "test.csv", test)
    guess = "True_Correct:NA False_Neither:NA False_Misconception:Incomplete"
    write(
        kaggle.input / MAP / "sample_submission.csv",
        test[["row_id"]].assign(**{"Category:Misconception": guess}),
    )
    arguments = (WINNERS / "prepare_map.py", kaggle.input / MAP, kaggle.working / "map_test.csv")
    subprocess.run([sys.executable, *map(str, arguments)], check=True)


def are_correct(kaggle: Kaggle) -> np.ndarray:
    """Whether the students of test.csv are right: a question's answer is made of its number's last two digits."""
    test = pd.read_csv(kaggle.input / MAP / "test.csv", dtype=str)
    return np.array([row.MC_Answer == f"\\( {row.QuestionId[-2:]} \\)" for row in test.itertuples()])


def best(values: pd.DataFrame, count: int) -> list[list[str]]:
    """The labels of each row with the most probability, without those that have none."""
    ordered = (row.sort_values(ascending=False, kind="stable") for _, row in values.iterrows())
    return [[str(label) for label in row.index[row > 0][:count]] for row in ordered]


def lay_out_map_6th(kaggle: Kaggle) -> None:
    lay_out_map(kaggle)
    bases = {
        "qwen3-embedding-8b": (
            "qwen3",
            ["qwen3-8b-emb", "qwen3-8B-emb-aug-data", "qwen3_8b_emb_synthetic_data"],
        ),
        "qwen2.5-14b-instruct": ("qwen2", ["qwen2.5-14B-IT"]),
        "qwen3-14b": ("qwen3", ["qwen3-14b-full-data", "qwen3-14b-syhntetic-data", "map-qwen3-14b-3407"]),
    }
    seed = 0
    for name, (model_type, adapters) in bases.items():
        base = make_model(kaggle.input / name, model_type, LANGUAGE_MODEL, seed=seed)
        for adapter in adapters:
            seed += 1
            make_adapter(kaggle.input / "map-6th" / adapter, base, labels=37, seed=seed)


def expect_map_6th(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    names = [f"qwen3_embedding_8b@{view}" for view in ("plain", "augmented", "synthetic")]
    names += ["qwen25_14b", *(f"qwen3_14b@{view}" for view in ("full_data", "synthetic", "seed_3407"))]
    members = [kaggle.predictions(name, "row_id", config["labels"]) for name in names]
    mean = sum(members) / 7
    prefixes = np.where(are_correct(kaggle), "True_", "False_")
    cells = [
        " ".join(prefix + label for label in row) for prefix, row in zip(prefixes, best(mean, 3), strict=True)
    ]
    return pd.DataFrame({"Category:Misconception": cells}, index=mean.index)


def lay_out_map_15th(kaggle: Kaggle) -> None:
    lay_out_map(kaggle)
    bases = {
        "deepseek-r1-distill-qwen-14b": ("qwen2", ["deepseek-r1-distill-qwen-14b"]),
        "qwen-3/transformers/14b/1": ("qwen3", ["qwen3-14b"]),
        "qwen-3/transformers/32b/1": ("qwen3", ["qwen3-32b"]),
        "phi-4-reasoning-plus": ("phi3", ["phi-4-reasoning-plus"]),
        "phi-4": ("phi3", ["phi-4", "phi-4-masked-loss"]),
    }
    seed = 0
    for name, (model_type, adapters) in bases.items():
        base = make_model(kaggle.input / name, model_type, LANGUAGE_MODEL, seed=seed)
        for adapter in adapters:
            seed += 1
            make_adapter(kaggle.input / "map-15th" / adapter, base, labels=65, seed=seed)


def expect_map_15th(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    """What the notebook does: six scripts one after the other, their mean with six weights, the best three."""
    weighted = []
    for number, member in enumerate(config["models"]):
        _, script, *arguments = member["command"]
        made = kaggle.root / f"by_hand_{number}.csv"
        places = {"{rows}": str(kaggle.input / MAP / "test.csv"), "{out}": str(made)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", [script, *(places.get(word, word) for word in arguments)])
            runpy.run_path(script, run_name="__main__")
        by_hand = pd.read_csv(made, dtype={"row_id": str}).set_index("row_id")[config["labels"]]
        in_the_run = kaggle.predictions(member["name"], "row_id", config["labels"])
        pd.testing.assert_frame_equal(in_the_run, by_hand, atol=1e-5, check_dtype=False)  # threads differ
        weighted.append(member["weight"] * in_the_run)
    total = sum(weighted)
    ensemble = pd.read_csv(kaggle.working / "run" / "ensemble.csv", dtype={"row_id": str}).set_index("row_id")
    pd.testing.assert_frame_equal(ensemble, total, rtol=0, atol=1e-12, check_dtype=False)
    return pd.DataFrame({"Category:Misconception": map(" ".join, best(total, 3))}, index=total.index)


def lay_out_map_45th(kaggle: Kaggle) -> None:
    lay_out_map(kaggle)
    adapted = {
        "hunyuan-7b-instruct-bf16": ("hunyuan_v1_dense", "hunyuan-7b-instruct-map"),
        "qwen-2-5-map": ("qwen2", "edi-trained-map-qwen/best"),
        "qwen-3/transformers/14b/1": ("qwen3", "qwen3-14b-lora-map/best"),
    }
    for seed, (name, (model_type, adapter)) in enumerate(adapted.items()):
        base = make_model(kaggle.input / name, model_type, LANGUAGE_MODEL, seed=seed)
        make_adapter(kaggle.input / adapter, base, labels=65, seed=seed)
    whole = {"qwen3-4b-map-lora-training": "qwen3", "qwen3-8b-map": "qwen3", "deepseek-math-7b-map": "llama"}
    for seed, (name, model_type) in enumerate(whole.items(), start=3):
        make_model(kaggle.input / name, model_type, CLASSIFIER, numbered(65), seed=seed)


def expect_map_45th(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    names = [member["name"] for member in config["models"]]
    is_true = np.array([label.startswith("True_") for label in config["labels"]])
    is_possible = is_true[None, :] == are_correct(kaggle)[:, None]
    members = [kaggle.predictions(name, "row_id", config["labels"]).where(is_possible, 0.0) for name in names]
    mean = sum(member.div(member.sum(axis=1), axis=0) for member in members) / 6
    return pd.DataFrame({"Category:Misconception": map(" ".join, best(mean, 3))}, index=mean.index)


def lay_out_map_9th(kaggle: Kaggle) -> None:
    lay_out_map(kaggle)
    from transformers import AutoTokenizer

    tokens = [f"<|label{number}|>" for number in range(65)]
    for seed, name in enumerate(["qwen2.5-32b-instruct", "deepseek-r1-distill-qwen-32b"]):
        base = make_model(kaggle.input / name, "qwen2", LANGUAGE_MODEL, words=tokens, seed=seed)
        (base / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
        ids = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids(tokens)
        for fold in range(5):
            make_adapter(
                kaggle.input / "map-9th" / name / f"fold{fold}",
                base,
                labels=0,
                seed=10 * seed + fold,
                modules_to_save=["lm_head"],
                trainable_token_indices={"embed_tokens": ids},
            )


def expect_map_9th(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    names = [f"{member}@fold{fold}" for member in ("qwen25_32b", "deepseek_r1_32b") for fold in range(5)]
    mean = sum(kaggle.predictions(name, "row_id", config["labels"]) for name in names) / 10
    return pd.DataFrame({"Category:Misconception": map(" ".join, best(mean, 3))}, index=mean.index)


def lay_out_map_1st(kaggle: Kaggle) -> None:
    lay_out_map(kaggle)
    for seed, name in enumerate(["x_0", "x_1", "x_2", "y_0", "y_1", "y_2"]):
        model_type = "qwen3" if name.startswith("x") else "glm4"
        make_model(kaggle.input / "map-1st" / name, model_type, CLASSIFIER, ["LABEL_0"], seed=seed)


def expect_map_1st(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    names = [member["name"] for member in config["models"]]
    mean = sum(kaggle.predictions(name, "row_id", config["labels"]) for name in names) / 6
    candidates = pd.read_csv(kaggle.working / "map_test.csv")["candidates"].map(json.loads)
    rows = zip(best(mean, 3), candidates, strict=True)
    cells = [" ".join(texts[int(label)] for label in row) for row, texts in rows]
    return pd.DataFrame({"Category:Misconception": cells}, index=mean.index)


def lay_out_wsdm(kaggle: Kaggle) -> None:
    base = make_model(kaggle.input / "qwen2.5-14b-instruct", "qwen2", LANGUAGE_MODEL, words=["A", "B"])
    (base / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    for fold in range(5):
        make_adapter(kaggle.input / "wsdm-4th" / f"fold{fold}", base, 0, seed=fold)
    texts = make_texts(120, seed=9)
    rows = [[f"{index:032x}", *texts[3 * index :][:3]] for index in range(40)]
    test = pd.DataFrame(rows, columns=["id", "prompt", "response_a", "response_b"])
    folder = kaggle.input / "wsdm-cup-multilingual-chatbot-arena"
    write(folder / "test.parquet", test)
    write(folder / "sample_submission.csv", test[["id"]].assign(winner="model_a"))


def expect_wsdm(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    views = [
        kaggle.predictions(f"qwen25_14b@{view}", "id", config["labels"]) for view in ("as_is", "swapped")
    ]
    # There was time for all rows.
    assert len(views[1]) == len(views[0])
    mean = sum(views) / 2
    return pd.DataFrame({"winner": mean.idxmax(axis=1)})


def lay_out_eedi(kaggle: Kaggle) -> None:
    """Eedi's tables, and a stand-in for its retrieval: misconceptions that share words with the question."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    for seed, name in enumerate(["eedi-ranker-14b", "eedi-ranker-32b"]):
        make_model(kaggle.input / name, "qwen2", CLASSIFIER, ["LABEL_0"], seed=seed)
    misconceptions = pd.DataFrame({"MisconceptionName": make_texts(120, seed=10)}).rename_axis(
        "MisconceptionId"
    )
    texts = iter(make_texts(100, seed=11))
    rows = []
    for question in range(8):
        cells = [1869 + question, 856, next(texts), 33, "Fractions", "ABCD"[question % 4], next(texts)]
        rows.append([*cells, *(next(texts) for _ in range(4))])
    columns = [
        "QuestionId",
        "ConstructId",
        "ConstructName",
        "SubjectId",
        "SubjectName",
        "CorrectAnswer",
        "QuestionText",
    ]
    test = pd.DataFrame(rows, columns=[*columns, *(f"Answer{letter}Text" for letter in "ABCD")])
    folder = kaggle.input / "eedi-mining-misconceptions-in-mathematics"
    write(folder / "test.csv", test)
    write(folder / "misconception_mapping.csv", misconceptions.reset_index())
    wrong = test.merge(pd.DataFrame({"letter": list("ABCD")}), how="cross").query("letter != CorrectAnswer")
    wrong["QuestionId_Answer"] = wrong["QuestionId"].astype(str) + "_" + wrong["letter"]
    wrong["CorrectAnswerText"] = [row[f"Answer{row['CorrectAnswer']}Text"] for _, row in wrong.iterrows()]
    wrong["WrongAnswerText"] = [row[f"Answer{row['letter']}Text"] for _, row in wrong.iterrows()]
    names = misconceptions["MisconceptionName"].to_numpy()
    words = TfidfVectorizer().fit(names)
    likeness = (
        words.transform(wrong["QuestionText"] + " " + wrong["WrongAnswerText"]) @ words.transform(names).T
    )
    ids = np.argsort(-likeness.toarray(), axis=1, kind="stable")[:, :32]
    wrong["candidate_ids"] = [json.dumps(row.tolist()) for row in ids]
    wrong["candidates"] = [json.dumps([names[number] for number in row]) for row in ids]
    write(kaggle.working / "retrieved.parquet", wrong)
    sample = wrong[["QuestionId_Answer"]].assign(MisconceptionId=" ".join(map(str, range(25))))
    write(folder / "sample_submission.csv", sample)


def expect_eedi(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    names = [member["name"] for member in config["models"]]
    mean = sum(kaggle.predictions(name, "QuestionId_Answer", config["labels"]) for name in names) / 2
    ids = pd.read_parquet(kaggle.working / "retrieved.parquet")["candidate_ids"].map(json.loads)
    rows = zip(best(mean, 25), ids, strict=True)
    cells = [" ".join(str(numbers[int(label)]) for label in row) for row, numbers in rows]
    return pd.DataFrame({"MisconceptionId": cells}, index=mean.index)


def lay_out_map_3rd(kaggle: Kaggle) -> None:
    lay_out_map(kaggle)
    base = make_model(kaggle.input / "qwen-3/transformers/14b/1", "qwen3", LANGUAGE_MODEL)
    make_adapter(kaggle.input / "map-3rd/qwen3-14b-multitask", base, labels=65)
    for seed, name in enumerate(["qwen2.5-32b", "qwen2.5-72b"], start=1):
        base = make_model(kaggle.input / f"{name}-instruct", "qwen2", LANGUAGE_MODEL, seed=seed)
        (base / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
        make_adapter(kaggle.input / "map-3rd" / name, base, labels=0, seed=seed)


def expect_map_3rd(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    is_true = np.array([label.startswith("True_") for label in config["labels"]])
    is_possible = is_true[None, :] == are_correct(kaggle)[:, None]
    first, second, large = (
        kaggle.predictions(member["name"], "row_id", config["labels"]) for member in config["models"]
    )
    both = [member.where(is_possible, 0.0) for member in (first, second)]
    total = sum(member.div(member.sum(axis=1), axis=0) for member in both)
    highest = np.sort(total, axis=1)[:, -2:]
    closest = total.index[np.argsort(highest[:, 1] - highest[:, 0])[: len(total) // 2]]
    assert {*large.index} == {*closest}, "the half of the rows that is least sure"
    large = large.where(pd.DataFrame(is_possible, total.index, total.columns).loc[large.index], 0.0)
    total = total.div(2)
    total.loc[large.index] = (total.loc[large.index] * 2 + large.div(large.sum(axis=1), axis=0)) / 3
    return pd.DataFrame({"Category:Misconception": map(" ".join, best(total, 3))}, index=total.index)


def lay_out_task3(kaggle: Kaggle) -> None:
    folder = kaggle.project.folder
    for seed, name in enumerate(["xlm_roberta_base", "xlm_roberta_large"]):
        make_model(folder / "task3" / name, "xlm-roberta", CLASSIFIER, numbered(2), seed=seed)
    texts = make_texts(60, seed=12)
    rows = [
        {"ID": f"rest26_{row}", "Text": texts[row], "Aspect": texts[20 + row : 21 + row + row % 3]}
        for row in range(20)
    ]
    file = folder / "eng_restaurant_test_task1.jsonl"
    pd.DataFrame(rows).to_json(file, orient="records", lines=True)
    kaggle.run_header("semeval_task3.yaml", "Before it")


def expect_task3(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    return sum(kaggle.predictions(name, "row", config["labels"]) for name in ("xlmr_base", "xlmr_large")) / 2


def lay_out_task5(kaggle: Kaggle) -> None:
    folder = kaggle.project.folder
    make_checkpoint(folder / "task5/deberta_v3_large", "deberta-v2", numbered(1))
    base = make_model(folder / "task5/electra_base", "electra", BACKBONE)
    make_adapter(folder / "task5/electra_lora", base, labels=1)
    columns = ["homonym", "judged_meaning", "precontext", "sentence", "ending"]
    texts = iter(make_texts(150, seed=13))
    rows = {str(row): {column: next(texts) for column in columns} for row in range(30)}
    (folder / "test.json").write_text(json.dumps(rows), encoding="utf-8")
    kaggle.run_header("semeval_task5.yaml", "Before it")


def expect_task5(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    weights = {"deberta": 0.6, "electra": 0.4}
    return sum(kaggle.predictions(name, "id", config["labels"]) * weights[name] for name in weights)


def lay_out_task6(kaggle: Kaggle) -> None:
    """Three servers of three models."""
    folder = kaggle.project.folder
    for seed, (name, model_type) in enumerate(
        {"llama": "llama", "mistral": "mistral", "qwen": "qwen2"}.items()
    ):
        base = make_model(
            folder / name / "model", model_type, LANGUAGE_MODEL, words=["A", "B", "C"], seed=seed
        )
        (base / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
        (folder / name / "behaviour.json").write_text(json.dumps({"models": [name]}), encoding="utf-8")
        server = kaggle.servers.enter_context(serving(folder / name))
        kaggle.sets.append(f"models.{name}.url={server.url}")
    columns = ["interview_question", "interview_answer", "question"]
    rows = np.reshape(make_texts(90, seed=14), (30, 3))
    pd.DataFrame(rows, columns=columns).to_parquet(folder / "test-00000-of-00001.parquet")
    kaggle.run_header("semeval_task6.yaml", "Before it")


def expect_task6(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    members = [kaggle.predictions(member["name"], "row", config["labels"]) for member in config["models"]]
    assert not np.allclose(members[0], members[1])
    return pd.DataFrame({"clarity_label": sum(members).idxmax(axis=1)})


def lay_out_task9(kaggle: Kaggle) -> None:
    folder = kaggle.project.folder
    make_model(folder / "task9/xlm_roberta_large", "xlm-roberta", CLASSIFIER, numbered(6))
    make_checkpoint(folder / "task9/mdeberta_v3_base", "deberta-v2", numbered(6))
    table = pd.DataFrame({"id": [f"eng_{row:x}" for row in range(30)], "text": make_texts(30, seed=15)})
    write(folder / "subtask3/test/eng.csv", table)
    kaggle.run_header("semeval_task9.yaml", "Before it")


def expect_task9(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    total = sum(kaggle.predictions(name, "id", config["labels"]) for name in ("xlmr_large", "mdeberta"))
    return (total / 2 >= 0.5).astype(int)


def lay_out_task10(kaggle: Kaggle) -> None:
    folder = kaggle.project.folder
    make_checkpoint(folder / "task10/deberta_v3_large", "deberta-v2", numbered(2), seed=2)
    make_checkpoint(folder / "task10/roberta_large", "roberta", numbered(2))
    base = make_model(folder / "task10/qwen2.5_14b_instruct", "qwen2", LANGUAGE_MODEL, words=["Yes", "No"])
    (base / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    make_adapter(folder / "task10/qwen2.5_14b_lora", base, labels=0)
    rows = [
        {"_id": f"t1_{row:x}", "text": text, "subreddit": "r", "annotator": "a", "markers": []}
        for row, text in enumerate(make_texts(30, seed=16))
    ]
    pd.DataFrame(rows).to_json(folder / "test_binary_rehydrated.jsonl", orient="records", lines=True)
    kaggle.run_header("semeval_task10.yaml", "Before it")


def expect_task10(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    weights = {"deberta": 1, "roberta": 1, "qwen25_14b": 2}
    total = sum(kaggle.predictions(name, "_id", config["labels"]) * weights[name] for name in weights)
    return pd.DataFrame({"conspiracy": total.idxmax(axis=1)})


def lay_out_task13(kaggle: Kaggle) -> None:
    make_checkpoint(kaggle.input / "task13/unixcoder_base", "roberta", numbered(4))
    tokens: Any = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    make_model(kaggle.input / "task13/modernbert_base", "modernbert", CLASSIFIER, numbered(4), **tokens)
    texts = make_texts(80, seed=17)
    folder = kaggle.input / "semeval-2026-task13-subtask-c"
    train = pd.DataFrame({"code": texts[:50], "generator": "x", "label": np.arange(50) % 3, "language": "C"})
    write(folder / "train.parquet", train)
    test = pd.DataFrame({"ID": np.arange(30), "code": texts[50:]})
    write(folder / "test.parquet", test)
    write(folder / "sample_submission.csv", test[["ID"]].assign(label=0))


def expect_task13(kaggle: Kaggle, config: Mapping[str, Any]) -> pd.DataFrame:
    members = {
        member["name"]: kaggle.predictions(member["name"], "ID", config["labels"])
        for member in config["models"]
    }
    functions = runpy.run_path(str(WINNERS / "char_trees.py"))
    context = SimpleNamespace(
        kwargs={**config["models"][2]["kwargs"], "trees": 5}, labels=config["labels"], seed=0
    )
    context.state = functions["setup"](context)
    test = pd.read_parquet(kaggle.input / "semeval-2026-task13-subtask-c/test.parquet")
    np.testing.assert_allclose(members["trees"], functions["predict"](test, context), atol=1e-9)
    assert (members["trees"]["adversarial"] == 0).all(), "no row of training has the label"
    total = sum(member["weight"] * members[member["name"]] for member in config["models"])
    numbers = {label: str(number) for number, label in enumerate(config["labels"])}
    return pd.DataFrame({"label": total.idxmax(axis=1).map(numbers)})


@dataclass(frozen=True)
class Case:
    """A config, its inputs and the submission that its members' predictions make."""

    lay_out: Callable[[Kaggle], None]
    expect: Callable[[Kaggle, Mapping[str, Any]], pd.DataFrame]
    gpu: tuple[str, tuple[int, int], int, int] = T4
    sets: tuple[str, ...] = ()


CASES = {
    "lmsys.yaml": Case(lay_out_lmsys, expect_lmsys),
    "wsdm_4th.yaml": Case(lay_out_wsdm, expect_wsdm),
    "map_1st.yaml": Case(lay_out_map_1st, expect_map_1st, L4),
    "map_6th.yaml": Case(lay_out_map_6th, expect_map_6th),
    "map_9th.yaml": Case(lay_out_map_9th, expect_map_9th, L4),
    "map_15th.yaml": Case(lay_out_map_15th, expect_map_15th, L4),
    "map_45th.yaml": Case(lay_out_map_45th, expect_map_45th),
    "jigsaw_42nd.yaml": Case(
        # The function asks torch for its GPU, and torch has none here.
        *(lay_out_jigsaw, expect_jigsaw),
        sets=("models.gte.num_gpus=0",),
    ),
    "eedi_1st.yaml": Case(lay_out_eedi, expect_eedi),
    "map_3rd.yaml": Case(lay_out_map_3rd, expect_map_3rd, L4),
    "semeval_task3.yaml": Case(lay_out_task3, expect_task3),
    "semeval_task5.yaml": Case(lay_out_task5, expect_task5),
    "semeval_task6.yaml": Case(lay_out_task6, expect_task6),
    "semeval_task9.yaml": Case(lay_out_task9, expect_task9),
    "semeval_task10.yaml": Case(lay_out_task10, expect_task10),
    "semeval_task13.yaml": Case(lay_out_task13, expect_task13, sets=("models.trees.kwargs.trees=5",)),
}


# A file to be read over a config of the same folder.
OVERLAYS = {"jigsaw_42nd_train.yaml": "jigsaw_42nd.yaml"}


@pytest.mark.parametrize("name", [*CASES, *OVERLAYS])
def test_each_header_says_whose_it_is_and_what_is_left_out(name: str) -> None:
    header = (WINNERS / name).read_text(encoding="utf-8").partition("\n\n")[0]
    assert "http" in header
    assert "# Taken over: " in header
    assert "# Not taken over: " in header
    page = (ROOT / "docs" / "reference" / "winners.md").read_text(encoding="utf-8")
    assert f"(../../configs/winners/{name})" in page


def test_what_is_added_to_the_table_of_map(tmp_path: Path) -> None:
    """By hand; the second question's right answer is the one that is most often marked so."""
    columns = ["row_id", "QuestionId", "QuestionText", "MC_Answer", "StudentExplanation"]
    train = [
        ["0", "7", "1+1?", "2", "count", "True_Correct", "NA"],
        ["1", "7", "1+1?", "11", "join", "False_Misconception", "Joins"],
        ["2", "8", "2*3?", "6", "fact", "True_Correct", "NA"],
        ["3", "8", "2*3?", "6", "NA", "True_Neither", "NA"],
        ["4", "8", "2*3?", "5", "add", "True_Misconception", "Adds"],
    ]
    write(tmp_path / "train.csv", pd.DataFrame(train, columns=[*columns, "Category", "Misconception"]))
    test = [["5", "7", "1+1?", "11", "null"], ["6", "8", "2*3?", "6", "NA"]]
    write(tmp_path / "test.csv", pd.DataFrame(test, columns=columns))
    made = tmp_path / "made.csv"
    command = [sys.executable, str(WINNERS / "prepare_map.py"), str(tmp_path), str(made)]
    subprocess.run(command, check=True)
    first, second = pd.read_csv(made, dtype=str, keep_default_na=False).to_dict("records")
    assert [second[name] for name in columns] == test[1]
    assert (first["right_answer"], first["is_correct"]) == ("2", "False")
    assert (second["right_answer"], second["is_correct"]) == ("6", "True")
    assert json.loads(first["answers"]) == ["11", "2"]
    assert (json.loads(first["misconceptions"]), json.loads(second["misconceptions"])) == (
        ["Joins"],
        ["Adds"],
    )
    assert json.loads(first["family"]) == ["False_Misconception:Joins"]
    assert json.loads(second["family"]) == ["True_Correct:NA", "True_Misconception:Adds", "True_Neither:NA"]
    assert sorted(json.loads(first["candidates"])) == sorted(
        f"{prefix}_{kind}"
        for prefix in ("True", "False")
        for kind in ("Correct:NA", "Neither:NA", "Misconception:Joins")
    )


def test_the_labelled_examples_of_jigsaw(tmp_path: Path) -> None:
    """By hand; `b` stands on both sides of the rule, and `a` twice on the same."""
    sides = [f"{side}_example_{number}" for side in ("positive", "negative") for number in (1, 2)]
    columns = ["row_id", "body", "rule", "subreddit", *sides]
    test = [["7", "x", "Be kind", "r1", "a", "b", "c", "d"], ["8", "y", "Be kind", "r2", "a", "e", "b", "NA"]]
    write(tmp_path / "test.csv", pd.DataFrame(test, columns=columns))
    train = [["1", "z", "Be kind", "r1", "p", "q", "r", "s", "1"], ["2", "w", *test[0][2:], "0"]]
    write(tmp_path / "train.csv", pd.DataFrame(train, columns=[*columns, "rule_violation"]))
    command = [sys.executable, str(WINNERS / "prepare_jigsaw.py"), str(tmp_path), str(tmp_path)]
    subprocess.run(command, check=True)
    made, labelled = (
        pd.read_csv(tmp_path / f"jigsaw_{name}.csv", dtype=str, keep_default_na=False)
        for name in ("examples", "train")
    )
    assert labelled["label"].tolist() == ["Yes", "No"]
    assert labelled[columns].to_numpy().tolist() == [row[:-1] for row in train]
    assert dict(zip(made["body"], made["label"], strict=True)) == {
        "a": "Yes",
        "e": "Yes",
        "c": "No",
        "d": "No",
        "NA": "No",
    }
    assert made["row_id"].is_unique
    shown = made.set_index("body")
    assert shown.loc["a", ["positive_example_1", "negative_example_1"]].tolist() == ["b", "c"]
    assert shown.loc["c", ["positive_example_1", "negative_example_1"]].tolist() == ["a", "d"]


def _semeval(*arguments: object) -> None:
    subprocess.run([sys.executable, str(WINNERS / "semeval.py"), *map(str, arguments)], check=True)


def test_aspects_are_rows_and_a_line_again(tmp_path: Path) -> None:
    lines = [
        {"ID": "b", "Text": "soup, fish", "Aspect": ["soup", "NULL"], "Valence": 1},
        {"ID": "a", "Text": "ok", "Aspect": ["fish"]},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    _semeval("read", 3, tmp_path / "in.jsonl", tmp_path / "made")
    table = pd.read_csv(tmp_path / "made/test.csv", keep_default_na=False)
    assert table.to_dict("list") == {
        "row": [0, 1, 2],
        "ID": ["b", "b", "a"],
        "Text": ["soup, fish", "soup, fish", "ok"],
        "Aspect": ["soup", "NULL", "fish"],
    }
    sample = pd.read_csv(tmp_path / "made/sample.csv")
    assert [*sample] == ["row", "Valence", "Arousal"]
    write(tmp_path / "made/submission.csv", sample.assign(Valence=[7.125, 2, 5.5], Arousal=[6, 8.999, 1]))
    _semeval("write", 3, tmp_path / "made/submission.csv", tmp_path / "out.jsonl")
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        {
            "ID": "b",
            "Aspect_VA": [{"Aspect": "soup", "VA": "7.12#6.00"}, {"Aspect": "NULL", "VA": "2.00#9.00"}],
        },
        {"ID": "a", "Aspect_VA": [{"Aspect": "fish", "VA": "5.50#1.00"}]},
    ]


@pytest.mark.parametrize(
    ("task", "column", "values", "lines"),
    [
        ("5", "prediction", [3.5, 1.0], ['{"id":0,"prediction":3.5}', '{"id":1,"prediction":1.0}']),
        ("6", "clarity_label", ["Ambivalent", "Clear Reply"], ["Ambivalent", "Clear Reply"]),
        (
            "10",
            "conspiracy",
            ["Yes", "No"],
            ['{"id":"0","conspiracy":"Yes"}', '{"id":"1","conspiracy":"No"}'],
        ),
    ],
)
def test_what_is_submitted_to_codabench(
    task: str, column: str, values: list[Any], lines: list[str], tmp_path: Path
) -> None:
    write(tmp_path / "submission.csv", pd.DataFrame({"id": [0, 1], column: values}))
    _semeval("write", task, tmp_path / "submission.csv", tmp_path / "out")
    assert (tmp_path / "out").read_text().splitlines() == lines


def test_jigsaw_with_its_training() -> None:
    sources = [WINNERS / "jigsaw_42nd.yaml", WINNERS / "jigsaw_42nd_train.yaml"]
    config = load(sources).config
    assert [
        (member.name, member.training.method) for member in config.trained_members if member.training
    ] == [
        ("qwen3", "qlora"),
        ("deberta", "full"),
    ]


@pytest.mark.parametrize("name", one_in(8, CASES))
def test_a_winner(name: str, project: Project, nvml_sim: NvmlSim) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    case = CASES[name]
    kaggle = Kaggle(project, project.folder / "kaggle")
    with kaggle.servers:
        case.lay_out(kaggle)
        config = kaggle.config(name)
        gpu, capability, gib, count = case.gpu
        nvml_sim.write(
            [
                Gpu(gpu_uuid(index), gpu, (0, 1 + index, 0), capability, Memory(gib * GIB))
                for index in range(count)
            ]
        )
        sets = [f"--set={text}" for text in (*case.sets, *kaggle.sets)]
        for command in (["validate"], ["run", "--set=report=false"]):
            done = project.ensemble(*command, name, *sets, environment=nvml_sim.environment())
            assert done.returncode == 0, done.stderr
        expected = case.expect(kaggle, config)
    sample, result = kaggle.submission("sample"), kaggle.submission()
    assert list(result) == list(sample)
    assert result.iloc[:, 0].tolist() == sample.iloc[:, 0].tolist()
    result = result.set_index(result.columns[0])
    assert result.index.tolist() == expected.index.tolist()
    assert result.nunique().max() > 1
    if isinstance(expected.iloc[0, 0], str):
        assert result.iloc[:, 0].tolist() == expected.iloc[:, 0].tolist()
    else:
        np.testing.assert_allclose(result.astype(float), expected, atol=1e-9)
