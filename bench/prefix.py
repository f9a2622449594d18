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
from collections.abc import Sequence
from pathlib import Path

from bench.processes import Failed
from bench.rounds import say
from bench.sections import show
from bench.table import Spread

ROOT = Path(__file__).resolve().parents[1]
AT_LEAST = 2.0
PREFIX_TOKENS, ROW_TOKENS = 300, (30, 100)
_CLOSE = 1e-4


def compare(rows: int = 500, repeats: int = 3) -> list[dict[str, object]]:
    """Seconds of predicting, tokenizing included, and the median of the rounds' ratios.

    Raises:
        Failed: the process failed, or the two ways gave other probabilities.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="ensemble prefix ") as folder:
        command = [sys.executable, "-m", "bench.prefix", "--measure", folder]
        command += ["--rows", str(rows), "--repeats", str(repeats)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
        if done.returncode:
            raise Failed(f"ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    if not found["apart"] <= _CLOSE:
        raise Failed(f"probabilities are {found['apart']:.1e} apart")
    for number, pair in enumerate(zip(*found["seconds"], strict=True)):
        say(f"round {number + 1} of {repeats}: {pair[0]:.1f} s shared, {pair[1]:.1f} s whole")
    shared, whole = found["seconds"]
    ratio = Spread.of([other / one for one, other in zip(shared, whole, strict=True)])
    return [
        {
            "rows": rows,
            "tokens that all begin with": found["prefix"],
            "tokens a row has besides": f"{ROW_TOKENS[0]} to {ROW_TOKENS[1]}",
            "computed once, s": Spread.of(shared).text(2),
            "in every row, s": Spread.of(whole).text(2),
            "times as fast": ratio.text(2),
            "at least": AT_LEAST,
            "probabilities apart": f"{found['apart']:.0e}",
            "": "not judged" if repeats < 2 else "ok" if ratio.middle >= AT_LEAST else "MISSED",
        }
    ]


def measure(folder: Path, rows: int, repeats: int) -> None:
    """Make model and table, let both ways have them in turn, and leave ``found.json`` in the folder."""
    import numpy as np
    import pyarrow as pa
    import torch
    import transformers

    from bench.checkpoints import DECODER, VOCABULARY
    from bench.data import Writer
    from bench.tokenizer import counted, made_up_words, save_tokenizer
    from ensemble.common.protocol import CommonSpec
    from ensemble.data.published_table import PublishedTable
    from ensemble.members.base import Assigned, OutputColumns
    from ensemble.members.causal_lm.parent import CausalLanguageModel
    from ensemble.members.causal_lm.predictor import CausalMember, CausalSpec
    from ensemble.members.causal_lm.settings import CausalSettings

    class Whole(CausalMember):
        def _take_shortcuts(self, tolerance: float) -> None:
            """Not the one that this kind adds."""

    model, labels = folder / "llama", ("a", "b", "c")
    words = made_up_words()
    save_tokenizer(model, [f" {word}" for word in words])
    config = transformers.LlamaConfig(
        **DECODER, vocab_size=VOCABULARY, pad_token_id=0, initializer_range=0.04
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    writer = Writer(counted(model, words), seed=20)
    # A <bos> comes before it.
    examples = writer.text(PREFIX_TOKENS - 1)
    texts = [writer.text(int(tokens)) for tokens in np.linspace(*ROW_TOKENS, rows)]
    np.random.default_rng(0).shuffle(texts)
    table = pa.table({"text": texts}).replace_schema_metadata({"ensemble.rows": str(rows)})
    with pa.ipc.new_file(folder / "table.arrow", table.schema) as file:
        file.write_table(table)

    settings = CausalSettings(
        name="m",
        model_name_or_path=str(model),
        prompt_template=f"{examples} {{{{ text }}}}",
        label_tokens={label: f" {word}" for label, word in zip(labels, words, strict=False)},
    )
    kind = CausalLanguageModel(settings)
    told = kind.worker_settings(kind.inspect(OutputColumns("id", labels)), Assigned(gpus=0), None)
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
        members.append(way(CausalSpec.of(common, told), PublishedTable(Path(common.table_path))))
        members[-1].load()
        members[-1].predict(np.arange(min(rows, 8)), lambda *_: None)
    seconds: list[list[float]] = [[], []]
    values, shared = [], 0
    for _ in range(repeats):
        for place, member in enumerate(members):
            began = time.perf_counter()
            found = member.predict(np.arange(rows), lambda *_: None)
            seconds[place].append(time.perf_counter() - began)
            values.append(found.values)
            shared = max(shared, found.counters.shared_tokens)
    apart = max(float(np.abs(one - values[0]).max()) for one in values)
    text = json.dumps({"seconds": seconds, "apart": apart, "prefix": shared // rows})
    (folder / "found.json").write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints a markdown table.

    Returns:
        0; 1 where something failed.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.prefix", description=__doc__)
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
