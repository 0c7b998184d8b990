"""From a command line to a typed run: Hydra composes the YAML of configs/, pydantic checks every key and type against the dataclasses.

Every mistake comes out as one UserError sentence with the full dotted key and the nearest names. Nothing here knows what values mean:
that is rules.py. Hydra writes no folder, keeps the working directory and installs no logging.
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, TypeAdapter, ValidationError

from pretrain.arguments import SOURCES, prepared, unreadable
from pretrain.command_line import is_main_rank
from pretrain.errors import UserError, nearest, spelled
from pretrain.help_text import help_text
from pretrain.launch_config import FEWEST_SELFTEST_STEPS, SELFTEST_STEPS, VERIFY_KEYS, PlanConfig, VerifyConfig
from pretrain.presets import REQUIRED, register
from pretrain.run_config import RunConfig

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A pretraining command: the run, the assumptions of its plan, whether to stop after planning, and the steps of a self-test or the terms of
    a verification in the run's place (None: the run itself)."""

    run: RunConfig
    plan: PlanConfig
    check: bool
    selftest: int | None = None
    verify: VerifyConfig | None = None


def command_from_arguments(config_name: str = "pretrain") -> Command | None:
    """The command that sys.argv describes; None where Hydra itself answered (`--help`, `--cfg job`). Raises UserError."""
    composed = compose_arguments(config_name)
    return None if composed is None else command_from(composed)


def command_from(composed: DictConfig) -> Command:
    """A composed tree as typed values. Raises UserError for unknown keys, missing values and wrong types."""
    return command_from_tree(resolved(composed))


def command_from_tree(tree: dict[str, Any]) -> Command:
    """A resolved tree as typed values; it is left as it is. Raises UserError like `command_from`."""
    tree = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    plan = typed(PlanConfig, tree.pop("plan", {}), prefix="plan")
    check, selftest, verify = _flag(tree, "check"), _selftest_steps(tree), _verification(tree)
    for key in SOURCES:
        section, _, name = key.partition(".")
        if isinstance(tree.get(section), dict) and tree[section].get(name, {}) is None:
            tree[section][name] = {}  # null says that there is none, also in a preset's file, where {} would be merged
    if isinstance(tree.get("data"), dict) and tree["data"].get("phases", []) is None:
        tree["data"]["phases"] = []
    return Command(run=typed(RunConfig, tree), plan=plan, check=check, selftest=selftest, verify=verify)


def _flag(tree: dict[str, Any], key: str) -> bool:
    value = tree.pop(key, False)
    if not isinstance(value, bool):
        raise UserError(f"{key}={spelled(value)} must be true or false")
    return value


def _selftest_steps(tree: dict[str, Any]) -> int | None:
    wanted, steps = _flag(tree, "selftest"), tree.pop("selftest_steps", None)
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < FEWEST_SELFTEST_STEPS):
        rule = f"be a whole number of at least {FEWEST_SELFTEST_STEPS}, when every parameter has had a gradient"
        raise UserError(f"selftest_steps={spelled(steps)} must {rule}; leave it out for {SELFTEST_STEPS}")
    if steps is not None and not wanted:
        raise UserError(f"selftest_steps={steps} belongs to selftest=true: add it, or leave selftest_steps out")
    return (steps or SELFTEST_STEPS) if wanted else None


def _verification(tree: dict[str, Any]) -> VerifyConfig | None:
    given = {key: value for key in VERIFY_KEYS if (value := tree.pop(key, None)) is not None}
    if given and "verify" not in given:
        raise UserError(f"{next(iter(given))} belongs to verify=resume: add it, or leave {next(iter(given))} out")
    return typed(VerifyConfig, given) if given else None


def resolved(composed: DictConfig) -> dict[str, Any]:
    """A composed tree with its interpolations filled in. Raises UserError."""
    try:
        tree: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"the configuration does not resolve: {_resolution(error)}") from error
    return {str(key): value for key, value in tree.items()}


