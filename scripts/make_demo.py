#!/usr/bin/env python3
"""Rebuild everything under `demo/` from WordNet: its tables, its pictures and its small trained models.

    apt-get install wordnet-base
    python scripts/make_demo.py

The task is to name the topic of a noun from its gloss. The members are real `transformers`
checkpoints, small enough for the repository: two classifiers, a Gemma-2 and a Llama, and a SmolLM3 that
is a causal language model, each with a byte-level BPE tokenizer of its own. They differ where members of
an ensemble differ in practice (architecture, vocabulary, letter case, pad token, order of the labels),
so that the demo meets those cases. A classifier of pictures and its pictures are in `demo_pictures.py`;
the head under `demo/heads/` is `train_pooled_head.py`'s and the adapter under `demo/adapters/`, with its table,
`train_adapter.py`'s; `make demo` makes them anew behind this.

They are trained two at a time, each in a process with one thread. Seeds are fixed; floating
point makes the last digits vary between machines. Rows, scores and README are in `demo_data.py`;
torch is imported inside functions, so that importing this module stays cheap.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import resource
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo_data import (
    DEFAULT_DATA_NOUN,
    TOPICS,
    DemoDataError,
    Score,
    Split,
    Trained,
    read_source,
    readme,
    score,
    split,
    write_tables,
)
from demo_pictures import picture_probabilities, train_pictures, write_pictures

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor
    from torch.nn import Linear, Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedModel

DEMO = Path(__file__).resolve().parent.parent / "demo"

LAYERS = 2
EPOCHS = 4
LEARNING_RATE = 3e-3
MAX_LENGTH = 128  # tokens, special ones included; a handful of training glosses are longer
TOKENS_PER_BATCH = 2048
ROWS_PER_BATCH = 146  # what a batch of glosses holds on average: the constant that scales the loss
WEIGHT_DECAY = 0.05
EMBEDDING_DROPOUT = 0.2
TOKEN_DROPOUT = 0.15
BLOCK_DROPOUT = 0.1
TEXT_WEIGHT = 0.2  # of a causal language model's mean loss over the prompt's own tokens, beside the label's
AVERAGE_DECAY = 0.998


@dataclass(frozen=True)
class Recipe:
    """What sets one member apart from the other."""

    name: str
    labels: tuple[str, ...]
    vocab_size: int
    lowercase: bool
    bos_token: str | None
    eos_token: str
    pad_token: str | None
    seed: int
    hidden_size: int = 128
    # A causal language model reads it behind the text, and then the label as a token; None: a classifier.
    question: str | None = None

    @property
    def special_tokens(self) -> list[str]:
        """In the order of their ids."""
        tokens = (self.pad_token, self.eos_token, self.bos_token)
        return [*dict.fromkeys(token for token in tokens if token)]

    def prompt(self, text: str) -> str:
        """What the member reads of a text."""
        return text + (self.question or "")


RECIPES = (
    Recipe(
        name="gemma2",
        labels=tuple(sorted(TOPICS.values())),
        vocab_size=10000,
        lowercase=False,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        seed=1,
    ),
    Recipe(
        name="llama",
        # Another order on purpose: members must be merged by the name of a label, not its index.
        labels=tuple(sorted(TOPICS.values(), key=lambda topic: (len(topic), topic))),
        vocab_size=12000,
        lowercase=True,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        pad_token=None,  # as in Llama-3
        seed=2,
    ),
    Recipe(
        name="smollm3",
        labels=tuple(sorted(TOPICS.values())),
        vocab_size=4000,
        lowercase=True,
        bos_token=None,  # as in SmolLM3
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        seed=3,
        hidden_size=96,
        question=" Topic:",
    ),
)


def train_tokenizer(recipe: Recipe, texts: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer, of a classifier one that puts bos and eos around a plain text by itself.

    The eos is the token that is pooled: the same for every row, it has nothing to do but collect. A
    causal language model's adds nothing, and each label behind the question is one token.
    """
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if recipe.lowercase else [])]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=recipe.special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    if recipe.question:
        asked = [recipe.prompt("") + f" {label}" for label in recipe.labels]
        texts = [*texts, *asked * 1000]
    tokenizer.train_from_iterator(texts, trainer)
    if recipe.bos_token:
        ends = (recipe.bos_token, recipe.eos_token)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="{} $A {}".format(*ends),
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in ends],
        )
    tokenizer.enable_truncation(MAX_LENGTH, direction="left" if recipe.question else "right")
    return tokenizer


