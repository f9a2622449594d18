"""A worker's lazy imports change nothing: numbers, accelerate's hooks, ``torch.compile``."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ensemble.members.huggingface.loading import lazy_imports
from tests.checkpoints import make_checkpoint, make_texts
from tests.sampling import one_in
from tests.waiting import PATIENCE_SECONDS

ARCHITECTURES = ("gemma2", "llama", "bert", "deberta-v2")
LEFT_OUT = ("torch._dynamo", "torch.distributed.tensor", "scipy.optimize", "sympy")
SCRIPT = """
import gc, json, os, sys, types
folders, texts, lazy = json.loads(sys.argv[1])
from ensemble.members.huggingface.loading.lazy_imports import import_torch_and_transformers, no_collections
if not lazy:
    os.environ["ENSEMBLE_PLAIN_IMPORTS"] = "1"
with no_collections():
    import_torch_and_transformers()
assert gc.isenabled()
import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer
torch.set_num_threads(1)
torch.manual_seed(0)
told = {"logits": []}
def logits(model, tokenizer):
    with torch.inference_mode():
        return model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
for folder in folders:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for options in ({}, {"device_map": "auto"}):
        model = AutoModelForSequenceClassification.from_pretrained(folder, **options).eval()
        told["logits"].append(logits(model, tokenizer).tolist())
def there(name):
    return type(sys.modules.get(name)) is types.ModuleType
told["there"] = [name for name in NAMES if there(name)]
structure = transformers.utils.import_utils.define_import_structure(transformers.models.__file__)
told["exported"] = sorted([sorted(backends), name, sorted(names)] for backends, modules in structure.items()
    for name, names in modules.items())
told["names"] = sorted(set(dir(transformers)) | set(dir(transformers.models)))
import torch._dynamo.config
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert torch._dynamo.config.recompile_limit > 0
inputs = tokenizer(texts, padding=True, return_tensors="pt")
compiled = torch.compile(lambda **inputs: model(**inputs).logits.softmax(-1), backend="eager")
told["graphs"] = torch._dynamo.explain(lambda: model(**inputs).logits)().graph_count
told["compiled"] = compiled(**inputs).tolist()
told["has_dynamo"] = there("torch._dynamo")
@torch.compile(backend="eager", fullgraph=True)
def asks(x):
    return x + torch.distributed.is_available()
told["distributed"] = asks(torch.zeros(1)).item()
print(json.dumps(told))
""".replace("NAMES", repr(LEFT_OUT))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a process with plain imports and one with lazy ones have to tell of the same models."""
    root = tmp_path_factory.mktemp("lazy")
    folders = [str(make_checkpoint(root / name, name, ["a", "b", "c"])) for name in ARCHITECTURES]
    return [_run(json.dumps([folders, make_texts(6), lazy])) for lazy in (False, True)]


def _run(argument: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, argument],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


BROKEN = """
import sys
from ensemble.members.huggingface.loading import lazy_imports
def broken():
    raise AttributeError("this release has it elsewhere")
lazy_imports._read_models_once = broken
lazy_imports.import_torch_and_transformers()
import torch
from transformers import AutoModelForSequenceClassification
print(torch.distributed.is_available(), type(sys.modules["torch._dynamo"]).__name__)
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
print(model(input_ids=torch.ones((1, 3), dtype=torch.int64)).logits.shape[0])
"""


@pytest.mark.long
def test_where_it_does_not_work_everything_is_imported_after_all(tmp_path: Path) -> None:
    """As with a release of transformers in which things stand elsewhere."""
    folder = make_checkpoint(tmp_path / "m", "llama", ["a", "b"])
    done = subprocess.run([sys.executable, "-c", BROKEN, str(folder)], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "module", "1"], done.stderr
    assert "importing everything after all: AttributeError('this release" in done.stderr


@pytest.mark.long
def test_something_is_left_out(told: list[dict[str, Any]]) -> None:
    plain, lazy = told
    # Which of them plain imports bring in differs between releases of torch, and whether SciPy is installed.
    assert "torch._dynamo" in plain["there"], "nothing to leave out any more"
    assert "torch._dynamo" not in lazy["there"]
    assert set(lazy["there"]) < set(plain["there"])


