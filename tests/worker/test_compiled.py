"""torch.compile: the numbers of eager row by row, nothing compiled behind `Ready`, and eager where it cannot be."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.common.compiler import why_no_compiler
from tests.checkpoints import image_reference, make_checkpoint, make_image_checkpoint, make_texts, reference
from tests.images import make_image
from tests.project import ROOT, Project
from tests.sampling import one_in
from tests.worker.test_compute import member_of, read_shard
from tests.worker.test_float32 import make_overflowing
from tests.worker.test_image_cls import LABELS as OF_IMAGES
from tests.worker.test_image_cls import make_member, predict
from tests.worker.test_predict import LABELS, worker_spec

pytestmark = [
    pytest.mark.usefixtures("one_thread", "compiler_of_its_own"),
    pytest.mark.filterwarnings("default"),  # torch's compiler is warned of what it calls itself
]
TEXTS = ["a", *make_texts(40), "food and drink " * 30]
needs_compiler = pytest.mark.skipif(bool(why_no_compiler()), reason=f"{why_no_compiler()}")


@pytest.fixture
def compiler_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With an empty cache, and nothing of it left in this process afterwards."""
    import torch

    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "1")  # to be taken back in any case
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    yield
    assert counters["stats"]["unique_graphs"] == before


def check_rows(folder: Path, model: Path, dtype: str, within: float) -> Any:
    """A compiled member's probabilities against those of transformers, which runs each text alone."""
    ready, predict = member_of(folder, model, TEXTS, torch_compile=True, dtype=dtype)
    assert (ready.compiled, [note for note in ready.notes if "compile" in note]) == (True, [])
    with nothing_compiled():
        work = predict()
    got = read_shard(folder / "shards", work.shard)
    np.testing.assert_allclose(got[:, 1:], reference(model, TEXTS, 128), atol=within)
    assert (folder / "home/ensemble/torch-compile").is_dir()
    return work


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("architecture", ["gemma2", "bert"])
def test_rows_have_the_numbers_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", architecture, LABELS)
    assert check_rows(tmp_path, model, "float32", 1e-5).counters.batches > 3


@needs_compiler
@pytest.mark.long
def test_overflows_run_again_in_float32_and_not_in_what_was_compiled(tmp_path: Path) -> None:
    model = make_overflowing(tmp_path / "m", "llama")
    counters = check_rows(tmp_path, model, "float16", 2e-2).counters
    assert counters.recomputed_rows + counters.float32_rows > 0


