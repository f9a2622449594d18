"""Try the supported range: ``make test-releases``.

Builds the environments of ``environments.py`` (those with a Python of their own take gigabytes and minutes), runs
in each what may differ between releases, and writes the table of docs/reference/releases.md.  What is installed is
kept.  The environment ``vllm`` serves models, which the usual one asks (``test_vllm.py``).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.project import ROOT
from tests.releases import vllm_environment
from tests.releases.environments import ENVIRONMENTS, EXTRAS, IN_CI, Environment
from tests.sampling import chosen_share

PLACE = ROOT / ".venv" / "releases"
TABLE = ROOT / "docs" / "reference" / "releases.md"
# Parity, the demo, loading, adapters, quantization, what a forward pass allocates: what a release can change.
QUICK = (
    "tests/releases",
    "tests/members/huggingface/loading/test_adapter.py",
    "tests/members/huggingface/loading/test_quantization.py",
    "tests/members/huggingface/test_memory.py",
    "tests/members/huggingface/test_memory_of_adapters.py",
)
WHOLE = (
    *(
        "tests/releases",
        "tests/members",
        "tests/merging",
        "tests/analysis",
        "tests/data",
        "tests/cli",
        "tests/ray",
    ),
    *("tests/worker/test_session.py", "tests/common/test_gpus.py", "tests/properties/test_truncation.py"),
    *(f"tests/test_{name}.py" for name in ("views", "configs", "extending_kind", "security")),
    # The page of keys is made with the newest pydantic alone.
    *(f"tests/config/test_{name}.py" for name in ("load", "values", "member_kinds", "overlays")),
    "tests/commands/test_init.py",
    "tests/training/test_trainer.py",
)
# The table's columns, and packages of which a sentence below names the oldest and the newest release.
_SHOWN = ("torch", "transformers", "numpy", "pyarrow", "pydantic", "typer")
_SUMMED_UP = ("accelerate", *EXTRAS, "pandas", "scikit-learn", "scipy", "matplotlib")
_MARKS = ("<!-- table -->", "<!-- end of table -->")
_VLLM = "vllm"


@dataclass(frozen=True)
class Outcome:
    """How an environment fared; ``versions`` by package, Python among them."""

    environment: Environment
    verdict: str
    versions: dict[str, str]
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return not self.verdict.startswith("FAILED")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.releases", description=__doc__)
    parser.add_argument("names", nargs="*", help="environments, such as oldest; all without any")
    parser.add_argument(
        "--ci",
        action="store_true",
        help="one of those that changes are tried with, by the commit, and quickly",
    )
    parser.add_argument(
        "--quick", action="store_true", help="all of those that changes are tried with, quickly"
    )
    parser.add_argument("--write", action="store_true", help="write the table of docs/reference/releases.md")
    arguments = parser.parse_args()
    names = arguments.names or list(_names())
    if arguments.quick or arguments.ci:
        names = list(IN_CI[chosen_share() % len(IN_CI) :][:1] if arguments.ci else IN_CI)
    if unknown := set(names) - {*_names()}:
        parser.error(f"no environment {', '.join(sorted(unknown))}; there are {', '.join(_names())}")
    outcomes = []
    for environment in ENVIRONMENTS:
        if environment.name in names:
            outcome = attempt(environment, QUICK if arguments.ci or arguments.quick else WHOLE)
            print(f"{environment.name}: {outcome.verdict} in {outcome.seconds:.0f} s", flush=True)
            outcomes.append(outcome)
    served = attempt_vllm() if _VLLM in names else None
    if served is not None:
        print(f"{_VLLM}: {served.verdict} in {served.seconds:.0f} s", flush=True)
    if arguments.write:
        text = TABLE.read_text(encoding="utf-8")
        TABLE.write_text(with_table(text, outcomes, served), encoding="utf-8")
    sys.exit(not all(outcome.is_good for outcome in (*outcomes, *([served] if served else []))))


def _names() -> Iterable[str]:
    return (*(item.name for item in ENVIRONMENTS), _VLLM)


def attempt(environment: Environment, tests: Sequence[str]) -> Outcome:
    """Build an environment and run these tests in it."""
    python = build(environment)
    if python is None:
        return Outcome(environment, f"not tried: there is no python{environment.python} here", {})
    result = versions(python)
    began = time.monotonic()
    if environment.refused:
        done = _run(python, "-m", "ensemble", "validate", "configs/demo.yaml")
        is_refused = done.returncode == 2 and environment.refused in done.stdout
        verdict = "refused by name" if is_refused else f"FAILED: exit {done.returncode}: {done.stdout[-300:]}"
        return Outcome(environment, verdict, result, time.monotonic() - began)
    verdict = _run_tests(python, "-n", "2", "--dist", "worksteal", *tests)
    return Outcome(environment, verdict, result, time.monotonic() - began)


def attempt_vllm() -> Outcome:
    """Install vLLM beside, and let members of the usual environment ask its server."""
    environment, began = Environment(_VLLM, (vllm_environment.TORCH, vllm_environment.VLLM)), time.monotonic()
    try:
        python = vllm_environment.build(PLACE / _VLLM)
    except subprocess.CalledProcessError as error:
        words = (error.stderr or str(error)).strip().splitlines()[-1]
        return Outcome(environment, f"not tried: vLLM cannot be installed here ({words})", {})
    began = time.monotonic()
    os.environ[vllm_environment.PYTHON] = str(python)
    verdict = _run_tests(Path(sys.executable), "-rs", "tests/releases/test_vllm.py")
    return Outcome(environment, verdict, versions(python, vllm_environment.SHOWN), time.monotonic() - began)


def _run_tests(python: Path, *arguments: str) -> str:
    # Warnings of other releases are not this project's.
    pytest = ("-m", "pytest", "-W", "default", "-p", "no:cacheprovider")
    options = ("--part=all", "--show-capture=no", "--tb=short", "-o", "addopts=--import-mode=importlib")
    done = _run(python, *pytest, *options, *arguments)
    summary = re.findall(r"=+ (.*(?:passed|failed|error).*?) in [\d.]+s", done.stdout)
    verdict = summary[-1] if summary else f"exit {done.returncode}"
    if not done.returncode:
        return verdict
    print(done.stdout[-20_000:])
    return f"FAILED: {verdict}"


def build(environment: Environment) -> Path | None:
    """The environment's Python, installed where it is not yet; None where this machine has no such Python."""
    folder = PLACE / environment.name
    python = folder / "bin" / "python"
    wanted = json.dumps([environment.python, *environment.packages])
    stamp = folder / "made-of.json"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    base = sys.executable if not environment.python else shutil.which(f"python{environment.python}")
    if base is None:
        return None
    print(f"{environment.name}: installing {', '.join(environment.packages)} ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([base, "-m", "venv", str(folder)], check=True)
    if not environment.python:  # over .venv: pip takes what is there and adds what differs
        (site,) = folder.glob("lib/python*/site-packages")
        torch = importlib.util.find_spec("torch")
        assert torch is not None
        assert torch.origin is not None
        (site / "below.pth").write_text(f"{Path(torch.origin).parents[1]}\n", encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*pip, *environment.packages], check=True)
    # Where Python may not write bytecode, every process would compile torch and transformers again.
    subprocess.run(
        [str(python), "-m", "compileall", "-q", "-j", "0", str(folder / "lib")], capture_output=True
    )
    stamp.write_text(wanted, encoding="utf-8")
    return python