@pytest.mark.filterwarnings("ignore:guard_size_oblivious will be removed:FutureWarning")
def test_what_is_said_of_plain_values_is_what_torch_says() -> None:
    from torch.fx.experimental import symbolic_shapes

    of_booleans = {
        name: 2 if name.startswith("sym_") else 1 for name in lazy_imports.OF_SIZES if name != "sym_eq"
    }
    shapes: list[Any] = [(), (1,), [1], (2,), (1, 2), [1, 2], (2, 1)]
    cases: dict[str, list[tuple[Any, ...]]] = {
        **{name: list(product([True, False], repeat=count)) for name, count in of_booleans.items()},
        **{name: [(0,), (1,), (7,)] for name in ("is_nested_int", "has_free_unbacked_symbols")},
        "sym_eq": list(product(shapes, repeat=2)),
    }
    tried = 0
    for name, answer in lazy_imports.OF_SIZES.items():
        if answer is not None and hasattr(symbolic_shapes, name):
            for arguments in cases[name]:
                try:
                    expected = getattr(symbolic_shapes, name)(*arguments)
                except AssertionError:  # torch 2.6 takes no tuple beside a list
                    continue
                assert answer(*arguments) is expected, (name, arguments)
                tried += 1
    assert tried > 40


MAKING_WAY = """
import sys, types
from ensemble.members.huggingface.loading.lazy_imports import StandIn, import_torch_and_transformers
import_torch_and_transformers()
import torch
names = ("torch._dynamo", "sympy", "torch.fx.experimental.symbolic_shapes")
held = [sys.modules[name] for name in names]
assert all(type(module) is StandIn for module in held)
for module in held:  # as inspect and warnings do
    assert not hasattr(module, "__wrapped__")
NEXT
real = sys.modules["torch._dynamo"]
assert type(real) is types.ModuleType and torch._dynamo is real
assert held[0].disable is real.disable and held[0].config is real.config is sys.modules["torch._dynamo.config"]
import sympy
assert held[1].Basic is sympy.Basic is not None and isinstance(sympy.Integer(3), held[1].Basic)
assert held[2].ShapeEnv is sys.modules["torch.fx.experimental.symbolic_shapes"].ShapeEnv
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
try:
    held[0].no_such_name
except AttributeError as error:
    print(error)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "asked",
    one_in(
        6,
        [
            "import torch._dynamo.config",
            "import torch._dynamo.eval_frame",
            "from torch._dynamo.utils import counters",
            "import torch._inductor.compile_fx",
            "torch._dynamo.config.recompile_limit",
            "from torch._dynamo import is_compiling",
        ],
    ),
)
def test_a_stand_in_makes_way_for_the_real_module(asked: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAKING_WAY.replace("NEXT", asked)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert "has no attribute 'no_such_name'" in done.stdout


@pytest.mark.long
def test_the_numbers_are_the_same(told: list[dict[str, Any]]) -> None:
    plain, lazy = told
    assert len(plain["logits"]) == 2 * len(ARCHITECTURES)
    assert lazy["logits"] == plain["logits"]


@pytest.mark.long
def test_transformers_exports_the_same_names(told: list[dict[str, Any]]) -> None:
    plain, lazy = told
    assert len(plain["exported"]) > 500
    assert lazy["exported"] == plain["exported"]
    assert lazy["names"] == plain["names"]


@pytest.mark.long
def test_compiling_works_afterwards(told: list[dict[str, Any]]) -> None:
    plain, lazy = told
    assert lazy["has_dynamo"]
    assert lazy["compiled"] == plain["compiled"]
    assert lazy["graphs"] == plain["graphs"]


@pytest.mark.long
def test_nobody_but_transformers_misses_torch_distributed(told: list[dict[str, Any]]) -> None:
    plain, lazy = told
    assert lazy["distributed"] == plain["distributed"]
