"""The tasks of launchers/convert.py: name -> (its configuration, where what it does is found).

The second is MODULE:FUNCTION, imported when the task is chosen: torch takes seconds, and a mistake on the command line should not wait for it.
"""

import importlib
from collections.abc import Callable
from typing import Any

from pretrain.convert.config import HubConfig, ImportConfig, UniversalConfig, WeightsConfig, ZeroConfig

TASKS: dict[str, tuple[type, str]] = {
    "hf": (HubConfig, "pretrain.convert.hub_export:export_to_hub"),
    "checkpoint": (ImportConfig, "pretrain.convert.hub_import:import_from_hub"),
    "universal": (UniversalConfig, "pretrain.convert.relayout:to_universal"),
    "zero": (ZeroConfig, "pretrain.convert.relayout:to_zero"),
    "weights": (WeightsConfig, "pretrain.convert.relayout:to_weights"),
}


def action(task: str) -> Callable[[Any], object]:
    """What a task does with its configuration."""
    module, _, name = TASKS[task][1].partition(":")
    found: Callable[[Any], object] = getattr(importlib.import_module(module), name)
    return found
