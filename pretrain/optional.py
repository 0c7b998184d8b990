"""Libraries that a run may do without: imported when they are needed, and named with the command that installs them when they are missing."""

import importlib
from types import ModuleType

from pretrain.errors import UserError


def require(module: str, purpose: str, install: str) -> ModuleType:
    """Import `module`, or say what it is for and what installs it.

    purpose  completes "is needed for …", for example "FP8 matrix products".
    install  the command, for example "pip install -e '.[gpu]'".

    Raises UserError if the library, or something that it imports, is missing or broken.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{module} is needed for {purpose} and cannot be imported ({error}); install it with: {install}") from error
