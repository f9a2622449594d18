"""Labels of several tokens behind prompts: ``python -m bench.labels``.

The same rows scored at ten labels of ten tokens by a Llama of 16 layers and 25 million random weights: each label
behind the keys and values of its prompt, as a run does it, or behind a whole pass over the prompt; in turn, in one
process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.prefix import command, figures_of, judged, label_tokens, make_model, measure_ways, save_figures
from bench.processes import Failed

AT_LEAST = 4.0
LABELS, LABEL_TOKENS, PROMPT_TOKENS = 10, 10, 200
# With fewer, such a small model spends most of its time on the vocabulary, unlike the ones in use.
_LAYERS = 16
_CLOSE = 1e-4


def compare(rows: int = 200, repeats: int = 3) -> list[dict[str, object]]:
    """Seconds of predicting, tokenizing included, and the median of the rounds' ratios.

    Raises:
        Failed: the process failed, or the two ways gave other probabilities.
    """
    (figures,) = figures_of("bench.labels", rows, repeats)
    if not figures["apart"] <= _CLOSE:
        raise Failed(f"probabilities are {figures['apart']:.1e} apart")
    return [
        {
            "rows": rows,
            "labels": f"{LABELS} of {LABEL_TOKENS} tokens",
            "tokens of a prompt": PROMPT_TOKENS,
            **judged(figures, ("each prompt once", "once for each label"), AT_LEAST),
        }
    ]


def measure(folder: Path, rows: int, repeats: int) -> None:
    """Measure ten labels behind prompts of one length, and leave the figures in the folder."""
    writer = make_model(folder, _LAYERS)
    # A <bos> comes before it; no two labels have the same first token, so that each is a path of its own.
    texts = [writer.text(PROMPT_TOKENS - 1) for _ in range(rows)]
    labels = [f" {writer.text(LABEL_TOKENS)}" for _ in range(LABELS)]
    keys = {"prompt_template": "{{ text }}", **label_tokens(labels)}
    save_figures(folder, [measure_ways(folder, {"text": texts}, keys, repeats, "causal_lm")])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints a markdown table.

    Returns:
        0; 1 where something failed.
    """
    return command("bench.labels", __doc__, compare, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