def new_model(recipe: Recipe) -> PreTrainedModel:
    """An untrained model of the recipe's architecture."""
    import transformers

    ids = {token: index for index, token in enumerate(recipe.special_tokens)}
    common: dict[str, Any] = {
        "vocab_size": recipe.vocab_size,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": 2 * recipe.hidden_size,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2 * MAX_LENGTH,
        "use_cache": False,
        "bos_token_id": ids[recipe.bos_token] if recipe.bos_token else None,
        "eos_token_id": ids[recipe.eos_token],
        "pad_token_id": ids[recipe.pad_token] if recipe.pad_token else None,
    }
    if recipe.question:
        return transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**common, tie_word_embeddings=True))
    common |= {
        "head_dim": 32,
        "id2label": dict(enumerate(recipe.labels)),
        "label2id": {label: index for index, label in enumerate(recipe.labels)},
    }
    if recipe.name == "llama":
        return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**common))
    config = transformers.Gemma2Config(
        **common,
        query_pre_attn_scalar=32,
        sliding_window=64,  # half of MAX_LENGTH, so that it does something
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        attn_implementation="eager",  # soft-capping rules out the fused kinds
    )
    return transformers.Gemma2ForSequenceClassification(config)


def add_dropout(model: PreTrainedModel) -> None:
    """Dropout that these architectures lack, as hooks: only in training, not in the checkpoint."""
    import torch
    from torch.nn import functional

    def embeddings(module: Module, _inputs: object, output: Tensor) -> Tensor:
        if not module.training:
            return output
        keep = torch.rand(output.shape[:2]) >= TOKEN_DROPOUT
        keep[:, -1] = True  # the one that is read
        return functional.dropout(output, EMBEDDING_DROPOUT) * keep.unsqueeze(-1)

    def block(module: Module, _inputs: object, output: Tensor) -> Tensor:
        return functional.dropout(output, BLOCK_DROPOUT, module.training)

    def pooled(module: Module, _inputs: object, output: Tensor) -> Tensor:
        return functional.dropout(output, EMBEDDING_DROPOUT, module.training)

    model.get_input_embeddings().register_forward_hook(embeddings)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(block)
    model.model.norm.register_forward_hook(pooled)


def equal_length_batches(rows: Sequence[Sequence[int]], shuffle: random.Random) -> list[list[int]]:
    """Indices of rows, each batch of ONE length: no padding, so the last token is the pooled one.

    That is what a model sees when rows come one at a time, and it suits a member without a pad
    token. The number of batches does not depend on the shuffle.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_length[len(row)].append(index)
    batches = []
    for length, indices in by_length.items():
        shuffle.shuffle(indices)
        size = max(1, TOKENS_PER_BATCH // length)
        batches += [indices[start : start + size] for start in range(0, len(indices), size)]
    shuffle.shuffle(batches)
    return batches


def head(model: PreTrainedModel) -> Linear:
    """What makes logits of hidden states: over the labels, or over a causal language model's vocabulary."""
    found: Linear = model.score if hasattr(model, "score") else model.lm_head
    return found


def forward(model: PreTrainedModel, rows: Sequence[Sequence[int]], batch: Sequence[int]) -> Tensor:
    """Hidden states of rows of one length, without the model's own pooling, which wants a pad token."""
    import torch

    inputs = torch.tensor([rows[index] for index in batch])
    hidden: Tensor = model.model(input_ids=inputs).last_hidden_state
    return hidden


