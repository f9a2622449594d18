"""What no run.json tells of a forward pass: which kernels serve it, and what becomes of float16 that overflows.

``python -m tests.gpu.forward PART FOLDER`` prints rows of the checks' table as JSON, [text, verdict] a line.  A
process of its own, so that the checks' own holds no GPU; on the CPU where there is none, for a rehearsal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForSequenceClassification

from bench.gpu.passes import ROWS, WIDTH, attention_of, load, made_up_rows, pack, packs
from bench.shapes import LLAMA_3_8B, make_full_size
from ensemble.members.huggingface.loading.float32_retry import in_float32
from ensemble.members.huggingface.loading.fused_norms import fuse_norms
from ensemble.members.huggingface.loading.kernels import (
    AMPERE,
    capability,
    choose_kernels,
    takes_shared_keys,
)
from ensemble.members.huggingface.loading.pair_copies import wrong_pairs
from ensemble.members.huggingface.scoring.classifier import Classifier
from ensemble.members.huggingface.scoring.forward import BatchSizes, Computed, Shortcut, compute
from ensemble.members.huggingface.spec import FLEX
from tests.gpu.verdicts import Row

_T4 = (7, 5)
# Four heads share a key, as in Llama-3-8B; a moment's work for any GPU, and seconds for a CPU.
_SHAPE = {
    **LLAMA_3_8B,
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
# Of the largest logit, between two kernels.
_ROUNDED = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
# A plan of cuDNN's for a new shape took about 0.5 s.
_NEW_SHAPE_SECONDS = 0.1
_SHAPES = 20
# Feed-forward states beyond 65,504 in nearly every row of 100 tokens.
_FACTOR = 200
_KERNELS = 12


def _attention(folder: Path, device: torch.device) -> Iterator[Row]:
    """Without plain products every pass is served, also by a T4's rules, and a new shape takes no planning."""
    own = capability(device.type == "cuda") or AMPERE
    even, uneven = made_up_rows([300] * 8), made_up_rows([300, 211, 97, 5])
    cases = [(_T4, torch.float16), (own, torch.float32), (own, torch.float16)]
    if own >= AMPERE:
        cases.append((own, torch.bfloat16))
    for rules, dtype in cases:
        model = _load(folder, dtype, device)
        classifier = Classifier(model, 0)
        classifier.taken.add(Shortcut.NO_MASK)
        choose_kernels(rules)
        is_shared = takes_shared_keys(rules, dtype, model.config.head_dim)
        # A CPU's is called flash attention, whatever it computes.
        flash = SDPBackend.FLASH_ATTENTION
        fused = flash if is_shared or device.type == "cpu" else SDPBackend.EFFICIENT_ATTENTION
        off = 0.0
        for encoded in (even, uneven):
            rows = np.arange(len(encoded.lengths))
            with sdpa_kernel([fused]):  # an error where it cannot serve
                actual_logits = classifier.logits(encoded, rows)
            with sdpa_kernel([SDPBackend.MATH]):
                expected = classifier.logits(encoded, rows)
            off = max(off, float((actual_logits - expected).abs().max() / expected.abs().max()))
        name = f"{str(dtype).removeprefix('torch.')} by the rules of {rules[0]}.{rules[1]}"
        verdict = "ok" if off <= _ROUNDED[dtype] else "FAILED"
        yield f"{name}: {fused.name.lower()} serves, {off:.1e} off plain products", verdict
    if device.type == "cuda":
        yield _new_shapes(classifier)


def _new_shapes(classifier: Classifier) -> Row:
    seconds = []
    shapes = [made_up_rows([width] * (2 + width % 5)) for width in range(200, 200 + 7 * _SHAPES, 7)]
    for _ in range(3):  # the first round also loads kernels, each of them once
        began = time.perf_counter()
        for encoded in shapes:
            classifier.logits(encoded, np.arange(len(encoded.lengths))).cpu()
        seconds.append(time.perf_counter() - began)
    extra = (seconds[0] - min(seconds[1:])) / _SHAPES
    # torch's own word, too: a release without cuDNN's attention would be fast anyway.
    is_off = not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    verdict = "ok" if is_off and extra <= _NEW_SHAPE_SECONDS else "FAILED"
    return f"a new shape of a batch takes {extra * 1000:.0f} ms more than a known one", verdict


