"""Imports torch and transformers without what scoring texts never needs: half of a worker's start-up.

What is left out:

* garbage collections while a million objects are made, all of which stay;
* ``torch.distributed.tensor`` and its kin.  transformers asks ``torch.distributed.is_available()`` first, because
  some builds of torch lack them, and a worker is never one of several ranks;
* ``torch._dynamo``, the compiler: transformers decorates functions with it.  ``torch.compile`` still works, and
  imports it then;
* ``scipy.optimize``, where scipy is installed: the losses of object detection take one function of it;
* sympy.  While a model has no memory yet (on the meta device), torch asks of each size whether it is a symbol;
* reading all of transformers' models twice, each time line by line, for the names that they export.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ensemble.members.huggingface.loading.lazy_modules import (
    after_import,
    call_later,
    class_later,
    forget,
    forget_all,
    mark_later,
    plain_later,
    wait,
    wrap_later,
)

_DYNAMO = "torch._dynamo"
_DECORATORS = {"disable": wrap_later, "allow_in_graph": mark_later, "assume_constant_result": mark_later}
# transformers' masking_utils imports it by itself; in torch it stands apart from the compiler.
_TRANSFORM = f"{_DYNAMO}._trace_wrapped_higher_order_op"

# What these say of plain values, beside symbols (torch/fx/experimental/symbolic_shapes.py).
_PLAIN: dict[str, tuple[Callable[[Any], bool], Callable[..., Any]]] = {
    **dict.fromkeys(
        (
            *("expect_true", "guard_bool", "guard_or_false", "guard_or_true"),
            *("guard_size_oblivious", "statically_known_true"),
        ),
        (lambda value: type(value) is bool, lambda value: value),
    ),
    "sym_and": (lambda value: type(value) is bool, lambda *values: all(values)),
    "sym_or": (lambda value: type(value) is bool, lambda *values: any(values)),
    "sym_eq": (lambda value: _is_shape(value), lambda one, other: tuple(one) == tuple(other)),
    "is_nested_int": (lambda value: type(value) is int, lambda value: False),
}
_SYMBOLS = {
    **{name: plain_later(is_plain, answer) for name, (is_plain, answer) in _PLAIN.items()},
    # Imported beside those, and asked of symbols only.
    **dict.fromkeys(("guarding_hint_or_throw", "has_guarding_hint"), call_later),
}


def import_torch_and_transformers() -> None:
    """Import both, lean; what another release of theirs has elsewhere is imported in the ordinary way.

    Where that fails, or ``ENSEMBLE_PLAIN_IMPORTS`` is set, both are imported as anybody would.  Does nothing to
    them where transformers is imported already.

    Raises:
        ImportError: one of them is missing or broken.
    """
    import torch

    if "transformers" not in sys.modules and not os.environ.get("ENSEMBLE_PLAIN_IMPORTS"):
        really_available = getattr(torch.distributed, "is_available", None)
        try:
            _leave_out(torch)
            # transformers imports a name when somebody asks for it: these bring in what a worker needs.
            _import_all()
        except Exception as error:
            logging.getLogger(__name__).warning("importing everything after all: %r", error)
            if really_available is not None:
                torch.distributed.is_available = really_available
            forget_all()
            for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
                del sys.modules[name]
    _import_all()


def _import_all() -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer  # noqa: F401
    from transformers.modeling_layers import GenericForSequenceClassification  # noqa: F401


def _leave_out(torch: Any) -> None:
    _hide_distributed(torch.distributed)
    _let_compiler_wait()
    wait("scipy.optimize", {"linear_sum_assignment": call_later})
    wait("sympy", {"Basic": class_later("torch._prims_common")})
    wait("torch.fx.experimental.symbolic_shapes", _SYMBOLS)
    after_import("transformers.utils.import_utils", _look_once)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Without garbage collections; what has been made by the end is not looked through ever again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def _hide_distributed(distributed: Any) -> None:
    """Let transformers, and nobody else, believe that this torch was built without ``torch.distributed``."""
    really = getattr(distributed, "is_available", None)
    if really is None:
        return

    @functools.wraps(really)
    def is_available() -> bool:
        asking = sys._getframe(1).f_globals.get("__name__") or ""
        return not asking.startswith("transformers.") and really()

    distributed.is_available = is_available


def _let_compiler_wait() -> None:
    if not wait(_DYNAMO, _DECORATORS, alone=[_TRANSFORM]):
        return
    try:
        importlib.import_module(_TRANSFORM)
    except ImportError:  # in this release it does not stand apart, or is not there
        forget(_DYNAMO)


def _is_shape(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(type(size) is int for size in value)


def _look_once(import_utils: ModuleType) -> None:
    """Let transformers read its models once, and of each file what follows the last ``__all__`` of a line's start.

    ``fetch__all__`` looks for the last line that starts so, hence finds the same there.
    """
    find = getattr(import_utils, "fetch__all__", None)
    scan = getattr(import_utils, "create_import_structure_from_path", None)
    if find is None or scan is None:
        return
    known: dict[str, dict[Any, Any]] = {}

    @functools.wraps(find)
    def find_at_the_end(text: str) -> Any:
        return find(text[text.rfind("\n__all__") + 1 :])

    @functools.wraps(scan)
    def scan_once(path: Any) -> dict[Any, Any]:
        # A file stands for its folder.
        folder = str(Path(path).parent if Path(path).is_file() else path)
        if folder not in known:
            known[folder] = scan(folder)
        return _copied(known[folder])

    import_utils.fetch__all__ = find_at_the_end  # type: ignore[attr-defined]
    import_utils.create_import_structure_from_path = scan_once  # type: ignore[attr-defined]


def _copied(structure: dict[Any, Any]) -> dict[Any, Any]:
    """Folders, modules and their sets of names anew: whoever asked may change them."""
    return {
        key: _copied(value) if isinstance(value, dict) else set(value) for key, value in structure.items()
    }
