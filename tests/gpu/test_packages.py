"""On a machine without pydantic and bitsandbytes the checks say so, and run with the folder that gpu_kit makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kaggle import make_image
from tests.project import ROOT
from tests.sampling import one_in
from tests.waiting import PATIENCE_SECONDS

KIT = str(ROOT / "scripts/gpu_kit.py")
PYTHON = ".".join(map(str, sys.version_info[:2]))


def run(python: Path | str, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in the checkout, which nobody has installed."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if folder is not None:
        variables["PYTHONPATH"] = str(folder)
    return subprocess.run(
        [str(python), *arguments],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    return make_image(tmp_path, without=["pydantic", "annotated_types", "typing_inspection", "bitsandbytes"])


@pytest.mark.parametrize("module", ["tests.gpu", "bench.gpu"])
def test_missing_packages_are_named_in_a_sentence(module: str, bare: Path) -> None:
    done = run(bare, "-m", module, "--rehearse")
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert f"{bare} has no pydantic (bitsandbytes is missing, too: no 4 and 8 bits); " in line
    assert f"scripts/gpu_kit.py --python {PYTHON} --cuda VERSION FOLDER" in line


@pytest.mark.long  # needs a package index, and takes 45 MB from it
def test_the_kit_brings_what_is_missing(bare: Path, tmp_path: Path) -> None:
    kit = tmp_path / "it's a kit"
    done = run(sys.executable, KIT, "--python", PYTHON, "--cuda", "13.0", str(kit))
    assert done.returncode == 0, done.stdout
    assert sum(path.stat().st_size for path in kit.rglob("*") if path.is_file()) < 20e6
    libraries = sorted(path.name for path in (kit / "bitsandbytes").glob("*.so"))
    assert libraries == ["libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so"]
    assert (kit / "typing_extensions.py").is_file(), "torch's may be too old for pydantic"
    done = run(bare, "-m", "tests.gpu", "--rehearse", "--only", "T4", folder=kit)
    assert done.returncode == 0, done.stdout
    assert "| a T4's rules |" in done.stdout
    where = "import bitsandbytes, pydantic; print(bitsandbytes.__file__, pydantic.__file__, sep='\\n')"
    printed = run(bare, "-c", where, folder=kit).stdout
    assert all(line.startswith(str(kit)) for line in printed.splitlines()[-2:]), printed


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--cuda", "13"], "error: --cuda 13: give two numbers with a dot"),
        (["--cuda", "13.0", "--python", "three"], "error: --python three: give two numbers with a dot"),
    ],
)
def test_bad_versions_are_named(options: list[str], sentence: str, tmp_path: Path) -> None:
    done = run(sys.executable, KIT, *options, str(tmp_path / "kit"))
    assert (done.returncode, done.stdout.startswith(sentence)) == (1, True), done.stdout
    assert not (tmp_path / "kit").exists()


@pytest.mark.parametrize(
    "variables",
    one_in(
        2,
        [
            {"PIP_NO_INDEX": "1"},
            {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": "", "PIP_RETRIES": "0"},
        ],
    ),
    ids=["no-index", "closed-port"],
)
def test_without_an_index_pip_says_so(variables: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, KIT, "--python", PYTHON, "--cuda", "13.0", str(tmp_path / "kit")],
        env={**os.environ, **variables, "PIP_CONFIG_FILE": os.devnull},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 1
    assert done.stdout.startswith("error: pip download ")
    assert "bitsandbytes failed; does it reach a package index? It says:\nERROR: " in done.stdout
    assert not (tmp_path / "kit").exists()