@needs_compiler
@pytest.mark.long
def test_every_size_of_a_batch_runs_compiled(tmp_path: Path) -> None:
    """Also those that come up first behind the warm-up, with padding and without; a single token does not."""
    import torch

    from ensemble.members.huggingface.loading.load import load
    from ensemble.members.huggingface.scoring.classifier import Classifier
    from ensemble.members.huggingface.scoring.compiled import compile_layers
    from ensemble.members.huggingface.scoring.encode import Encoded
    from ensemble.members.huggingface.scoring.warmup import WarmUp

    def rows_of(lengths: list[int]) -> Encoded:
        chooser = np.random.default_rng(0)
        ids = [chooser.integers(5, 200, length) for length in lengths]
        return Encoded({"input_ids": ids}, np.array(lengths), 0)

    loaded = load(worker_spec(make_checkpoint(tmp_path / "m", "llama", LABELS), max_length=128))
    classifier = Classifier(loaded.model, 0)
    # As many tokens as the model has hidden numbers, which torch takes for one size until it sees another.
    warm_up = WarmUp(
        classifier, rows_of([2, loaded.model.config.hidden_size]), lambda logits: logits.numpy(), True
    )
    assert warm_up.bears_padding()
    encoded = rows_of([100, 1, 60, 60, 33, 2, 3, 9])
    batches = [[0], [2], [2, 3], [0, 1], [4, 5, 6, 7], [6, 7], [*range(8)]]
    eager = [classifier.logits(encoded, np.array(batch)).numpy() for batch in [*batches, [1]]]
    layers = classifier.layers_of_all_tokens()
    assert compile_layers(layers, warm_up.logits, warm_up.batches, 1e-4, "cpu") == ""
    with torch.compiler.set_stance("fail_on_recompile"):
        found = [classifier.logits(encoded, np.array(batch)).numpy() for batch in batches]
        with pytest.raises(RuntimeError, match="recompile"):
            classifier.logits(encoded, np.array([1]))
    found.append(classifier.logits(encoded, np.array([1])).numpy())
    for one, other in zip(found, eager, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def compile_layer(forward: Callable[[Any], Any]) -> str:
    """Compile a layer of a model that has no other."""
    import torch

    from ensemble.members.huggingface.scoring.compiled import compile_layers

    class Layer(torch.nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = forward(states)
            return found

    layer = Layer()
    return compile_layers(
        [layer],
        lambda rows: layer(torch.from_numpy(rows)[:, None].double()).numpy(),
        [[1, 2], [1], [1, 2, 3], [1, 2, 3, 4, 5], [1]],
        1e-4,
        "cpu",
    )


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize(
    ("off", "why"),
    [
        (0.0, ""),
        (0.5, "compiled layers give other numbers (off by 0.1 of the largest)"),
        (float("nan"), "compiled layers give no numbers where there were some"),
    ],
)
def test_numbers_are_held_against_those_before(off: float, why: str, tmp_path: Path) -> None:
    """Compiled by this process alone, also where torch's compiler was imported before."""
    import torch
    from torch._inductor import config

    with config.patch(compile_threads=2):
        found = compile_layer(lambda states: states + off if torch.compiler.is_compiling() else states + 0)
        assert config.compile_threads == 1
    assert found == (why and f"torch_compile: computed without, as {why}")
    (folder,) = (tmp_path / "home/ensemble/torch-compile").iterdir()
    assert any(folder.iterdir())


NOTHING = "torch_compile: computed without, as torch compiled nothing of it, and its log may say why"


def compile_nothing() -> str:
    """As with TORCH_COMPILE_DISABLE=1."""
    from torch._dynamo import config

    with config.patch(disable=True):
        return compile_layer(lambda states: states + 1)


@needs_compiler
def test_what_torch_leaves_as_it_is_does_not_count_as_compiled() -> None:
    assert compile_nothing() == NOTHING


@needs_compiler
def test_code_that_others_can_write_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that torch has named in the temporary one is not looked at; one that the user has named is."""
    torchs, own = Path(tempfile.gettempdir()) / "torchinductor_somebody", tmp_path / "torchinductor_mine"
    above = tmp_path / "home/ensemble/torch-compile"
    above.mkdir(parents=True)
    above.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(torchs))
    found = compile_nothing()
    assert found.startswith(f"torch_compile: computed without, as {above}/")
    assert found.endswith(" is not this user's alone to write; name a folder in TORCHINDUCTOR_CACHE_DIR")
    above.chmod(0o755)
    (folder,) = above.iterdir()
    folder.chmod(0o770)
    assert compile_nothing() == found
    folder.chmod(0o700)
    assert compile_nothing() == NOTHING
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(own))
    assert compile_nothing() == NOTHING
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(own)


@needs_compiler
@pytest.mark.long
def test_images(tmp_path: Path) -> None:
    model = make_image_checkpoint(tmp_path / "vit", "vit", OF_IMAGES)
    paths = [make_image(tmp_path / f"{number}.png", seed=number) for number in range(12)]
    member = make_member(model, paths, torch_compile=True)
    with nothing_compiled():
        values, _, counters = predict(member, range(len(paths)))
    assert (tmp_path / "home/ensemble/torch-compile").is_dir()
    np.testing.assert_allclose(values, image_reference(model, paths), atol=2e-6)
    assert counters.batches > 0


@pytest.mark.parametrize(
    ("compiler", "why"),
    one_in(2, [("missing", "there is no C++ compiler here ("), ("broken", "compiling failed (")]),
)
def test_a_compiler_that_cannot_leaves_the_member_as_it_was(
    compiler: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config

    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
    broken.chmod(0o755)
    if compiler == "broken" and "has a space" in why_no_compiler():
        pytest.skip(why_no_compiler())
    monkeypatch.setenv("CXX", str(tmp_path / compiler))
    model = make_checkpoint(tmp_path / "m", "llama", LABELS)
    # Imported for an earlier test, torch's compiler has looked at the environment already.
    with config.patch({"cpp.cxx": (None, str(tmp_path / compiler))}):
        ready, predict = member_of(tmp_path, model, TEXTS, torch_compile=True)
    (note,) = (note for note in ready.notes if note.startswith("torch_compile"))
    assert (ready.compiled, note.startswith(f"torch_compile: computed without, as {why}")) == (False, True)
    with nothing_compiled():
        got = read_shard(tmp_path / "shards", predict().shard)
    np.testing.assert_allclose(got[:, 1:], reference(model, TEXTS, 128), atol=1e-5)


def test_validate_says_that_there_is_no_compiler(project: Project) -> None:
    llama = {**project.config()["models"][1], "torch_compile": True}
    project.write_config(project.config(models=[llama]))
    done = project.ensemble("validate", "config.yaml", environment={"CXX": "no-such-compiler"})
    said = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stderr
    assert "torch_compile: there is no C++ compiler here (no-such-compiler), so that on a CPU" in said


@pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").is_file(), reason="Python's headers are not installed"
)
def test_a_path_that_torch_cannot_link_in_is_said_beforehand(tmp_path: Path) -> None:
    folder = tmp_path / "a space" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    code = "from ensemble.common.compiler import why_no_compiler; print(why_no_compiler())"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": os.pathsep.join([str(folder.parent), str(ROOT)]), "CXX": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "has a space (" in done.stdout
    assert str(folder) in done.stdout or " " in sysconfig.get_config_var("LIBDIR")


@needs_compiler
def test_a_folder_for_the_code_that_torch_cannot_compile_into_is_said_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaced = str(tmp_path / "a space")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", spaced)
    assert f"({spaced}); name another in TORCHINDUCTOR_CACHE_DIR" in why_no_compiler()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", spaced)
    assert spaced in why_no_compiler()