def _overflow(folder: Path, device: torch.device) -> Iterator[Row]:
    """Rows that overflow float16 get float32's numbers; after a chunk of them, the next starts there."""
    model = _load(folder, torch.float16, device)
    for name, parameter in model.named_parameters():
        if "gate_proj" in name or "up_proj" in name:
            parameter.mul_(_FACTOR)
        elif "down_proj" in name:
            parameter.div_(_FACTOR**2)
    choose_kernels(capability(device.type == "cuda"))
    encoded = made_up_rows([100] * 20 + [60] * 20)
    classifier, sizes = Classifier(model, 0), BatchSizes(2048, None)

    def computed(starts_in_float32: bool = False) -> Computed:
        mode = partial(in_float32, model)
        return compute(classifier, encoded, sizes, lambda *_: None, mode, starts_in_float32)

    tried, at_once = computed(), computed(starts_in_float32=True)
    upcast = Classifier(model.float(), 0)
    expected = upcast.logits(encoded, np.arange(len(encoded.lengths)), with_mask=True).cpu()
    for what, result, counted in (
        ("tried in float16", tried, tried.counters.recomputed_rows),
        ("at once in float32", at_once, at_once.counters.float32_rows),
    ):
        off = float((result.logits - expected).abs().max() / expected.abs().max())
        rows = f"{counted} of {len(encoded.lengths)} rows in float32"
        text = f"{what}: {rows}, {off:.1e} off, {result.counters.forward_seconds:.3f} s in passes"
        is_good = off <= 0.01 and counted > len(encoded.lengths) / 2 and tried.mostly_overflows
        yield text, "ok" if is_good else "FAILED"


def _profile(folder: Path, device: torch.device) -> Iterator[Row]:
    """A batch of long rows through a model as workers load it: tokens/s, and the kernels with most time."""
    attention = attention_of(folder)
    model = load(folder, attention, device, None)
    if device.type == "cuda":
        fuse_norms(model)
    classifier = Classifier(model, 0)
    classifier.taken |= classifier.possible & {Shortcut.LAST_TOKEN, Shortcut.NO_MASK}
    width = WIDTH if device.type == "cuda" else 128
    if packs(device):
        pack(classifier, ROWS * width)
        attention = FLEX
    encoded = made_up_rows([width] * ROWS)
    rows = np.arange(ROWS)
    classifier.logits(encoded, rows).cpu()
    began = time.perf_counter()
    classifier.logits(encoded, rows).cpu()
    speed = ROWS * width / (time.perf_counter() - began)
    yield f"{attention}, batches of {ROWS * width:,} tokens: {speed:,.0f} tokens/s", "ok"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        classifier.logits(encoded, rows).cpu()
    spent: dict[str, float] = {}
    for event in profiler.key_averages():
        # A kernel's time is counted for the operation that has launched it, too.
        if device.type == "cuda" and event.device_type.name == "CUDA":
            spent[event.key] = event.self_device_time_total
        elif device.type == "cpu":
            spent[event.key] = event.self_cpu_time_total
    total = sum(spent.values())
    for name in sorted(spent, key=lambda name: -spent[name])[:_KERNELS]:
        yield f"{spent[name] / total:.1%} {name[:90]}", "ok"


def _copies(_: Path, device: torch.device) -> Iterator[Row]:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    wrong = wrong_pairs(devices)
    text = f"wrong between {wrong}" if wrong else f"right between all {len(devices)} GPUs"
    yield text, "FAILED" if wrong else "ok"


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    model = AutoModelForSequenceClassification.from_pretrained(folder, **options)
    model.config.use_cache = False
    return model.to(device).eval().requires_grad_(requires_grad=False)


def main() -> None:
    part, folder = sys.argv[1], Path(sys.argv[2])
    parts = {"attention": _attention, "overflow": _overflow, "profile": _profile, "copies": _copies}
    if part in ("attention", "overflow"):
        make_full_size(folder, _SHAPE, ["a", "b", "tie"], dtype="float32", weights="random")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    for row in parts[part](folder, device):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