def predict(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Logits of all rows behind their last token, in their order."""
    import torch

    model.eval()
    logits = torch.zeros(len(rows), head(model).out_features)
    with torch.inference_mode():
        for batch in equal_length_batches(rows, random.Random(0)):
            logits[batch] = head(model)(forward(model, rows, batch)[:, -1])
    return logits


def best_temperature(logits: Tensor, targets: Tensor) -> tuple[float, float]:
    """The lowest validation log loss and the temperature that gives it, by trying a grid."""
    from torch.nn import functional

    grid = [0.50 + 0.01 * step for step in range(151)]
    return min((functional.cross_entropy(logits / t, targets).item(), t) for t in grid)


def new_optimizer(model: PreTrainedModel, steps: int) -> tuple[Optimizer, LRScheduler]:
    """AdamW, which leaves the norms undecayed, and one cycle of the learning rate."""
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import OneCycleLR

    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))
    return optimizer, OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.15)


def train_member(recipe: Recipe, data: Split, directory: Path) -> Trained:
    """Train one member, calibrate it on the validation rows, save it; runs in its own process."""
    import torch
    from torch.nn import functional
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    started = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    shuffle = random.Random(recipe.seed)
    tokenizer = train_tokenizer(recipe, [gloss.text for gloss in data.train])
    label_ids = {label: index for index, label in enumerate(recipe.labels)}
    if recipe.question:
        label_ids = {label: tokenizer.encode(f"{recipe.question} {label}").ids[-1] for label in recipe.labels}

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch([*map(recipe.prompt, texts)])]

    # The words of a training synset are a second, short text of its topic. They teach the rarer
    # words, which glosses use to explain each other; words of held-out synsets are not given.
    rows = encode([gloss.text for gloss in data.train])
    rows += encode([", ".join(gloss.words) for gloss in data.train])
    targets = [label_ids[gloss.topic] for gloss in data.train] * 2
    validation_rows = encode([gloss.text for gloss in data.validation])
    validation_targets = torch.tensor([label_ids[gloss.topic] for gloss in data.validation])

    model = new_model(recipe)
    add_dropout(model)
    averaging = get_ema_multi_avg_fn(AVERAGE_DECAY)  # type: ignore[no-untyped-call]
    averaged = AveragedModel(model, multi_avg_fn=averaging)
    steps = EPOCHS * len(equal_length_batches(rows, shuffle))
    optimizer, schedule = new_optimizer(model, steps)
    best = (math.inf, 1.0, 0)
    best_state: dict[str, Tensor] = {}
    for epoch in range(1, EPOCHS + 1):
        model.train()
        for batch in equal_length_batches(rows, shuffle):
            wanted = torch.tensor([targets[index] for index in batch])
            hidden = forward(model, rows, batch)
            # A sum over a constant, not a mean: a row counts the same in batches of any size.
            loss = functional.cross_entropy(head(model)(hidden[:, -1]), wanted, reduction="sum")
            if recipe.question:
                some = -(-len(batch) // 4)  # a quarter: logits over the vocabulary are most of the work
                following = torch.tensor([rows[index][1:] for index in batch[:some]])
                text_logits = head(model)(hidden[:some, :-1]).flatten(0, 1)
                text_loss = functional.cross_entropy(text_logits, following.flatten())
                loss += TEXT_WEIGHT * len(batch) * text_loss
            optimizer.zero_grad()
            (loss / ROWS_PER_BATCH).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            averaged.update_parameters(model)
        found = best_temperature(predict(averaged.module, validation_rows), validation_targets)
        if found < best[:2]:
            best = (*found, epoch)
            best_state = {key: value.clone() for key, value in averaged.module.state_dict().items()}
        print(
            f"{recipe.name}: epoch {epoch} of {EPOCHS}, validation log loss {found[0]:.4f} "
            f"at temperature {found[1]:.2f}, {time.monotonic() - started:.0f} s",
            flush=True,
        )
    model.load_state_dict(best_state)
    with torch.no_grad():
        # Neither the head nor the norm before it has a bias: this divides the logits.
        (model.model.norm if recipe.question else model.score).weight /= best[1]
    save(recipe, model, tokenizer, directory)
    return Trained(
        name=recipe.name,
        architecture=type(model).__name__,
        tokenizer=f"{'lowercase' if recipe.lowercase else 'cased'} vocabulary of "
        f"{recipe.vocab_size:,}, {'a' if recipe.pad_token else 'no'} pad token",
        parameters=sum(p.numel() for p in model.parameters()),
        epoch=best[2],
        validation_loss=best[0],
        temperature=best[1],
    )


def save(recipe: Recipe, model: PreTrainedModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a checkpoint, small for the repository: float16 weights, a compact tokenizer.json."""
    import torch
    from transformers import PreTrainedTokenizerFast

    shutil.rmtree(directory, ignore_errors=True)
    model.to(torch.float16).save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # it is written for its owner's eyes only
    tokenizer.no_truncation()  # the caller's choice at inference
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=recipe.bos_token,
        eos_token=recipe.eos_token,
        pad_token=recipe.pad_token,
        model_max_length=2 * MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    compact = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    path.write_text(compact + "\n", encoding="utf-8")
    # transformers 5 writes a class name that transformers 4 does not know; both know this one.
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def member_probabilities(directory: Path, texts: Sequence[str]) -> Iterator[dict[str, float]]:
    """What a saved classifier says, through plain transformers, one row at a time in float32."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    for text in texts:
        encoded = tokenizer(text, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
        with torch.inference_mode():
            probabilities = model(**encoded).logits.softmax(-1)[0].tolist()
        yield {model.config.id2label[index]: p for index, p in enumerate(probabilities)}


def label_probabilities(recipe: Recipe, directory: Path, texts: Sequence[str]) -> Iterator[dict[str, float]]:
    """The same of a saved causal language model, from the logits of the labels' tokens behind the question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = [tokenizer(f"{recipe.question} {label}")["input_ids"][-1] for label in recipe.labels]
    for text in texts:
        encoded = tokenizer(recipe.prompt(text), return_tensors="pt")
        with torch.inference_mode():
            logits = model(**encoded).logits[0, -1]
        yield dict(zip(recipe.labels, logits[tokens].softmax(-1).tolist(), strict=True))


def evaluate(data: Split, models: Path) -> list[Score]:
    """Score the class prior, each member and the mean of the two text classifiers on the test rows."""
    topics = sorted(TOPICS.values())
    truth = [gloss.topic for gloss in data.test]
    texts = [gloss.text for gloss in data.test]
    counts = {topic: sum(gloss.topic == topic for gloss in data.train) for topic in topics}
    prior = {topic: count / len(data.train) for topic, count in counts.items()}
    tables = {"class prior": [prior] * len(truth)}
    for recipe in RECIPES:
        directory = models / recipe.name
        if recipe.question:
            tables[recipe.name] = list(label_probabilities(recipe, directory, texts))
        else:
            tables[recipe.name] = list(member_probabilities(directory, texts))
    tables["vit"] = list(picture_probabilities(models / "vit", texts))
    classifiers = [tables[recipe.name] for recipe in RECIPES if not recipe.question]
    tables["mean of gemma2 and llama"] = [
        {topic: sum(row[topic] for row in rows) / len(rows) for topic in topics}
        for rows in zip(*classifiers, strict=True)
    ]
    return [score(name, table, truth) for name, table in tables.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Rebuild demo/ from WordNet's noun glosses.")
    parser.add_argument("--data-noun", type=Path, default=DEFAULT_DATA_NOUN, metavar="PATH")
    parser.add_argument("--output", type=Path, default=DEMO, metavar="DIR", help="default: demo/")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        glosses, notice = read_source(options.data_noun)
        data = split(glosses)
    except DemoDataError as error:
        print(f"make_demo.py: {error}", file=sys.stderr)
        return 1
    models = options.output / "models"
    models.mkdir(parents=True, exist_ok=True)
    (options.output / "LICENSE.WordNet").write_text(notice, encoding="utf-8")
    write_tables(data.train, data.test, options.output)
    write_pictures(data.test, options.output / "pictures")
    # Spawned, not forked: a forked child would share the parent's thread pools.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        jobs = [pool.submit(train_member, recipe, data, models / recipe.name) for recipe in RECIPES]
        jobs.append(pool.submit(train_pictures, data, models / "vit"))
        trained = [job.result() for job in jobs]
    scores = evaluate(data, models)
    processor_seconds = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    text = readme(data, trained, scores, processor_seconds)
    (options.output / "README.md").write_text(text, encoding="utf-8")
    for line in scores:
        print(f"{line.name:26}{line.log_loss:8.4f}{line.accuracy:8.4f}")
    size = sum(path.stat().st_size for path in models.rglob("*") if path.is_file())
    print(
        f"models: {size / 1e6:.2f} MB; {(time.monotonic() - started) / 60:.1f} minutes, "
        f"{processor_seconds / 60:.1f} of processor time"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
