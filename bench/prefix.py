"""Rows that begin alike, such as with examples: ``python -m bench.prefix``.

The same rows predicted by a Llama of 12.5 million random weights, as a language model, a classifier, a backbone
with a mean, and a classifier of ten choices a row: what they begin with is computed once, as a run does it, or in
every row; in turn, in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.checkpoints import DECODER, VOCABULARY
from bench.data import Writer
from bench.processes import Failed
from bench.rounds import say
from bench.sections import show
from bench.table import Spread

ROOT = Path(__file__).resolve().parents[1]
PREFIX_TOKENS, ROW_TOKENS = 300, (30, 100)
CHOICES, PROMPT_TOKENS, CHOICE_TOKENS = 10, 200, (5, 15)
FIGURES = "figures.json"
# What is measured, how many times as fast it must be, and how far probabilities may be apart.
_PARTS = {
    "language model": (2.0, 1e-4),
    "classifier": (3.0, 1e-5),
    "pooled_cls, mean": (3.0, 1e-5),
    "ten choices": (3.0, 1e-5),
}


def compare(rows: int = 500, repeats: int = 3) -> list[dict[str, object]]:
    """Seconds of predicting, tokenizing included, and the median of the rounds' ratios.

    Raises:
        Failed: the process failed, or the two ways gave other probabilities.
    """
    tables = []
    every = figures_of("bench.prefix", rows, repeats)
    for (part, (at_least, close)), figures in zip(_PARTS.items(), every, strict=True):
        say(part)
        if not figures["apart"] <= close:
            raise Failed(f"{part}: probabilities are {figures['apart']:.1e} apart")
        has_choices = part == "ten choices"
        shortest, longest = CHOICE_TOKENS if has_choices else ROW_TOKENS
        tables.append(
            {
                "member": part,
                "rows": figures["rows"],
                "tokens that they begin with": PROMPT_TOKENS if has_choices else figures["prefix"],
                "tokens a row has besides": f"{shortest} to {longest}",
                **judged(figures, ("computed once", "in every row"), at_least),
            }
        )
    return tables


def figures_of(module: str, rows: int, repeats: int) -> list[dict[str, Any]]:
    """Let a process measure a module's two ways, of one member or of several.

    Raises:
        Failed: the process failed.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="ensemble prefix ") as folder:
        command = [sys.executable, "-m", module, "--measure", folder]
        command += ["--rows", str(rows), "--repeats", str(repeats)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
        if done.returncode:
            raise Failed(f"ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
        figures: list[dict[str, Any]] = json.loads((Path(folder) / FIGURES).read_text(encoding="utf-8"))
    return figures


def judged(figures: Mapping[str, Any], ways: tuple[str, str], at_least: float) -> dict[str, object]:
    """The columns of a table: seconds of the two ways, their ratio, and whether it is large enough."""
    repeats = len(figures["seconds"][0])
    for number, (first, second) in enumerate(zip(*figures["seconds"], strict=True)):
        say(f"round {number + 1} of {repeats}: {first:.1f} s {ways[0]}, {second:.1f} s {ways[1]}")
    first, second = figures["seconds"]
    ratio = Spread.of([slow / fast for fast, slow in zip(first, second, strict=True)])
    verdict = "ok" if ratio.middle >= at_least else "MISSED"
    return {
        f"{ways[0]}, s": Spread.of(first).text(2),
        f"{ways[1]}, s": Spread.of(second).text(2),
        "times as fast": ratio.text(2),
        "at least": at_least,
        "probabilities apart": f"{figures['apart']:.0e}",
        "": "not judged" if repeats < 2 else verdict,
    }


def measure(folder: Path, rows: int, repeats: int) -> None:
    """Measure rows that begin alike, and leave the figures in the folder."""
    import numpy as np
    import torch
    import transformers
    from safetensors.torch import save_file

    from bench.tokenizer import made_up_words

    writer = make_model(folder)
    # A <bos> comes before it.
    examples = writer.text(PREFIX_TOKENS - 1)
    texts = [writer.text(int(tokens)) for tokens in np.linspace(*ROW_TOKENS, rows)]
    np.random.default_rng(0).shuffle(texts)
    texts_of_labels = [f" {word}" for word in made_up_words()[:3]]
    prompt = {"prompt_template": f"{examples} {{{{ text }}}}"}
    figures = [
        measure_ways(folder, {"text": texts}, prompt | label_tokens(texts_of_labels), repeats, "causal_lm")
    ]
    lm, classifier = folder / "llama", transformers.AutoModelForSequenceClassification
    for name, labels in (("classifier", 3), ("scorer", 1)):
        torch.manual_seed(1)
        config = transformers.AutoConfig.from_pretrained(lm, num_labels=labels)
        classifier.from_config(config).save_pretrained(folder / name)
        transformers.AutoTokenizer.from_pretrained(lm).save_pretrained(folder / name)
    seq_cls = {**prompt, "model_name_or_path": str(folder / "classifier")}
    figures.append(measure_ways(folder, {"text": texts}, seq_cls, repeats, "seq_cls"))
    save_file({"weight": 0.04 * torch.randn(3, DECODER["hidden_size"])}, folder / "head.safetensors")
    pooled = {**prompt, "head": folder / "head.safetensors", "pooling_mode": "mean"}
    figures.append(measure_ways(folder, {"text": texts}, pooled, repeats, "pooled_cls"))
    lengths = np.random.default_rng(1).integers(*CHOICE_TOKENS, (max(2, rows // 5), CHOICES), endpoint=True)
    columns = {
        "text": [writer.text(PROMPT_TOKENS - 1) for _ in lengths],
        "choices": [json.dumps([writer.text(int(tokens)) for tokens in of_row]) for of_row in lengths],
    }
    choices = {
        "prompt_template": "{{ text }} {{ choices }}",
        "choices": "choices",
        "model_name_or_path": str(folder / "scorer"),
    }
    figures.append(measure_ways(folder, columns, choices, repeats, "seq_cls"))
    save_figures(folder, figures)


def save_figures(folder: Path, figures: Sequence[Mapping[str, Any]]) -> None:
    """Leave the figures where ``figures_of`` reads them."""
    (folder / FIGURES).write_text(json.dumps(figures), encoding="utf-8")


def label_tokens(texts: Sequence[str]) -> dict[str, Any]:
    """The key of a language model with labels of these texts."""
    return {"label_tokens": {f"label{number}": text for number, text in enumerate(texts)}}


def make_model(folder: Path, layers: int = DECODER["num_hidden_layers"]) -> Writer:
    """Make the folder's model; what is returned writes texts for it."""
    import torch
    import transformers

    from bench.tokenizer import counted, made_up_words, save_tokenizer

    model, words = folder / "llama", made_up_words()
    save_tokenizer(model, [f" {word}" for word in words])
    config = transformers.LlamaConfig(
        **{**DECODER, "num_hidden_layers": layers},
        vocab_size=VOCABULARY,
        pad_token_id=0,
        initializer_range=0.04,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    return Writer(counted(model, words), seed=20)


def measure_ways(
    folder: Path,
    columns: Mapping[str, Sequence[str]],
    keys: Mapping[str, Any],
    repeats: int,
    task_type: str,
) -> dict[str, Any]:
    """Let a member of these keys predict rows as a run does, and each as a whole.

    Returns:
        seconds of both ways in each round, how far probabilities are apart, rows, and tokens that a row did not
        compute.
    """
    import numpy as np
    import pyarrow as pa

    from ensemble.common.protocol import CommonSpec
    from ensemble.data.published_table import PublishedTable
    from ensemble.members.base import Assigned, OutputColumns
    from ensemble.members.causal_lm.predictor import CausalMember
    from ensemble.members.pooled_cls.predictor import PooledMember
    from ensemble.members.registry import KINDS
    from ensemble.members.seq_cls.predictor import SequenceClassifier

    member_class: Any = {
        "causal_lm": CausalMember,
        "seq_cls": SequenceClassifier,
        "pooled_cls": PooledMember,
    }[task_type]

    class Whole(member_class):  # type: ignore[misc]
        def _take_shortcuts(self, tolerance: float) -> None:
            """Not those that keep keys and values."""

    rows = len(columns["text"])
    table = pa.table({name: list(cells) for name, cells in columns.items()})
    table = table.replace_schema_metadata({"ensemble.rows": str(rows)})
    with pa.ipc.new_file(folder / "table.arrow", table.schema) as file:
        file.write_table(table)
    labels = tuple(keys.get("label_tokens", ("LABEL_0", "LABEL_1", "LABEL_2")))
    if "choices" in keys:
        labels = tuple(map(str, range(CHOICES)))
    kind_class = KINDS.load(task_type)
    kind = kind_class(
        kind_class.Settings(**{"name": "m", "model_name_or_path": str(folder / "llama"), **keys})
    )
    inspected = kind.inspect(OutputColumns("id", labels))
    worker_settings = kind.worker_settings(inspected, Assigned(gpus=0), None)
    common = CommonSpec(
        labels=labels,
        activation=inspected.activation,
        gpus=0,
        memory_limit_bytes=None,
        seed=0,
        table_path=str(folder / "table.arrow"),
        order_path="",
        shards_dir="",
    )
    members = []
    for way in (member_class, Whole):
        spec = member_class.Spec.of(common, worker_settings)
        members.append(way(spec, PublishedTable(Path(common.table_path))))
        members[-1].load()
        members[-1].predict(np.arange(min(rows, 8)), lambda *_: None)
    seconds: list[list[float]] = [[], []]
    values, shared = [], 0
    for _ in range(repeats):
        for place, member in enumerate(members):
            began = time.perf_counter()
            prediction = member.predict(np.arange(rows), lambda *_: None)
            seconds[place].append(time.perf_counter() - began)
            values.append(prediction.values)
            shared = max(shared, prediction.counters.shared_tokens)
    apart = max(float(np.abs(other - values[0]).max()) for other in values)
    return {"seconds": seconds, "apart": apart, "prefix": shared // rows, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints a markdown table.

    Returns:
        0; 1 where something failed.
    """
    return command("bench.prefix", __doc__, compare, measure, arguments)


def command(
    module: str,
    description: str,
    compare: Callable[[int, int], list[dict[str, object]]],
    measure: Callable[[Path, int, int], None],
    arguments: Sequence[str] | None,
) -> int:
    """Run a module that has its two ways measured by a process."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--rows", type=int, default=500, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="K", help="rounds; 3 where nothing is said")
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="the process that this command starts")
    options = parser.parse_args(arguments)
    if options.measure is not None:
        measure(options.measure, options.rows, options.repeats)
        return 0
    return show(lambda: compare(options.rows, options.repeats))


if __name__ == "__main__":
    sys.exit(main())
