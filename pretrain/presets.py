"""Presets made from tables rather than files: the defaults of every key, and the model ladder of the scaling study for each objective.

`register()` puts them into Hydra's ConfigStore, beside the YAML files of configs/, so `+model=mdlm_231M` works and `--help` lists it.
"""

from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore

from pretrain.data.sft_config import SFTConfig
from pretrain.launch_config import VERIFY_KEYS, PlanConfig
from pretrain.run_config import RunConfig
from pretrain.submit_config import SubmitConfig

REQUIRED = "???"
"""Hydra's mark for a value that a preset or the command line must give."""

LADDER: dict[str, tuple[int, int, int]] = {
    "6M": (256, 6, 4),
    "19M": (384, 8, 6),
    "34M": (512, 8, 8),
    "48M": (576, 9, 9),
    "66M": (640, 10, 10),
    "85M": (640, 13, 10),
    "75M": (640, 16, 8),
    "113M": (768, 12, 12),
    "142M": (768, 15, 12),
    "170M": (768, 18, 12),
    "180M": (896, 14, 14),
    "206M": (896, 16, 14),
    "231M": (896, 18, 14),
    "268M": (1024, 16, 16),
    "302M": (1024, 18, 16),
    "336M": (1024, 20, 16),
    "472M": (1280, 18, 10),
    "551M": (1280, 21, 10),
    "571M": (1408, 18, 11),
    "629M": (1280, 24, 10),
    "666M": (1408, 21, 11),
    "717M": (1536, 19, 12),
    "761M": (1408, 24, 11),
    "831M": (1536, 22, 12),
    "944M": (1536, 25, 12),
    "1028M": (1792, 20, 14),
    "1233M": (1792, 24, 14),
    "1476M": (2048, 22, 16),
    "1678M": (2048, 25, 16),
    "2121M": (2176, 28, 17),
}
"""Name -> (hidden, layers, heads): the DiT sizes of scaling-dllms. The names are SMDM's, which count 16 n d^2 for SwiGLU; a DiT has 12 n d^2."""

LADDER_OBJECTIVES = ("ar", "mdlm", "duo", "esolm", "replaid", "mdm_prime")

LADDER_VOCABULARY = 32001
"""The Llama-2 tokenizer's 32000 pieces and a mask."""


def defaults_tree(kind: type) -> dict[str, Any]:
    """Every key of a configuration dataclass with its default, `???` where there is none: so a command line may set any key without `+`.
    Derived fields are not keys."""
    hints = get_type_hints(kind)
    tree: dict[str, Any] = {}
    for item in fields(kind):
        if item.metadata.get("derived"):
            continue
        if is_dataclass(hints[item.name]):
            tree[item.name] = defaults_tree(hints[item.name])
        elif item.default_factory is not MISSING:
            tree[item.name] = item.default_factory()
        else:
            tree[item.name] = REQUIRED if item.default is MISSING else item.default
    return tree


def ladder_preset(size: str, objective: str) -> dict[str, Any]:
    """One rung as a Hydra node: the shape of the network, and the recipe that every rung shares.

    MDM-Prime has SMDM's Llama-style network of the same width, depth and heads (SwiGLU of width 4 d, hence the sizes' names), and no mask
    in its vocabulary: 15 binary digits.
    """
    hidden, layers, heads = LADDER[size]
    prime = objective == "mdm_prime"
    overrides = {"objective": objective, "backbone": "llama" if prime else "dit", "data": "slimpajama_llama2", "recipe": "scaling"}
    return {
        "defaults": [{f"override /{group}": choice} for group, choice in overrides.items()],
        "name": f"{objective}_{size}",
        "backbone": {"hidden": hidden, "layers": layers, "heads": heads},
        "plan": {"vocabulary": LADDER_VOCABULARY - prime},
    }


@cache
def register() -> None:
    """Adds the generated nodes to Hydra's ConfigStore; calling it twice changes nothing."""
    store = ConfigStore.instance()
    commands = {"plan": defaults_tree(PlanConfig), "check": False, "selftest": False, "selftest_steps": None} | dict.fromkeys(VERIFY_KEYS)
    store.store(name="run_defaults", node=defaults_tree(RunConfig) | commands, package="_global_")
    store.store(name="sft_defaults", node={"sft": defaults_tree(SFTConfig)}, package="_global_")
    store.store(name="submit_defaults", node=defaults_tree(SubmitConfig), package="_global_")
    for objective in LADDER_OBJECTIVES:
        for size in LADDER:
            store.store(group="model", name=f"{objective}_{size}", node=ladder_preset(size, objective), package="_global_")
