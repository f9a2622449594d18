"""Language models whose prompts all begin alike, such as with examples: ``python -m bench.prefix``.

The same rows scored at the same labels by a Llama of 12.5 million random weights: what they begin with is computed
once, as a run does it, or in every row; in turn, in one process.
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
AT_LEAST = 2.0
PREFIX_TOKENS, ROW_TOKENS = 300, (30, 100)
FIGURES = "figures.json"
_CLOSE = 1e-4


def compare(rows: int = 500, repeats: int = 3) -> list[dict[str, object]]:
    """Seconds of predicting, tokenizing included, and the median of the rounds' ratios.

    Raises:
        Failed: the process failed, or the two ways gave other probabilities.
    """
    figures = figures_of("bench.prefix", rows, repeats)
    return [
        {
            "rows": rows,
            "tokens that all begin with": figures["prefix"],
            "tokens a row has besides": f"{ROW_TOKENS[0]} to {ROW_TOKENS[1]}",
            **judged(figures, ("computed once", "in every row"), AT_LEAST),
        }
    ]


def figures_of(module: str, rows: int, repeats: int) -> dict[str, Any]:
    """Let a process measure a module's two ways.

    Raises:
        Failed: the process failed, or the two ways gave other probabilities.
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
        figures: dict[str, Any] = json.loads((Path(folder) / FIGURES).read_text(encoding="utf-8"))
    if not figures["apart"] <= _CLOSE:
        raise Failed(f"probabilities are {figures['apart']:.1e} apart")
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
    """Measure prompts that begin alike, and leave the figures in the folder."""
    import numpy as np

    from bench.tokenizer import made_up_words

    writer = make_model(folder)
    # A <bos> comes before it.
    examples = writer.text(PREFIX_TOKENS - 1)
    texts = [writer.text(int(tokens)) for tokens in np.linspace(*ROW_TOKENS, rows)]
    np.random.default_rng(0).shuffle(texts)
    labels = [f" {word}" for word in made_up_words()[:3]]
    measure_ways(folder, texts, f"{examples} {{{{ text }}}}", labels, repeats)


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
    folder: Path, texts: Sequence[str], template: str, label_texts: Sequence[str], repeats: int
) -> None:
    """Let the folder's model score rows as a run does, and with every prompt as a whole; leave the figures."""
    import numpy as np
    import pyarrow as pa

    from ensemble.common.protocol import CommonSpec
    from ensemble.data.published_table import PublishedTable
    from ensemble.members.base import Assigned, OutputColumns
    from ensemble.members.causal_lm.parent import CausalLanguageModel, CausalSettings
    from ensemble.members.causal_lm.predictor import CausalMember, CausalSpec

    class Whole(CausalMember):
        def _take_shortcuts(self, tolerance: float) -> None:
            """Not those that this kind adds."""

    rows = len(texts)
    table = pa.table({"text": list(texts)}).replace_schema_metadata({"ensemble.rows": str(rows)})
    with pa.ipc.new_file(folder / "table.arrow", table.schema) as file:
        file.write_table(table)
    labels = tuple(f"label{number}" for number in range(len(label_texts)))
    settings = CausalSettings(
        name="m",
        model_name_or_path=str(folder / "llama"),
        prompt_template=template,
        label_tokens=dict(zip(labels, label_texts, strict=True)),
    )
    kind = CausalLanguageModel(settings)
    worker_settings = kind.worker_settings(kind.inspect(OutputColumns("id", labels)), Assigned(gpus=0), None)
    common = CommonSpec(
        labels=labels,
        activation="softmax",
        gpus=0,
        memory_limit_bytes=None,
        seed=0,
        table_path=str(folder / "table.arrow"),
        order_path="",
        shards_dir="",
    )
    members = []
    for way in (CausalMember, Whole):
        members.append(way(CausalSpec.of(common, worker_settings), PublishedTable(Path(common.table_path))))
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
    text = json.dumps({"seconds": seconds, "apart": apart, "prefix": shared // rows})
    (folder / FIGURES).write_text(text, encoding="utf-8")


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
