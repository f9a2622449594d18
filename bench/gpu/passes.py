"""Forward passes with one more of a worker's means each time: ``python -m bench.gpu.passes MODEL QUANTIZATION``.

In one process, on the same batches, so that nothing else differs. Prints rows of a table as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, BitsAndBytesConfig

from bench.gpu.peak import half_precision
from ensemble.members.huggingface.loading.capped_attention import register_capped_blocks
from ensemble.members.huggingface.loading.flex_attention import register_flex
from ensemble.members.huggingface.loading.fused_norms import fuse_norms
from ensemble.members.huggingface.loading.kernels import AMPERE, capability, choose_kernels
from ensemble.members.huggingface.scoring.classifier import Classifier
from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.scoring.forward import Shortcut
from ensemble.members.huggingface.spec import FLEX, choose_attention, is_soft_capped

# Of a batch of 16,384 tokens.
ROWS, WIDTH = 8, 2048
# Passes that a worker has in a GPU's queue at a time; the host waits after the last one.
_QUEUED = 4
_SECONDS = 2.0


def attention_of(folder: Path) -> str:
    """Return the attention that workers choose for a checkpoint."""
    register_capped_blocks()
    config = AutoConfig.from_pretrained(folder).to_dict()
    return choose_attention(is_soft_capped(config), supports_sdpa=True, flash_suits=False)


def load(folder: Path, attention: str, device: torch.device, quantization: Mapping[str, Any] | None) -> Any:
    """Return a checkpoint's model, in half precision or quantized by bitsandbytes."""
    dtype = half_precision(device.type == "cuda")
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if quantization:
        options["quantization_config"] = BitsAndBytesConfig(**quantization, bnb_4bit_compute_dtype=dtype)
    model = AutoModelForSequenceClassification.from_pretrained(folder, **options, device_map={"": device})
    model.config.use_cache = False
    choose_kernels(capability(device.type == "cuda"))
    return model.eval().requires_grad_(requires_grad=False)


def made_up_rows(lengths: list[int]) -> Encoded:
    chooser = np.random.default_rng(0)
    ids = [chooser.integers(3, 4096, length) for length in lengths]
    return Encoded({"input_ids": ids}, np.array(lengths), 0)


def tokens_per_second(classifier: Classifier, encoded: Encoded, on_gpu: bool) -> float:
    """Return the speed of passes over a batch, several in the queue at a time."""
    rows = np.arange(len(encoded.lengths))

    def compute() -> None:
        for logits in [classifier.logits(encoded, rows) for _ in range(_QUEUED if on_gpu else 1)]:
            logits.cpu()

    compute()  # loads kernels
    began, passes = time.perf_counter(), 0
    while not passes or (on_gpu and time.perf_counter() - began < _SECONDS):
        compute()
        passes += _QUEUED if on_gpu else 1
    return passes * float(encoded.lengths.sum()) / (time.perf_counter() - began)


def ways(
    folder: Path, device: torch.device, quantization: Mapping[str, Any] | None = None
) -> Iterator[dict[str, object]]:
    """Each row has what the row before it has, and one thing more."""
    attention, on_gpu = attention_of(folder), device.type == "cuda"
    longest = WIDTH if on_gpu else 128
    apart = np.linspace(0.6 * longest, longest, 10).astype(int)  # as many tokens, in ten rows
    batches = {"equal lengths": made_up_rows([longest] * ROWS), "lengths apart": made_up_rows(apart.tolist())}
    model = load(folder, attention, device, quantization)
    classifier = Classifier(model, 0)
    before: dict[str, float] = {}

    def measured(what: str) -> dict[str, object]:
        row: dict[str, object] = {"forward passes with": what}
        for name, encoded in batches.items():
            speed = tokens_per_second(classifier, encoded, on_gpu)
            row[f"tokens/s, {name}"] = round(speed)
            row[f"of the row before, {name}"] = speed / before[name] if name in before else None
            before[name] = speed
        return row

    if attention not in ("eager", "sdpa"):
        model.config._attn_implementation = "eager"
        yield measured("eager attention")
        model.config._attn_implementation = attention
    yield measured(f"{attention} attention")
    if shortcuts := sorted(shortcut.name for shortcut in classifier.possible):
        classifier.taken |= classifier.possible
        yield measured(f"and {', '.join(shortcuts).lower().replace('_', ' ')}")
    if fused := fuse_norms(model):
        yield measured(f"and {fused} fused norms")
    if packs(device):
        pack(classifier, ROWS * longest)
        yield measured(f"and {FLEX} attention, packed")


def packs(device: torch.device) -> bool:
    """Whether rows can be packed here without compiling for minutes: on GPUs that the compiler knows."""
    return (capability(device.type == "cuda") or (0, 0)) >= AMPERE


def pack(classifier: Classifier, tokens: int) -> None:
    """Let rows stand one behind the other from now on, in batches of so many tokens."""
    register_flex()
    classifier._model.config._attn_implementation = FLEX
    classifier.taken |= {Shortcut.LAST_TOKEN, Shortcut.NO_MASK}
    classifier.packed_tokens = tokens


def main() -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    for row in ways(Path(sys.argv[1]), device, json.loads(sys.argv[2])):
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