def compose_arguments(config_name: str) -> DictConfig | None:
    """Lets Hydra read sys.argv; None where Hydra printed something and is done. Raises UserError."""
    register()
    arguments = sys.argv[1:]
    if any(argument == "-m" or argument.startswith("--mu") for argument in arguments):
        raise UserError("--multirun cannot start a second rendezvous inside one torchrun: start one command per point")
    if {"--help", "-h"} & set(arguments):
        if is_main_rank():
            print(help_text(_defaults_of(config_name), _groups(_config_dir(arguments))))
        return None
    sections = {key.partition(".")[0] for key in known_keys(RunConfig) if "." in key} | {"plan"}
    arguments = prepared(arguments, _groups(), sections)
    try:
        if any(argument.startswith("-") for argument in arguments):
            return _hydra_command(config_name, arguments)
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):  # composes once, where a Hydra application composes twice
            return hydra.compose(config_name, arguments)
    except yaml.YAMLError as error:
        raise UserError(f"a configuration file is not YAML: {_one_line(error)}") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(_hydra_sentence(error, config_name, arguments)) from error


def _hydra_command(config_name: str, arguments: list[str]) -> DictConfig | None:
    """Hydra's own flags: --cfg job, --config-dir DIR and the rest."""
    composed: list[DictConfig] = []
    said = io.StringIO()
    before, words = os.environ.get("HYDRA_FULL_ERROR"), sys.argv
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them and leaving
    sys.argv = [words[0], *arguments]
    try:
        with contextlib.ExitStack() as stack:
            if not is_main_rank():  # --cfg answers once, not once per rank
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            stack.enter_context(contextlib.redirect_stderr(said))
            hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(composed.append)()
    except SystemExit as leaving:  # argparse's way of refusing, and of being done
        if leaving.code:
            complaint = said.getvalue().strip().rpartition("\n")[2].rpartition("error: ")[2]
            raise UserError(f"{complaint or leaving.code}; --help shows what there is") from None
    finally:
        sys.argv = words
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
    print(said.getvalue(), end="", file=sys.stderr)
    return composed[0] if composed else None


def typed(kind: type[T], tree: dict[str, Any], prefix: str = "") -> T:
    """`tree` as an instance of a configuration dataclass; `prefix` is the dotted key of the tree. Raises UserError."""
    if not isinstance(tree, dict):
        raise UserError(f"{prefix}={spelled(tree)} must be a group of keys, such as {known_keys(kind, prefix)[0]}=…")
    missing = [key for key, value in _leaves(tree) if value == REQUIRED]
    if missing:
        keys = ", ".join(_join(prefix, key) for key in missing)
        needed = kind is RunConfig and not all(key.startswith("sft.") for key in missing)
        preset = "choose a preset with +model=NAME (--help lists them), or " if needed else ""
        if all(key.startswith(SOURCES) and key.endswith(".weight") for key in missing):
            preset = "the weights of this mixture are not published, and none is made up here; leave a source out with ~data.train.NAME, or "
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
        section = _section(get_type_hints(kind)[item.name])
        if section is not None:
            keys += known_keys(section, keys[-1])
    return keys


def _section(hint: Any) -> type | None:
    """The dataclass that a field holds, maybe or always."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    found = [part for part in parts if isinstance(part, type) and is_dataclass(part)]
    return found[0] if found else None


def _config_dir(arguments: list[str]) -> Path | None:
    """The folder of --config-dir, as Hydra reads it."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    with contextlib.suppress(argparse.ArgumentError):
        return parser.parse_known_args(arguments)[0].config_dir
    return None


def _groups(more: Path | None = None) -> dict[str, list[str]]:
    """Name -> choices of every configuration group of this program: folders of configs/ and of `more`, and nodes of the store."""
    groups: dict[str, list[str]] = {}
    for folder in [path for root in (CONFIGS, more) if root and root.is_dir() for path in root.iterdir() if path.is_dir()]:
        groups.setdefault(folder.name, []).extend(path.stem for path in folder.glob("*.yaml"))
    groups["model"] += [name.removesuffix(".yaml") for name in ConfigStore.instance().repo["model"]]
    return groups | {"hydra": ["default"]}


