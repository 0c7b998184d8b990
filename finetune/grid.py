"""A grid of fine-tuning runs: one torchrun for every combination of values, one after another, and a table of what they came to.

Every point is a run of its own, NAME-peak0.0001-final1e-05, and is continued like any run: the same command goes on where it was stopped.
"""

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pretrain.checkpoint.files import replace_durably
from pretrain.compose import known_keys
from pretrain.errors import UserError, nearest, spelled
from pretrain.preemption import INTERRUPTED_EXIT, PREEMPTED_EXIT, Stopped, die_with_parent, exit_code
from pretrain.ranges import NAME_LENGTH
from pretrain.run_config import RunConfig
from pretrain.telemetry.log import LOG_NAME, number, read_log

MOST_POINTS = 1000
_OWN = ("name", "root", "resume")
"""Keys that say where a run is: of the grid as a whole."""


@dataclass(frozen=True)
class Grid:
    """Key -> its values; ranks of each run."""

    values: dict[str, list[Any]]
    ranks: int

    def points(self) -> list[dict[str, Any]]:
        """Every combination, the last key's values changing first."""
        return [dict(zip(self.values, point, strict=True)) for point in itertools.product(*self.values.values())]


@dataclass(frozen=True)
class Outcome:
    """What one point came to. Nats are per scored token, nan where there are none; `exit_code` is torchrun's, 0 for a whole run."""

    run: str
    settings: dict[str, Any]
    exit_code: int
    steps: int
    train_loss_nats_per_token: float
    validation_nats_per_token: float
    validation_ci95_nats_per_token: float
    label: str


def taken_grid(tree: Mapping[str, Any]) -> tuple[dict[str, Any], Grid | None]:
    """The tree without the grid's keys, and the grid. UserError for one that cannot be meant."""
    rest = {key: value for key, value in tree.items() if key not in ("grid", "grid_ranks")}
    values, ranks = tree.get("grid"), tree.get("grid_ranks", 1)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise UserError(f"grid_ranks={spelled(ranks)} must be the number of processes of each run, at least 1")
    if values is None:
        if ranks != 1:
            raise UserError(f"grid_ranks={ranks} belongs to grid={{KEY:[VALUE,…]}}; without a grid, torchrun --nproc-per-node says it")
        return rest, None
    if not isinstance(values, dict) or not values:
        raise UserError(f"grid={spelled(values)} must map keys to lists of values: grid={{schedule.peak:[1e-4,2e-4]}}")
    flat = dict(_flat(values))
    for key, listed in flat.items():
        known = [name for name in known_keys(RunConfig) if name not in _OWN]
        if key not in known:
            raise UserError(f"grid: {key} is no key of a setting that runs may differ in, as schedule.peak is{nearest(key, known)}")
        if not isinstance(listed, list) or not listed or any(isinstance(value, dict | list) for value in listed):
            raise UserError(f"grid: {key}={spelled(listed)} must be a list of values, such as {key}:[1e-4,2e-4]")
        if len({str(value) for value in listed}) < len(listed):
            raise UserError(f"grid: {key}={spelled(listed)} names a value twice; leave one out")
    if math.prod(map(len, flat.values())) > MOST_POINTS:
        raise UserError(f"grid: {math.prod(map(len, flat.values())):,} combinations are more than {MOST_POINTS}; give fewer values")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("grid= starts a torchrun for every combination: start it with python instead of torchrun, and say grid_ranks=")
    return rest, Grid(flat, ranks)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Hydra may read schedule.peak as a key of its own or as a mapping."""
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return found


def point_name(name: str, settings: Mapping[str, Any]) -> str:
    """Name of a point's run. UserError where it is too long for a folder."""
    parts = [re.sub(r"[^A-Za-z0-9._]", "_", f"{key.rpartition('.')[2]}{value}") for key, value in settings.items()]
    found = "-".join([name, *parts])
    if len(found) > NAME_LENGTH:
        raise UserError(f"grid: {found} is longer than the {NAME_LENGTH} characters of a run's name; give a shorter name=")
    return found


