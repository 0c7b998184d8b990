"""What `--help` prints: the template of the command's YAML file with its groups, presets by objective, lines wrapped.

Hydra would fill in the template too, but it copies every preset of the ladder for every group that it lists, which takes ten seconds.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from string import Template

from omegaconf import DictConfig, OmegaConf

from pretrain.presets import LADDER, LADDER_OBJECTIVES

WIDTH = 110
PRESETS = "model"


def help_text(composed: DictConfig, choices: Mapping[str, Sequence[str]]) -> str:
    """The help of a command that composes to this, with its hydra node; `choices` of every group there is. Only groups that it reads are shown."""
    own = {PRESETS, *(group for group in composed.hydra.runtime.choices if group in choices)}
    groups = [line for group in sorted(own) for line in _lines(group, choices[group])]
    config = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    return Template(composed.hydra.help.template).substitute(APP_CONFIG_GROUPS="\n".join(groups), CONFIG=OmegaConf.to_yaml(config))


def _lines(group: str, choices: Sequence[str]) -> Iterator[str]:
    if group != PRESETS:
        yield from _wrapped(f"{group}: ", ", ".join(sorted(choices)))
        return
    yield f"{group}:"
    ladder = {f"{objective}_{size}" for objective in LADDER_OBJECTIVES for size in LADDER}
    named = [choice for choice in choices if choice not in ladder]
    by_length = sorted(LADDER_OBJECTIVES, key=len, reverse=True)
    owners = {name: next((owner for owner in by_length if name.startswith(f"{owner}_")), "others") for name in named}
    for owner in (*LADDER_OBJECTIVES, "others"):
        own = sorted((name for name in named if owners[name] == owner), key=lambda name: ("tiny" in name, len(name), name))
        if own:
            yield from _wrapped(f"  {owner}: ", ", ".join(own))
    sizes, objectives = ", ".join(sorted(LADDER, key=lambda size: int(size[:-1]))), ", ".join(LADDER_OBJECTIVES)
    yield from _wrapped("  ladder: ", f"OBJECTIVE_SIZE, such as mdlm_231M, with OBJECTIVE one of {objectives}, and SIZE one of {sizes}")


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False, break_on_hyphens=False)