def _type_sentence(kind: type, error: ValidationError, prefix: str) -> str:
    """The first problem as a sentence."""
    first = error.errors(include_url=False)[0]
    key = _join(prefix, ".".join(str(part) for part in first["loc"][1:]))
    others = f" ({error.error_count() - 1} more like it)" if error.error_count() > 1 else ""
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown key {key}{nearest(key, known_keys(kind, prefix))}{others}"
    if first["type"] == "missing":
        return f"no value for {key}: set {key}=…{others}"
    expected, hint = first["msg"].removeprefix("Input should be "), ""
    if first["type"] == "dataclass_type":
        parts = [known for known in known_keys(kind, prefix) if known.startswith(f"{key}.")]
        expected = f"a group of keys, such as {(parts or [f'{key}.path'])[0]}=…"
    elif first["input"] is None:
        default = _defaults(kind, prefix).get(key, MISSING)
        hint = f"; set {key}=…" if default is MISSING else f"; leave it out for {key}={spelled(default)}"
    elif first["type"] == "string_type":
        hint = f"; quote it: {key}=\"'{spelled(first['input'])}'\""
    return f"{key}={spelled(first['input'])} must be {expected}{hint}{others}"


def _defaults(kind: type, prefix: str) -> dict[str, Any]:
    """Dotted key -> default of every field of a configuration dataclass that has one."""
    found: dict[str, Any] = {}
    for item in fields(kind):
        section, key = _section(get_type_hints(kind)[item.name]), _join(prefix, item.name)
        if section is not None:
            found |= _defaults(section, key)
        elif item.default is not MISSING:
            found[key] = item.default
    return found


def _hydra_sentence(error: Exception, config_name: str, arguments: list[str]) -> str:
    """What Hydra complained about, in one sentence with the nearest names."""
    task = [argument for argument in arguments if argument.startswith(f"{config_name}=")]  # a command of several tasks: the keys of this one
    text = str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        if not group:
            return f"there is no configuration called {choice}: leave --config-name out"
        return f"there is no {group}={choice}{nearest(choice, list(error.options or []))}"
    if isinstance(error, OverrideParseException):
        return unreadable(str(error.override))
    if match := re.match(r"Could not override '([^']+)'", text):
        key = match.group(1).partition("@")[0]
        if key.startswith("sft.") and config_name not in ("finetune", "submit_finetune"):
            return f"{key} belongs to launchers/finetune.py; this is another command"
        if key == "model" and config_name in ("pretrain", "submit", "finetune", "submit_finetune"):
            return "write +model=PRESET with a plus sign: no preset is loaded by default"
        if re.match(r"data\.(train|validation)\.", key):
            return f"{key} is not in the preset: write +{key}=… to add it"
        return f"unknown key {key}{nearest(key, _composed_keys(config_name, task))}"
    if match := re.match(r"Could not delete (?:from config\. )?'([^']*)'", text):
        key = match.group(1)
        there = "; --cfg job shows the sources" if key.startswith(SOURCES) else nearest(key, _composed_keys(config_name, task))
        return f"~{key} removes what is not there{there}"
    if isinstance(error, ConfigCompositionException) and "Multiple values" in text:
        if text.startswith("Multiple values for model"):
            return "write +model=PRESET once: a run has one preset"
        return f"{_one_line(error)}: a preset already chooses it, so write it without the plus sign"
    return f"the configuration does not compose: {_one_line(error)}"


def _composed_keys(config_name: str, task: list[str]) -> list[str]:
    """Dotted names of what a command with no more than its task composes to, and its groups."""
    composed = _defaults_of(config_name, task)
    groups = [group for group in composed.hydra.runtime.choices if not group.startswith("hydra/")]
    tree: Any = OmegaConf.to_container(composed)
    del tree["hydra"]
    leaves = [key for key, _ in _leaves(tree)]
    sections = {key[: match.start()] for key in leaves for match in re.finditer(r"\.", key)}
    return sorted({*groups, *leaves, *sections})


def _defaults_of(config_name: str, task: list[str] | None = None) -> DictConfig:
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra.compose(config_name, task or [], return_hydra_config=True)


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


def _resolution(error: Exception) -> str:
    """What an interpolation lacks, without the names of the classes."""
    text = re.sub(r"(?:KeyError|\w+Error) raised while resolving interpolation: ", "", _one_line(error)).replace('"', "")
    return re.sub(r" full_key: (\S+) object_type=\S+", r" (in \1)", text)


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}".strip(".")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
