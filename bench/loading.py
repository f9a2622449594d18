"""Where a worker's loading goes, on a GPU if there is one: ``python -m bench.loading CHECKPOINT``.

Each way has a fresh process: the files' bytes, libraries alone, and a worker that has stood by, with short rows.
Every 2 ms a sample says in which part the main thread is.
"""

import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import ensemble.members.seq_cls.predictor  # noqa: F401  which workers that stand by have imported, too
from bench.machine import machine, versions
from bench.sections import show
from bench.startup import published
from ensemble.config.load import mapping_config
from ensemble.pipeline.load import load
from ensemble.pipeline.prepare import prepare
from ensemble.worker.channel import HeartbeatThread
from ensemble.worker.session import Session

# A sample counts for the first of these functions, of torch, transformers and this project, that is on the stack.
_PARTS = (
    *("_lazy_init", "caching_allocator_warmup", "get_model_conversion_mapping"),
    *("convert_and_load_state_dict_in_model", "_finalize_model_loading", "from_pretrained"),
    *("fuse_norms", "check_attention", "repeats", "tolerates_padding", "_take_shortcuts"),
)
_THREADS, _BUFFER_BYTES = 4, 64 << 20
_DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


def by_bytes(checkpoint: Path) -> dict[str, float]:
    """Copy the files' bytes to the device through pinned buffers, one for each thread, which are reused."""
    pinned, target = _DEVICE != "cpu", torch.zeros(_BUFFER_BYTES, dtype=torch.uint8, device=_DEVICE)
    buffers = [torch.zeros_like(target, device="cpu", pin_memory=pinned) for _ in range(_THREADS)]

    def copy(number: int) -> None:
        for path in checkpoint.glob("*.safetensors"):
            with path.open("rb", buffering=0) as file:
                for start in range(number * _BUFFER_BYTES, path.stat().st_size, _THREADS * _BUFFER_BYTES):
                    file.seek(start)
                    file.readinto(buffers[number].numpy().data)
                    target.copy_(buffers[number])

    return timed(lambda: [*ThreadPoolExecutor(_THREADS).map(copy, range(_THREADS))])


def by_library(checkpoint: Path) -> dict[str, float]:
    """Load the tensors by safetensors (views of the file on a CPU), then a model by transformers."""
    torch.zeros(1, device=_DEVICE)  # the context is there
    alone = timed(lambda: [load_file(path, device=_DEVICE) for path in checkpoint.glob("*.safetensors")])
    options = {"dtype": torch.bfloat16, "attn_implementation": "eager", "device_map": {"": _DEVICE}}
    model = timed(lambda: AutoModelForSequenceClassification.from_pretrained(checkpoint, **options))
    return {"safetensors alone": alone["seconds"], **model}


def by_worker(checkpoint: Path) -> dict[str, float]:
    """Make a session, as a worker that stands by does, and then load; the CUDA context counts, too."""
    with tempfile.TemporaryDirectory(prefix="ensemble loading ") as folder:
        Path(folder, "rows.csv").write_text("id,text\n1,a row\n2,another row\n")
        labels = json.loads((checkpoint / "config.json").read_text())["id2label"].values()
        names = {"name": "m", "task_type": "seq_cls", "model_name_or_path": str(checkpoint.resolve())}
        model = {**names, "text_column": "text", "max_length": 64, "dtype": "bfloat16"}
        data = {"path": f"{folder}/rows.csv", "id_column": "id"}
        settings = {"data": data, "labels": [*labels], "models": [model], "output_dir": f"{folder}/run"}
        prepared = prepare(load([mapping_config(settings)]))
        start = published(prepared, prepared.plan.models[0])
        return timed(Session(start, lambda event: None, HeartbeatThread(lambda event: None), 0.0).load)


def timed(call: Callable[[], object]) -> dict[str, float]:
    """Return the seconds that a call takes, and those of its parts."""
    parts: defaultdict[str, float] = defaultdict(float)
    is_over, thread_id = threading.Event(), threading.get_ident()

    def sample() -> None:
        last = time.perf_counter()
        while not is_over.wait(0.002):
            frame, names = sys._current_frames().get(thread_id), set()
            while frame is not None:
                names.add(frame.f_code.co_name)
                frame = frame.f_back
            before, last = last, time.perf_counter()
            parts[next((name for name in _PARTS if name in names), "other")] += last - before

    sampler, began = threading.Thread(target=sample), time.perf_counter()
    sampler.start()
    call()
    is_over.set()
    sampler.join()
    return {"seconds": time.perf_counter() - began, **parts}


def compare(checkpoint: Path) -> list[dict[str, object]]:
    """Return a row for each way, and below it for each of its parts."""
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    rows: list[dict[str, object]] = []
    for way in (by_bytes, by_library, by_worker):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            parts = process.submit(way, checkpoint).result()
        seconds = parts.pop("seconds")
        rows.append({"what": way.__name__, "s": f"{seconds:.2f}", "GB/s": f"{size / seconds / 1e9:.1f}"})
        rows += [{"what": f"- {part}", "s": f"{value:.2f}", "GB/s": ""} for part, value in parts.items()]
    return rows


if __name__ == "__main__":
    print(f"{time.strftime('%Y-%m-%d')}. {machine()}. {versions()}. `python -m bench.loading`.\n")
    sys.exit(show(lambda: compare(Path(sys.argv[1]))))
