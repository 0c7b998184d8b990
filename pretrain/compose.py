"""From a command line to a typed run: Hydra composes the YAML of configs/, pydantic checks every key and type against the dataclasses.

Every mistake comes out as one UserError sentence with the full dotted key and the nearest names. Nothing here knows what values mean:
that is rules.py. Hydra writes no folder, keeps the working directory and installs no logging.
"""

import contextlib
import difflib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import hydra
import yaml
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, TypeAdapter, ValidationError

from pretrain.command_line import is_main_rank
from pretrain.errors import UserError
from pretrain.launch_config import PlanConfig
from pretrain.presets import REQUIRED, register
from pretrain.run_config import RunConfig

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A pretraining command: the run, the assumptions of its plan, and whether to stop after planning."""

    run: RunConfig
    plan: PlanConfig
    check: bool


def command_from_arguments(config_name: str = "pretrain") -> Command | None:
    """The command that sys.argv describes; None where Hydra itself answered (`--help`, `--cfg job`). Raises UserError."""
    composed = compose_arguments(config_name)
    return None if composed is None else command_from(composed)


def command_from(composed: DictConfig) -> Command:
    """A composed tree as typed values. Raises UserError for unknown keys, missing values and wrong types."""
    try:
        tree: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"the configuration does not resolve: {_one_line(error)}") from error
    plan = typed(PlanConfig, tree.pop("plan", {}), prefix="plan")
    check = tree.pop("check", False)
    if not isinstance(check, bool):
        raise UserError(f"check={check} must be true or false")
    return Command(run=typed(RunConfig, tree), plan=plan, check=check)


def compose_arguments(config_name: str) -> DictConfig | None:
    """Lets Hydra read sys.argv; None where Hydra printed something and is done. Raises UserError."""
    register()
    arguments = sys.argv[1:]
    if any(argument in ("-m", "--multirun") for argument in arguments):
        raise UserError("--multirun cannot start a second rendezvous inside one torchrun: start one command per point")
    try:
        if any(argument.startswith("-") for argument in arguments):
            return _hydra_command(config_name)
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):  # composes once, where a Hydra application composes twice
            return hydra.compose(config_name, arguments)
    except yaml.YAMLError as error:
        raise UserError(f"a configuration file is not YAML: {_one_line(error)}") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(_hydra_sentence(error, config_name)) from error


def _hydra_command(config_name: str) -> DictConfig | None:
    """Hydra's own flags: --help, --cfg job, --config-dir DIR and the rest."""
    composed: list[DictConfig] = []
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them and leaving
    try:
        with contextlib.ExitStack() as stack:
            if not is_main_rank():  # --help and --cfg answer once, not once per rank
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(composed.append)()
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
    return composed[0] if composed else None


def typed(kind: type[T], tree: dict[str, Any], prefix: str = "") -> T:
    """`tree` as an instance of a configuration dataclass; `prefix` is the dotted key of the tree. Raises UserError."""
    missing = [key for key, value in _leaves(tree) if value == REQUIRED]
    if missing:
        keys = ", ".join(_join(prefix, key) for key in missing)
        preset = "choose a preset with +model=NAME (--help lists them), or " if kind is RunConfig else ""
        raise UserError(f"no value for {keys}: {preset}set {'each key' if len(missing) > 1 else f'{keys}=…'}")
    adapter = TypeAdapter(list[kind], config=ConfigDict(extra="forbid"))  # type: ignore[valid-type]  # a dataclass alone takes no config
    try:
        # JSON, because pydantic's strict mode takes a mapping for a dataclass only from there; strict, because 'true' is not a number.
        return adapter.validate_json(json.dumps([_whole_numbers(tree)]), strict=True)[0]
    except ValidationError as error:
        raise UserError(_type_sentence(kind, error, prefix)) from error


def known_keys(kind: type, prefix: str = "") -> list[str]:
    """Dotted names of every field of a configuration dataclass, sections included."""
    keys = []
    for item in fields(kind):
        if item.metadata.get("derived"):
            continue
        keys.append(_join(prefix, item.name))
        hint = get_type_hints(kind)[item.name]
        if isinstance(hint, type) and is_dataclass(hint):
            keys += known_keys(hint, keys[-1])
    return keys


def _type_sentence(kind: type, error: ValidationError, prefix: str) -> str:
    """The first problem as a sentence."""
    first = error.errors(include_url=False)[0]
    key = _join(prefix, ".".join(str(part) for part in first["loc"][1:]))
    others = f" ({error.error_count() - 1} more like it)" if error.error_count() > 1 else ""
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown key {key}{_nearest(key, known_keys(kind, prefix))}{others}"
    if first["type"] == "missing":
        return f"no value for {key}: set {key}=…{others}"
    expected = first["msg"].removeprefix("Input should be ").replace("an object", "a group of keys")
    hint = ""
    if first["type"] == "string_type":
        hint = f"; quote it: {key}=\"'{first['input']}'\""
    return f"{key}={first['input']} must be {expected}{hint}{others}"


def _hydra_sentence(error: Exception, config_name: str) -> str:
    """What Hydra complained about, in one sentence with the nearest names."""
    text = str(error)
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return f"there is no {group}={choice}{_nearest(choice, list(error.options))}"
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r} on the command line: write key=value, and quote values that hold , : = or spaces"
    if match := re.match(r"Could not override '([^']+)'", text):
        key = match.group(1).partition("@")[0]
        if key == "model" and config_name == "pretrain":
            return "write +model=PRESET with a plus sign: no preset is loaded by default"
        if re.match(r"data\.(train|validation)\.", key):
            return f"{key} is not in the preset: write +{key}=… to add it"
        return f"unknown key {key}{_nearest(key, _composed_keys(config_name))}"
    if isinstance(error, ConfigCompositionException) and "Multiple values" in text:
        return f"{_one_line(error)}: a preset already chooses it, so write it without the plus sign"
    return f"the configuration does not compose: {_one_line(error)}"


def _composed_keys(config_name: str) -> list[str]:
    """Dotted names of what a command without arguments composes to, and its groups."""
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        composed = hydra.compose(config_name, return_hydra_config=True)
    groups = [group for group in composed.hydra.runtime.choices if not group.startswith("hydra/")]
    tree: Any = OmegaConf.to_container(composed)
    del tree["hydra"]
    leaves = [key for key, _ in _leaves(tree)]
    sections = {key[: match.start()] for key in leaves for match in re.finditer(r"\.", key)}
    return sorted({*groups, *leaves, *sections})


def _nearest(name: str, options: list[str]) -> str:
    """`; did you mean …?`, or the options themselves where none is near."""
    near = difflib.get_close_matches(name, options, n=3, cutoff=0.6)
    if not near:
        near = difflib.get_close_matches(name.rpartition(".")[2], [option.rpartition(".")[2] for option in options], n=3, cutoff=0.7)
        near = [option for option in options if option.rpartition(".")[2] in near][:3]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; known: {', '.join(sorted(options))}" if len(options) <= 12 else "; --help lists the groups, --cfg job every key"


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, _join(prefix, str(key)))
        else:
            yield _join(prefix, str(key)), value


def _whole_numbers(value: Any) -> Any:
    """1e6 is a float to YAML; where it is whole, an integer field may take it."""
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}".strip(".")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
