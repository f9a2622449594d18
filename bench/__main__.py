"""Measures this project against other ways to do the same: ``make bench``, or ``python -m bench --help``.

Prints a markdown table, what is done so far also after Ctrl-C.  Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from bench import document
from bench.checkpoints import DECODERS, WORDS_FILE
from bench.contests import MAX_LENGTH, OURS, QUICK_ROWS, ROOT, TARGETS, WORKS, Ground, Target, Work
from bench.data import Words, Writer
from bench.machine import cores
from bench.processes import Failed, measure
from bench.rounds import Found, hold_rounds, say
from bench.sections import SECTIONS, Section

SHARES = 8  # of the rows and sections, as in tests/sampling.py
_SEED = 20
_INTERRUPTED = 130
_WARM_ROWS = 8
_PEERS = "import sentence_transformers, transformers.pipelines, sklearn.metrics"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command.

    Returns:
        0; 1 where a contestant failed or computed something else; 130 after Ctrl-C.  A target that is missed is
        no error.
    """
    options = _parser().parse_args(arguments)
    targets = [one for one in TARGETS if _is_chosen(options.only, one.title, one.work, one.against)]
    chosen = [one for one in SECTIONS if _is_chosen(options.only, one.name, one.title)]
    if not targets and not chosen:
        say(f"--only {options.only}: there is {', '.join(t.title for t in TARGETS)}, "
            f"{', '.join(s.title for s in SECTIONS)}")  # fmt: skip
        return 2
    if any(target.against == "cross_encoder" for target in targets) and not find_spec(
        "sentence_transformers"
    ):
        say("sentence-transformers is missing: pip install -e '.[bench]', or leave its row out with --only")
        return 2
    if options.share is not None:
        targets, chosen = targets[options.share :: SHARES], chosen[options.share :: SHARES]
    works = [work for work in WORKS if any(target.work == work.name for target in targets)]
    if options.quick:
        works = [replace(work, models=work.models[: work.quick_models], rows=QUICK_ROWS) for work in works]
    rows = {work.name: options.rows or work.rows for work in works}
    repeats = options.repeats or (1 if options.quick else 3)
    # A short one says nothing about speed: a work for each core, all of them in one thread.
    at_once = cores() if options.quick else 1
    environment = _environment(threads=cores() // at_once)
    found, sections, code = Found(), dict[str, Sequence[Mapping[str, object]] | str](), 0
    with tempfile.TemporaryDirectory(prefix="ensemble bench ") as folder:
        try:
            if works:
                ground = _prepare(Path(folder), works, rows, environment, warm=not options.quick)
                contestants = {work.name: _against(work, targets) for work in works}
                hold_rounds(ground, works, contestants, repeats, found, at_once)
            for section in chosen:
                code |= _measure_section(section, options.quick, repeats, sections)
        except Failed as error:  # before the first round
            say(str(error))
            return 1
        except KeyboardInterrupt:
            say("interrupted: what follows is what was done")
            code = _INTERRUPTED
    judged = not options.quick and not options.rows
    text = document.text_of(
        targets, works, rows, found, sections, _settings(arguments, repeats, environment), judged
    )
    print(text, flush=True)
    if options.write and code != _INTERRUPTED:
        on_page = {section.title for section in chosen if section.on_page}
        shown = {title: content for title, content in sections.items() if title in on_page}
        page = document.page_of(targets, rows, found, shown, _settings(arguments, repeats, environment))
        document.write(options.write, page)
    return code or int(bool(found.problems))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, one round: does it all work?")
    parser.add_argument(
        "--share",
        type=int,
        choices=range(SHARES),
        metavar="N",
        help=f"every {SHARES}th of them, from this place on",
    )
    parser.add_argument("--rows", type=int, metavar="N", help="rows of every table, for a trial")
    parser.add_argument("--repeats", type=int, metavar="K", help="rounds; 3 where nothing is said")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="rows and sections that have this in their names"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="put its tables between the marks of this file"
    )
    return parser


def _is_chosen(only: str, *names: str) -> bool:
    return any(only.lower() in name.lower() for name in names)


def _against(work: Work, targets: Sequence[Target]) -> list[str]:
    wanted = {target.against for target in targets if target.work == work.name}
    wanted |= {target.ours for target in targets if target.work == work.name}
    return [contestant for contestant in work.contestants if contestant in wanted]


def _prepare(
    folder: Path, works: Sequence[Work], rows: Mapping[str, int], environment: Mapping[str, str], warm: bool
) -> Ground:
    """Checkpoints, tables and configs; and everybody's libraries in the page cache."""
    say("making checkpoints and tables ...")
    checkpoints = folder / "checkpoints"
    make = [sys.executable, "-m", "bench.checkpoints", str(checkpoints)]
    measure([make], ROOT, environment, folder / "checkpoints.log")
    known = json.loads((checkpoints / WORDS_FILE).read_text(encoding="utf-8"))
    words = Words(tuple(known["words"]), tuple(known["tokens"]))
    ground = Ground(folder, environment)
    for work in works:
        ground.prepare(work, rows[work.name], Writer(words, _SEED))
    if warm:
        say("reading everybody's libraries once ...")
        first = Work("warm", "single", DECODERS[:1], _WARM_ROWS, 1, ())
        ground.prepare(first, _WARM_ROWS, Writer(words, _SEED))
        ground.run(first, OURS)
        measure([[sys.executable, "-c", _PEERS]], folder, environment, folder / "warm.log")
    return ground


def _environment(threads: int) -> dict[str, str]:
    """The same for all: threads, no network, bytecode kept as it is for users."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true",
        **inherited,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))),
    }


def _settings(arguments: Sequence[str] | None, repeats: int, environment: Mapping[str, str]) -> str:
    said = shlex.join(sys.argv[1:] if arguments is None else arguments)
    return (
        f"`python -m bench {said}`".replace(" `", "`")
        + f": rounds: {repeats}, contestants in turn; float32 on the CPU, rows cut at {MAX_LENGTH} tokens, "
        f"OMP_NUM_THREADS={environment['OMP_NUM_THREADS']}, "
        f"TOKENIZERS_PARALLELISM={environment['TOKENIZERS_PARALLELISM']}, for all."
    )


def _measure_section(
    section: Section,
    quick: bool,
    repeats: int,
    sections: dict[str, Sequence[Mapping[str, object]] | str],
) -> int:
    try:
        sections[section.title] = section.run(quick, repeats)
    except Failed as error:
        say(f"{section.title} FAILED: {error}")
        sections[section.title] = f"FAILED: {error}"
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
