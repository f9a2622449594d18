"""Tiny checkpoints, damaged in hundreds of ways: refused with a sentence, or the numbers of the intact one.

What neither names nor shapes of tensors reveal stands in ``UNSEEN``, with docs/explanation/numbers.md.  All damages
of one architecture run in one process, through what ``validate`` and a worker run.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.common.errors import CheckpointError
from tests import sampling
from tests.checkpoints import inspect_folder, make_adapter, make_base, make_checkpoint, make_texts
from tests.members.huggingface.scoring.test_predict import LABELS, predictor, worker_spec
from tests.project import ROOT
from tests.sampling import EXAMPLES, SAMPLED
from tests.worker.test_session import publish

pytestmark = pytest.mark.filterwarnings("ignore")
DOCS = ROOT / "docs" / "explanation" / "numbers.md"
# Without ENSEMBLE_TEST_EXAMPLES: one damage of so many, always the same ones, and those that people really had.
ONE_OF = 1 if EXAMPLES else 8 * (SAMPLED if sampling.part == "usual" else 1)
USUAL = (
    "tokenizer.json gone",
    "tokenizer_config.json gone",
    "num_hidden_layers is",
    "n_layer is",
    "tokenizer_class By",
)
LEARNT_POSITIONS = ("bert", "roberta", "gpt2")
ARCHITECTURES = ("gemma2", "llama", "bert", "deberta-v2", "roberta", "gpt2")
CLASSES = (
    *(
        "BertTokenizer",
        "GPT2Tokenizer",
        "LlamaTokenizer",
        "RobertaTokenizer",
        "GemmaTokenizer",
        "T5Tokenizer",
    ),
    *(
        "DebertaV2Tokenizer",
        "XLMRobertaTokenizer",
        "Qwen2Tokenizer",
        "ByT5Tokenizer",
        "CanineTokenizer",
        "NoSuch",
    ),
)
# Keys of config.json that change numbers and that no file gives away; docs/explanation/numbers.md names each.
UNSEEN = {
    *("num_attention_heads", "n_head", "layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps"),
    *(
        "rope_parameters",
        "sliding_window",
        "layer_types",
        "max_relative_positions",
        "pos_att_type",
        "is_decoder",
    ),
    *(
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
    ),
    *("hidden_act", "hidden_activation", "activation_function", "pooler_hidden_act", "pad_token_id"),
}
# Of an adapter_config.json.
UNSEEN_OF_ADAPTERS = {"lora_alpha", "use_rslora"}


@dataclass(frozen=True)
class Damage:
    name: str
    harm: Callable[[Path], None]
    unseen: bool = False


def damages(folder: Path, architecture: str) -> Iterator[Damage]:
    """All ways to harm what lies in a folder that ``save_pretrained`` of a model and its tokenizer wrote."""
    for path in sorted(folder.iterdir()):
        yield from file_damages(path.name)
    yield from tensor_damages(folder / "model.safetensors")
    unseen = UNSEEN | (set() if architecture in LEARNT_POSITIONS else {"max_position_embeddings"})
    yield from config_damages(folder / "config.json", unseen)
    for kind in CLASSES:
        yield Damage(f"tokenizer_class {kind}", edit("tokenizer_config.json", {"tokenizer_class": kind}))


def sample(result: Iterator[Damage], first: int) -> list[Damage]:
    """Those of the usual run: other ones for each architecture."""
    return [
        damage
        for index, damage in enumerate(result)
        if index % ONE_OF == first % ONE_OF or damage.name.startswith(USUAL)
    ]


def file_damages(name: str) -> Iterator[Damage]:
    yield Damage(f"{name} gone", lambda folder: (folder / name).unlink())
    for share in (0.0, 0.5, 0.95):
        yield Damage(f"{name} cut to {share:.0%}", partial(cut, name=name, share=share))


def cut(folder: Path, name: str, share: float) -> None:
    path = folder / name
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


def tensor_damages(path: Path) -> Iterator[Damage]:
    from safetensors.numpy import load_file

    for name, values in load_file(path).items():

        def change(folder: Path, name: str = name, how: str = "") -> None:
            from safetensors.numpy import save_file

            tensors = load_file(folder / path.name)
            old = tensors.pop(name)
            if how == "renamed":
                tensors[f"{name}_"] = old
            elif how == "moved":
                tensors[re.sub(r"\.0\.", ".7.", name, count=1)] = old
            elif how:
                tensors[name] = np.ascontiguousarray(
                    {"shorter": lambda: old[:-1], "flat": lambda: old.reshape(-1)[None, :]}[how]()
                )
            save_file(tensors, folder / path.name, metadata={"format": "pt"})

        kinds = ["", "renamed", "shorter", "flat", *(["moved"] if ".0." in name else [])]
        for how in kinds:
            if how == "flat" and values.ndim == 2 and values.shape[0] == 1:
                continue
            yield Damage(f"{name} {how or 'gone'}", partial(change, how=how))


def config_damages(path: Path, unseen: set[str]) -> Iterator[Damage]:
    """Each key gone, and each number, switch and list of another value."""
    config = json.loads(path.read_text())
    for key, value in config.items():
        others: list[Any] = []
        if isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int):
            others = [value + 1, value * 2, max(1, value // 2)]
        elif isinstance(value, float):
            others = [value * 3 + 0.1]
        elif key == "id2label":
            others = [dict(list(value.items())[:-1]), {**value, "3": "more"}]
        elif isinstance(value, dict):
            numbers = {inner for inner, item in value.items() if isinstance(item, int | float)}
            others = [
                {**value, inner: value[inner] * 3 + 1} for inner in sorted(numbers) if key != "label2id"
            ]
        elif isinstance(value, list):
            others = [value[:-1], value[::-1]]
        elif "act" in key and value is not None:
            others = ["relu"]
        for other in others:
            if other != value:
                yield Damage(f"{key} is {other}", edit(path.name, {key: other}), key in unseen)
        yield Damage(f"{key} left out", edit(path.name, {}, without=key), key in unseen)


def edit(name: str, changes: dict[str, Any], without: str = "") -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        content.pop(without, None)
        (folder / name).write_text(json.dumps({**content, **changes}))

    return harm


def adapter_damages(folder: Path) -> Iterator[Damage]:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        yield from file_damages(name)
    yield from tensor_damages(folder / "adapter_model.safetensors")
    yield from config_damages(folder / "adapter_config.json", UNSEEN_OF_ADAPTERS)
    for changed in ({"target_modules": ["q_proj"]}, {"modules_to_save": None}, {"peft_type": "IA3"}):
        yield Damage(f"{changed}", edit("adapter_config.json", changed))


class Trial:
    """Runs a damaged copy as ``validate`` and a worker would."""

    def __init__(self, folder: Path, base: Path, adapter: Path | None = None) -> None:
        self.base = base
        self.adapter = adapter
        folder.mkdir()
        self.copy = folder / "copy"
        self.texts = make_texts(12, seed=3)
        self.places = publish(folder, {"text": self.texts})

    def values(self, base: Path, adapter: Path | None) -> np.ndarray:
        """Logits of the texts; [rows, labels].

        Raises:
            CheckpointError, ValueError, OSError: refused.
        """
        name = None if adapter is None else str(adapter)
        label_map = {} if adapter is None else MAP
        checkpoint = inspect_folder(base, LABELS, label_map, adapter_name_or_path=name)
        changes = {"label_order": checkpoint.label_order, "activation": checkpoint.activation}
        member = predictor(
            worker_spec(base, adapter_name_or_path=name, max_length=64, **self.places, **changes)
        )
        member.load()
        encoded = member._prompts[0].encode([{"text": text} for text in self.texts])
        rows = [member._classifier.logits(encoded, np.array([row])) for row in range(len(self.texts))]
        return np.concatenate([row.numpy() for row in rows])[:, list(checkpoint.label_order)]

    def intact(self) -> np.ndarray:
        return self.values(self.base, self.adapter)

    def harmed(self, damage: Damage) -> np.ndarray:
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.adapter or self.base, self.copy)
        damage.harm(self.copy)
        return self.values(self.base, self.copy) if self.adapter else self.values(self.copy, None)


MAP = {f"LABEL_{index}": label for index, label in enumerate(LABELS)}


def verdicts(trial: Trial, result: list[Damage]) -> tuple[list[str], set[str]]:
    """What went wrong, one line a damage, and the names of those that only labels would have revealed."""
    expected = trial.intact()
    assert np.isfinite(expected).all()
    assert np.ptp(expected, axis=0).min() > 0.01, "rows that cannot be told apart would prove nothing"
    wrong, unseen = [], set()
    for damage in result:
        try:
            values = trial.harmed(damage)
        except (CheckpointError, ValueError, OSError) as error:
            text = " ".join(str(error).split())
            named = (
                trial.copy.name,
                "config",
                "tokenizer",
                "adapter",
                "attn_implementation",
                damage.name.split()[0],
            )
            if type(error) not in (CheckpointError, ValueError, OSError) or not any(
                item in text for item in named
            ):
                wrong.append(f"{damage.name}: refused as {type(error).__name__}: {text[:200]}")
            continue
        except Exception as error:
            wrong.append(f"{damage.name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if values.shape == expected.shape and np.allclose(values, expected, atol=1e-5, equal_nan=False):
            continue
        if damage.unseen:
            unseen.add(damage.name.split()[0])
        else:
            wrong.append(f"{damage.name}: other numbers, and no word")
    return wrong, unseen


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers reports every load that is not whole; and tiny matrices need no threads."""
    import torch
    import transformers

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)
    torch.set_num_threads(threads)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.fault(28)
@pytest.mark.fault(29)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_damaged_checkpoints_are_refused_or_give_the_same_numbers(architecture: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "intact", architecture, LABELS, seed=4)
    chosen = sample(damages(folder, architecture), ARCHITECTURES.index(architecture))
    wrong, _ = verdicts(Trial(tmp_path / "trial", folder), chosen)
    assert not wrong, f"{len(wrong)} of {len(chosen)}:\n" + "\n".join(wrong)


@pytest.mark.sampled
@pytest.mark.fault(28)
@pytest.mark.fault(29)
def test_damaged_adapters_are_refused_or_give_the_same_numbers(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", seed=5)
    adapter = make_adapter(tmp_path / "intact", base, 3, seed=6)
    chosen = sample(adapter_damages(adapter), 0)
    wrong, _ = verdicts(Trial(tmp_path / "trial", base, adapter), chosen)
    assert not wrong, f"{len(wrong)} of {len(chosen)}:\n" + "\n".join(wrong)


def test_what_no_file_reveals_stands_in_the_docs() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert {
        key for key in UNSEEN | UNSEEN_OF_ADAPTERS | {"max_position_embeddings"} if f"`{key}`" not in text
    } == set()
