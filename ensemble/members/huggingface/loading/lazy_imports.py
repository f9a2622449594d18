"""Lazy imports: torch and transformers without what scoring texts never needs, for half the CPU time of a start.

What is left out:

* garbage collections while a million objects are made, all of which stay;
* the compiler ``torch._dynamo``, sympy and ``scipy.optimize``, which transformers and torch import for a decorator,
  a check or one function.  Each has a stand-in that makes way for the real module once more is asked of it;
* ``torch.distributed.tensor`` and its kin: a worker is never one of several ranks;
* reading all of transformers' models twice for the names that they export.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

# In torch's package of the compiler, but not a part of it; transformers' masking_utils imports it.
_APART = "torch._dynamo._trace_wrapped_higher_order_op"

# What torch.fx.experimental.symbolic_shapes says of sizes that are plain numbers, while a model has no memory yet
# (on the meta device); None: asked of symbols only, and imported beside the others.
OF_SIZES: dict[str, Callable[..., Any] | None] = {
    **dict.fromkeys(
        (
            *("expect_true", "definitely_true", "statically_known_true", "guard_bool", "guard_or_false"),
            *("guard_or_true", "guard_size_oblivious"),
        ),
        lambda value: value,
    ),
    "sym_and": lambda *values: all(values),
    "sym_or": lambda *values: any(values),
    "sym_eq": lambda one, other: tuple(one) == tuple(other),
    **dict.fromkeys(("has_free_unbacked_symbols", "is_nested_int"), lambda value: False),
    **dict.fromkeys(("guarding_hint_or_throw", "has_guarding_hint", "size_hint")),
}


def import_torch_and_transformers() -> None:
    """Import both and all that a member needs, lazily; plainly where that fails or ENSEMBLE_PLAIN_IMPORTS is set.

    Does nothing to them where transformers is imported already.

    Raises:
        ImportError: one of them is missing or broken.
    """
    import torch

    if "transformers" not in sys.modules and not os.environ.get("ENSEMBLE_PLAIN_IMPORTS"):
        is_available = torch.distributed.is_available
        try:
            # While transformers is imported, for it alone: this torch was built without torch.distributed.
            torch.distributed.is_available = lambda: False
            for name, known in _left_out().items():
                package, _, _ = name.rpartition(".")
                with contextlib.suppress(ImportError):  # SciPy need not be there
                    path = importlib.import_module(package).__path__ if package else None
                    spec = PathFinder.find_spec(name, path)
                    if name not in sys.modules and spec is not None:
                        sys.modules[name] = StandIn(name, spec, known)
            sys.meta_path.insert(0, _Submodules())
            _read_models_once()
            _import_all()
        except Exception as error:
            logging.getLogger(__name__).warning("importing everything after all: %r", error)
            torch.distributed.is_available = is_available
            for module in list(sys.modules.values()):
                if isinstance(module, StandIn):
                    module.make_way()
            for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
                del sys.modules[name]
        finally:
            torch.distributed.is_available = is_available
    _import_all()


def import_libraries(predictor: str) -> Mapping[str, str]:
    """What importing takes for a kind whose predictor is this module, all of it as part of start-up.

    Returns:
        the versions of what was imported, by name.
    """
    with no_collections():
        import_torch_and_transformers()
        importlib.import_module(predictor)

    import torch
    import transformers

    names = ("accelerate", "bitsandbytes", "pyarrow", "tokenizers")
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "transformers": transformers.__version__,
        **{name: version(name) for name in names if find_spec(name) is not None},
    }


def set_threads(count: int) -> None:
    """Have torch compute with so many threads, though it may have been imported without knowing them."""
    import torch

    torch.set_num_threads(count)


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


class StandIn(ModuleType):
    """Has a few names of a module that is imported once any other is asked for, or a submodule.

    What its names stand for must be right as long as the module is not there: before sympy is imported nothing is
    an instance of its ``Basic``, and torch's checks of sizes meet no symbols.

    Args:
        names: their values; None: a function that is the module's own once it is called.
    """

    def __init__(self, name: str, spec: ModuleSpec, names: Mapping[str, Any]) -> None:
        super().__init__(name)
        vars(self).update(__spec__=spec, __path__=spec.submodule_search_locations, _names=tuple(names))
        for known, value in names.items():
            setattr(self, known, self._later(known) if value is None else value)

    def __getattr__(self, name: str) -> Any:
        # Whoever goes through all of sys.modules asks for such names (inspect, warnings), and wants nothing.
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self.make_way(), name)

    def _later(self, name: str) -> Callable[..., Any]:
        return lambda *values, **named: getattr(self.make_way(), name)(*values, **named)

    def make_way(self) -> ModuleType:
        """The real module, imported as ever."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            for name in self._names:  # whoever holds the stand-in gets the real ones, too
                delattr(self, name)
        return importlib.import_module(self.__name__)


class _Submodules(MetaPathFinder, Loader):
    """Lets a stand-in make way before the first of its package's submodules is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = sys.modules.get(fullname.rpartition(".")[0])
        if not isinstance(package, StandIn) or fullname == _APART:
            return None
        package.make_way()
        # Most likely the package has imported it, and the import that asked must not make a second one.
        if (made := sys.modules.pop(fullname, None)) is None:
            return None
        return ModuleSpec(fullname, self, loader_state=made, is_package=hasattr(made, "__path__"))

    def create_module(self, spec: ModuleSpec) -> Any:
        return spec.loader_state

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing left to do."""


def _left_out() -> dict[str, Mapping[str, Any]]:
    """Modules, and what their stand-ins know."""

    def undecorated(function: Any = None, *_: object, **__: object) -> Any:
        return undecorated if function is None else function

    return {
        "torch._dynamo": dict.fromkeys(("disable", "allow_in_graph", "assume_constant_result"), undecorated),
        "sympy": {"Basic": type("Basic", (), {})},
        "torch.fx.experimental.symbolic_shapes": OF_SIZES,
        "scipy.optimize": {"linear_sum_assignment": None},  # for the losses of object detection
    }


def _import_all() -> None:
    # transformers imports a name when somebody asks for it: these bring in what a worker needs.
    from transformers import (  # noqa: F401
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )
    from transformers.modeling_layers import GenericForSequenceClassification  # noqa: F401


def _read_models_once() -> None:
    """Give transformers' package of models the names that transformers itself has read from its files just now."""
    import transformers
    from transformers.utils import import_utils

    define, models = import_utils.define_import_structure, Path(transformers.__file__).parent / "models"

    def define_once(path: Any, prefix: str | None = None) -> Any:
        if prefix is not None or Path(path) != models / "__init__.py":
            return define(path, prefix)
        known = define(models, prefix="models")  # as transformers asks: it keeps the answer, and adds to it
        return {
            needs: {name[7:]: exported for name, exported in modules.items() if name.startswith("models.")}
            for needs, modules in known.items()
        }

    import_utils.define_import_structure = define_once
