"""The 100 GSM8K-style templates of the PyPI package reasoning-gym (Apache 2.0), after GSM-Symbolic (Mirzadeh et al. 2024, arXiv 2410.05229).

The package's own __init__ imports a dozen libraries for its other puzzles, one of them compiled. The templates need none of them: they are loaded
here without it, so that `pip install --no-deps` is enough.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

from pretrain.errors import UserError

Template = Callable[[Random, float], dict[str, Any]]
BROKEN = frozenset((32, 35, 37, 61, 63, 65, 74, 76, 77, 79, 86, 87, 90, 97, 98))
"""Templates that the package's authors mark as in need of a fix."""
_INSTALL = "pip install --no-deps reasoning-gym==0.1.25"
_PACKAGE = "reasoning_gym"
_FOLDERS = (_PACKAGE, f"{_PACKAGE}.arithmetic", f"{_PACKAGE}.arithmetic.gsm_symbolic")
_FILES = ("generators_00_49", "generators_50_99")
_PREFIX = "generate_"


def load_templates() -> dict[int, Template]:
    """Number -> template, without the broken ones. A template makes a problem from random numbers and a difficulty.

    UserError where the package is missing.
    """
    spec = importlib.util.find_spec(_PACKAGE)  # does not run the package
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise UserError(f"the templates are in the package reasoning-gym, which is not installed here; install it: {_INSTALL}")
    with _bare_packages(Path(places[0])):
        try:
            modules = [importlib.import_module(f"{_FOLDERS[-1]}.{name}") for name in _FILES]
        except ImportError as error:
            raise UserError(f"reasoning-gym lacks the templates ({error}); install the version that is tested: {_INSTALL}") from error
    found = {int(name.removeprefix(_PREFIX)): getattr(module, name) for module in modules for name in vars(module) if name.startswith(_PREFIX)}
    return {number: found[number] for number in sorted(set(found) - BROKEN)}


@contextmanager
def _bare_packages(root: Path) -> Iterator[None]:
    """The package and its folders as modules that run no __init__; whatever was imported before comes back afterwards."""
    before = {name: module for name, module in sys.modules.items() if name == _PACKAGE or name.startswith(f"{_PACKAGE}.")}
    for name in before:
        del sys.modules[name]
    for name in _FOLDERS:
        bare = ModuleType(name)
        bare.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = bare
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name == _PACKAGE or name.startswith(f"{_PACKAGE}.")]:
            del sys.modules[name]
        sys.modules.update(before)