def versions(python: Path, packages: Sequence[str] = (*_SHOWN, *_SUMMED_UP)) -> dict[str, str]:
    """What is installed for this Python, by package; Python's own version first."""
    code = (
        "import json, platform, sys\nfrom importlib.metadata import version\n"
        "found = {name: version(name) for name in sys.argv[1:]}\n"
        "print(json.dumps({'Python': platform.python_version(), **found}))"
    )
    done = subprocess.run([str(python), "-c", code, *packages], check=True, capture_output=True, text=True)
    content: dict[str, str] = json.loads(done.stdout)
    return content


def _run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Of its own: importing bitsandbytes or peft beside torch 2.6 makes a folder that only an orderly end removes.
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [str(python), *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TMPDIR": folder,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                "ENSEMBLE_TEST_OTHER_RELEASES": "1",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",  # or torch 2.6 starts processes that outlive a test
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def with_table(text: str, outcomes: Sequence[Outcome], served: Outcome | None = None) -> str:
    """The page with a new table between its marks.

    Args:
        served: how the members fared that asked vLLM's server.
    """
    start, end = _MARKS
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    lines = [
        "| environment | " + " | ".join(["Python", *_SHOWN]) + " | outcome |",
        "|---" * (len(_SHOWN) + 3) + "|",
    ]
    for outcome in outcomes:
        cells = [outcome.versions.get(name, "") for name in ("Python", *_SHOWN)]
        lines.append(f"| {outcome.environment.name} | {' | '.join(cells)} | {outcome.verdict} |")
    tried = [outcome.versions for outcome in outcomes if not outcome.environment.refused]
    known = {name: [versions[name] for versions in tried if name in versions] for name in _SUMMED_UP}
    ranges = ", ".join(name_and_range(name, releases) for name, releases in known.items() if releases)
    lines += ["", f"Releases of other packages that were tried: {ranges}."]
    if served is not None:
        releases = ", ".join(f"{name} {release}" for name, release in served.versions.items())
        lines += ["", f"`endpoint` members asked a server ({releases or _VLLM}): {served.verdict}."]
    return f"{before}{start}\n" + "\n".join(lines) + f"\n{end}{after}"


def name_and_range(name: str, releases: Sequence[str]) -> str:
    """Such as ``peft 0.18.0 to 0.21.2``."""
    numbers = {release: [int(part) for part in re.findall(r"\d+", release)] for release in releases}
    oldest, newest = min(releases, key=numbers.__getitem__), max(releases, key=numbers.__getitem__)
    return f"{name} {oldest}" + (f" to {newest}" if newest != oldest else "")


if __name__ == "__main__":
    main()
