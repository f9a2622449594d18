"""The child side of a kind that imports torch with a word of its own, and then says what its process is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ensemble.common.protocol import CommonSpec
from ensemble.data.published_table import PublishedTable
from ensemble.members.predictor import Predictor

SECRET = "hf_" + "a" * 34


def import_libraries() -> Mapping[str, str]:
    import torch

    print(f"imported with {SECRET}")  # noqa: T201
    os.write(2, b"and what a library in C says\n")
    return {"torch": torch.__version__}


def set_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def make_predictor(common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> Predictor:
    import torch

    threads = (torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"))
    raise ValueError(f"threads: {threads}; CPUs: {sorted(os.sched_getaffinity(0))}; {os.environ.get('OWN')}")