def run_grid(config: RunConfig, grid: Grid, launcher: Path, words: list[str], *, check: bool = False) -> int:
    """Run every point, print the table and write it to ROOT/NAME.grid.json. words: the command line that asked for the grid.
    check: its runs only plan and stop, so that there is no table, and that of an earlier start stays.

    Returns 0 where every point came to its end; the exit code of a stop where it was stopped; 1 where a point failed.
    """
    kept = [word for word in words if not word.lstrip("+").startswith(("grid=", "grid_ranks=", "name="))]
    outcomes, points = [], grid.points()
    for place, settings in enumerate(points, start=1):
        name = point_name(config.name, settings)
        print(f"grid: {place} of {len(points)}: {name}", file=sys.stderr, flush=True)
        overrides = [f"{key}={spelled(value)}" for key, value in settings.items()]
        try:
            code = _torchrun(grid.ranks, [str(launcher), *kept, *overrides, f"name={name}"])
        except (Stopped, KeyboardInterrupt) as stopped:  # the run has saved by then
            code = exit_code(stopped.reason) if isinstance(stopped, Stopped) else INTERRUPTED_EXIT
        if code in (PREEMPTED_EXIT, INTERRUPTED_EXIT) or code < 0:
            print(f"grid: stopped in {name}; the same command continues", file=sys.stderr)
            return code if code > 0 else 128 - code
        outcomes.append(read_outcome(Path(config.root) / name, settings, code))
        if not check:
            _write(Path(config.root) / f"{config.name}.grid.json", outcomes)
    if check:
        return 0 if all(outcome.exit_code == 0 for outcome in outcomes) else 1
    show(outcomes, Console(width=max(120, Console().width)))
    print(f"grid: {Path(config.root) / f'{config.name}.grid.json'}")
    return 0 if all(outcome.exit_code == 0 for outcome in outcomes) else 1


def _torchrun(ranks: int, words: list[str], start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen) -> int:
    """A torchrun to its end. Whoever interrupts this process interrupts it too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    process = start(command, preexec_fn=die_with_parent)  # a grid that is killed leaves no run behind
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise


def read_outcome(run: Path, settings: Mapping[str, Any], code: int) -> Outcome:
    """A point's figures from its log."""
    records = list(read_log(run / LOG_NAME))
    last = {kind: next((record for record in reversed(records) if record.get("kind") == kind), None) for kind in ("train", "validation")}
    train, validation = last["train"], last["validation"]

    def of(record: dict[str, Any] | None, key: str) -> float:
        return math.nan if record is None or key not in record else number(record, key, run / LOG_NAME)

    return Outcome(
        run=str(run),
        settings=dict(settings),
        exit_code=code,
        steps=0 if train is None else int(train["step"]),
        train_loss_nats_per_token=of(train, "loss_nats_per_token"),
        validation_nats_per_token=of(validation, "nelbo_nats_per_token"),
        validation_ci95_nats_per_token=of(validation, "ci95_nats_per_token"),
        label="" if validation is None else str(validation.get("nelbo_label", "not_a_likelihood")),
    )


def _write(path: Path, outcomes: list[Outcome]) -> None:
    """Numbers that are not finite are null."""
    rows = [{key: None if isinstance(value, float) and math.isnan(value) else value for key, value in asdict(one).items()} for one in outcomes]
    replace_durably(path, json.dumps(rows, indent=1) + "\n")


def show(outcomes: list[Outcome], console: Console) -> None:
    """The table, best validation first; without validation, lowest training loss first."""
    table = Table(title="Grid: nats per scored token of the response", title_justify="left")
    for key in outcomes[0].settings:
        table.add_column(key)
    for column in ("steps", "training loss", "validation", "", "run"):
        table.add_column(column, overflow="fold")

    def rank(one: Outcome) -> tuple[bool, float, float]:
        nats, loss = (math.inf if math.isnan(x) else x for x in (one.validation_nats_per_token, one.train_loss_nats_per_token))
        return one.exit_code != 0, nats, loss

    for one in sorted(outcomes, key=rank):
        nats = one.validation_nats_per_token
        held_out = "none" if math.isnan(nats) else f"{nats:.4f} ± {one.validation_ci95_nats_per_token:.4f}"
        loss = "none" if math.isnan(one.train_loss_nats_per_token) else f"{one.train_loss_nats_per_token:.4f}"
        run = one.run if one.exit_code == 0 else f"{one.run} (failed with exit code {one.exit_code})"
        table.add_row(*map(spelled, one.settings.values()), f"{one.steps:,}", loss, held_out, one.label, run)
    console.print(table)
