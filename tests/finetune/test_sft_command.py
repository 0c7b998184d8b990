"""launchers/finetune.py: what it composes, the grid of runs, and every mistake in one sentence."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from finetune import grid
from finetune.command import FORMAT_TEXTS, fine_tuning_tree
from finetune.grid import point_name, read_outcome, taken_grid
from finetune.problems import open_problems
from pretrain.checkpoint.layout import MEANT, TRAIN_STATE
from pretrain.compose import CONFIGS, command_from_tree, compose_arguments, resolved
from pretrain.convert.origin import require_origin
from pretrain.data.problems import problem_lines
from pretrain.data.sft_format import SFTFormat
from pretrain.errors import UserError
from pretrain.objectives.config import ObjectiveConfig
from pretrain.preemption import Stopped
from pretrain.rules import validate
from pretrain.run_config import DurationConfig, RunConfig
from pretrain.sampling.config import quoted
from tests.distributed import run_distributed
from tests.launchers.test_commands import LAUNCHERS, python
from tests.small_run import sft_config, small_config, train, word_problems


def composed(monkeypatch: pytest.MonkeyPatch, *words: str) -> RunConfig:
    """The run of a command line, before its problems are read."""
    monkeypatch.setattr("sys.argv", ["finetune.py", *words])
    tree = compose_arguments("finetune")
    assert tree is not None
    return command_from_tree(taken_grid(fine_tuning_tree(resolved(tree), list(words)))[0]).run


BASE = ("init_from=runs/x", "sft.train=train.jsonl")


@pytest.mark.parametrize(("preset", "hidden"), [("duo_1p7b", 2176), ("duo_tiny", 128), ("mdm_prime_v2_1p1b", 1792)])
def test_a_preset_gives_network_objective_and_tokenizer_and_nothing_of_its_pretraining(monkeypatch, preset, hidden):
    run = composed(monkeypatch, f"+model={preset}", *BASE)
    assert run.backbone.hidden == hidden and run.root == "runs/sft" and run.name == preset
    assert run.sft is not None and (run.sft.epochs, run.sft.format.context, run.batch.length) == (5, 256, 256)
    assert run.data.train == {} and run.data.validation == {} and run.data.random_length_probability == 0
    assert (run.schedule.kind, run.schedule.peak, run.schedule.final, run.schedule.warmup_steps) == ("cosine", 2e-4, 2e-5, None)
    assert (run.batch.global_sequences, run.duration.tokens, run.duration.stop_after) == (256, None, None)


@pytest.mark.parametrize("preset", sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml")))
def test_every_preset_can_be_fine_tuned(monkeypatch, preset):
    """It composes with either recipe to a run that keeps every rule, whatever its recipe of pretraining says."""
    for recipe in ("gsm8k", "gsm_symbolic"):
        run = composed(monkeypatch, f"+model={preset}", *BASE, f"sft={recipe}")
        validate(run, world_size=1)
        assert run.sft is not None and run.sft.train == "train.jsonl" and run.name == preset


def test_what_fine_tuning_sets_for_an_objective_and_what_a_user_may(monkeypatch):
    assert composed(monkeypatch, "+model=replaid_tiny", *BASE).objective.replaid.prompt_embedding
    assert not composed(monkeypatch, "+model=replaid_tiny", *BASE, "objective.replaid.prompt_embedding=false").objective.replaid.prompt_embedding
    assert composed(monkeypatch, "+model=duo_tiny", "objective=duo_curriculum", *BASE).objective.duo.curriculum == "none"
    run = composed(monkeypatch, "+model=mdlm_tiny", *BASE, "sft=gsm_symbolic", "sft.format.context=96", "sft.epochs=2", "schedule.peak=3e-3")
    assert run.sft is not None and (run.batch.length, run.sft.epochs, run.schedule.peak, run.batch.global_sequences) == (96, 2, 3e-3, 64)
    assert composed(monkeypatch, "+model=mdlm_tiny", "sft.train=a", "init_from=null").init_from is None


@pytest.mark.parametrize(("words", "sentence"), [
    (("+model=mdlm_tiny", "sft.train=a"), "no value for init_from"),
    (("+model=mdlm_tiny", "init_from=a"), "no value for sft.train"),
    (("model=mdlm_tiny", *BASE), r"write \+model=PRESET with a plus sign"),
    (("+model=mdlm_tiny", *BASE, "data.train.x.path=a"), r"data.train.x.path is not in the preset|fine-tuning reads problems"),
    (("+model=mdlm_tiny", *BASE, "+data.train.x.path=a"), "fine-tuning reads problems, not text; set sft.train=FILE"),
    (("+model=mdlm_tiny", *BASE, "duration.tokens=1e9"), "duration.tokens=1e9 would contradict sft.epochs"),
    (("+model=mdlm_tiny", *BASE, "selftest=true"), "selftest=true belongs to launchers/pretrain.py"),
    (("+model=mdlm_tiny", *BASE, "sft.epochs=0"), "unreached"),
    (("+model=mdlm_tiny", *BASE, "sft.format.context=4"), "context=4 must be at least 8 tokens"),
    (("+model=mdlm_tiny", *BASE, "sft.format.padding=maybe"), "sft.format.padding=maybe must be 'scored' or 'unscored'"),
    (("+model=mdlm_tiny", *BASE, "sft.format.answer=x"), r"answer='x' must hold \{answer\} once"),
    (("+model=mdlm_tiny", *BASE, "sft.peochs=3"), r"unknown key sft.peochs"),
    (("+model=mdlm_tiny", *BASE, "grid_ranks=2"), r"grid_ranks=2 belongs to grid="),
    (("+model=mdlm_tiny", *BASE, "grid={schedule.peak:1e-4}"), r"must be a list of values"),
    (("+model=mdlm_tiny", *BASE, "grid={schedule.peak:[1e-4,1e-4]}"), "names a value twice"),
    (("+model=mdlm_tiny", *BASE, "grid=3"), "grid=3 must map keys to lists of values"),
    (("+model=mdlm_tiny", *BASE, "grid={peak:[1]}"), "peak is no key of a setting"),
    (("+model=mdlm_tiny", *BASE, "grid={schedule.peek:[1]}"), "schedule.peek is no key of a setting.*did you mean schedule.peak"),
    (("+model=mdlm_tiny", *BASE, "grid={name:[a,b]}"), "name is no key of a setting"),
])  # fmt: skip
def test_a_command_that_cannot_be_meant(monkeypatch, words, sentence):
    if sentence == "unreached":  # a range, which is checked with the rest of the run
        with pytest.raises(UserError, match=r"sft.epochs=0 must lie in \[1, 10000\]"):
            validate(composed(monkeypatch, *words), world_size=1)
        return
    with pytest.raises(UserError, match=sentence):
        composed(monkeypatch, *words)


@pytest.mark.parametrize("word", [r"sft.format.question=Q, so: {question}\n", r"sft.format.question='Q, so: {question}\n'"])
def test_a_template_is_taken_as_it_stands_but_for_line_breaks(monkeypatch, word):
    """As evaluate.py takes format.question: a template of a command line must not train on a backslash and an n."""
    run = composed(monkeypatch, "+model=mdlm_tiny", *BASE, *quoted([word], FORMAT_TEXTS))
    assert run.sft is not None and run.sft.format.question == "Q, so: {question}\n" and run.sft.format.rationale == "Answer: {rationale}\n"


def test_pretraining_does_not_take_problems(monkeypatch):
    monkeypatch.setattr("sys.argv", ["pretrain.py", "+model=mdlm_tiny", "sft.train=a"])
    with pytest.raises(UserError, match="sft.train belongs to launchers/finetune.py"):
        compose_arguments("pretrain")


# ---- problems -------------------------------------------------------------------------------------------------------------------------


def with_sft(config: RunConfig, **changes: object) -> RunConfig:
    assert config.sft is not None
    return replace(config, sft=replace(config.sft, **changes))  # type: ignore[arg-type]


def test_bad_problem_files(tmp_path):
    config = sft_config(tmp_path)
    for content, sentence in [
        (b'{"question": "a"}\n', "line 1 of .*bad.jsonl lacks|line 1 of .*bad.jsonl"),
        (b"no JSON\n", "line 1 of .*bad.jsonl"),
        (b"", r"sft.train=.*bad.jsonl: there is no problem; give a file with problems"),
        (problem_lines(word_problems(0, 2)) + b"\xff\n", "line 3 of .*bad.jsonl"),
        (problem_lines(word_problems(0, 1)).replace(b'"question": "', b'"question": "\\ud800'), "line 1 of .* holds text that is not Unicode"),
    ]:
        (tmp_path / "bad.jsonl").write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            open_problems(with_sft(config, train=str(tmp_path / "bad.jsonl")))
    with pytest.raises(UserError, match="gone.jsonl cannot be read"):
        open_problems(with_sft(config, train=str(tmp_path / "gone.jsonl")))
    with pytest.raises(UserError, match=r"1 of the 12 questions of sft.validation=.* are also in sft.train=.*p-0: what is held out"):
        (tmp_path / "both.jsonl").write_bytes(problem_lines([*word_problems(50, 11), word_problems(0, 1)[0]]))
        open_problems(with_sft(config, validation=str(tmp_path / "both.jsonl")))
    for key, value in [("global_sequences", 0), ("micro_sequences", -1)]:
        with pytest.raises(UserError, match=rf"batch.{key}={value} must lie in \[1, "):
            open_problems(replace(config, batch=replace(config.batch, **{key: value})))
    for changes, sentence in [({"epochs": -1}, r"sft.epochs=-1 must lie in \[1, 10000\]"), ({"train": ""}, "sft.train='' must")]:
        with pytest.raises(UserError, match=sentence):
            open_problems(with_sft(config, **changes))
    with pytest.raises(UserError, match="batch.length=40 must equal sft.format.context=48"):
        open_problems(replace(config, batch=replace(config.batch, length=40)))


def test_what_is_too_long_is_counted_and_what_leaves_nothing_is_refused(tmp_path):
    config = sft_config(tmp_path, batch=replace(sft_config(tmp_path).batch, length=28))
    run = open_problems(with_sft(config, format=SFTFormat(context=28), validation=None))
    found = re.search(r"dropped (\d+) longer than the context of 28, (\d+) of them by their prompt alone", run.described)
    assert found and int(found[1]) == run.train.counts.too_long > int(found[2]) and len(run.train) == 11 - int(found[1])
    config = replace(config, batch=replace(config.batch, length=8))
    with pytest.raises(UserError, match=r"sft.train=.*: the shortest example has \d+ tokens, more than context=8; set a larger context"):
        open_problems(with_sft(config, format=SFTFormat(context=8)))


def test_checkpoints_of_another_tokenizer_or_objective(tmp_path):
    first = small_config(tmp_path, "mdlm", name="first", duration=DurationConfig(steps=3))
    run_distributed(train, 1, first)
    config = sft_config(tmp_path, "mdlm", init_from=str(first.directory))
    require_origin(config)
    with pytest.raises(UserError, match="was trained with objective=mdlm, and this run fine-tunes with objective=duo; choose the preset of that run"):
        require_origin(replace(config, objective=ObjectiveConfig(name="duo")))
    itself = replace(config, root=str(first.directory.parent), name="first")
    require_origin(itself)  # it goes on
    with pytest.raises(UserError, match="resume=fresh moves the run in .*first aside, and init_from=.* is that run: give the new run another name="):
        require_origin(replace(itself, resume="fresh"))
    state = first.directory / "checkpoints" / "step_00000003" / TRAIN_STATE
    tree = json.loads(state.read_text())
    tree["extras"][MEANT]["tokenizer"] = "0123456789ab"
    state.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"was trained with another tokenizer \(0123456789ab\) than tokenizer=.*small.model \([0-9a-f]{12}\)"):
        require_origin(config)


# ---- the grid -------------------------------------------------------------------------------------------------------------------------


def test_the_points_of_a_grid(monkeypatch):
    monkeypatch.setattr("sys.argv", ["finetune.py", "+model=mdlm_tiny", *BASE, "grid={schedule.peak:[1e-4,2e-4],schedule:{final:[1e-5,0]}}"])
    tree = compose_arguments("finetune")
    assert tree is not None
    rest, found = taken_grid(resolved(tree))
    assert found is not None and "grid" not in rest and found.ranks == 1
    assert found.points() == [{"schedule.peak": p, "schedule.final": f} for p in (1e-4, 2e-4) for f in (1e-5, 0)]
    assert point_name("duo", found.points()[0]) == "duo-peak0.0001-final1e_05"
    with pytest.raises(UserError, match="longer than the 100 characters"):
        point_name("x" * 90, found.points()[0])
    assert taken_grid({"grid": {"seed": [1, 2], "init_from": ["runs/a"]}})[1] is not None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(UserError, match="start it with python instead of torchrun"):
        taken_grid(resolved(tree))


def test_a_point_without_a_log_has_no_figures(tmp_path):
    outcome = read_outcome(tmp_path, {"schedule.peak": 1.0}, 64)
    assert outcome.steps == 0 and outcome.label == "" and outcome.exit_code == 64


@pytest.mark.slow
def test_a_grid_of_two_runs_and_a_third_that_fails(tmp_path, monkeypatch):
    """Real commands: the table, its file, and a second start that continues what is done."""
    sft_config(tmp_path)
    words = (
        "+model=mdlm_tiny", "init_from=null", f"tokenizer={tmp_path}/small.model", f"sft.train={tmp_path}/train.jsonl",
        f"sft.validation={tmp_path}/test.jsonl", "sft=gsm_symbolic", "sft.epochs=1", "sft.format.context=48", "backbone.hidden=32",
        "batch.global_sequences=8", "batch.micro_sequences=4", "telemetry.wandb=off", "telemetry.log_every=1", "precision=fp32",
        "plan.vocabulary=null",
    )  # fmt: skip
    said = python(tmp_path, "finetune.py", *words, "grid={schedule.peak:[1e-3,1e-2]}")
    assert "grid: 2 of 2: mdlm_tiny-peak0.01" in said and "Grid: nats per scored token" in said and "bound" in said
    rows = json.loads((tmp_path / "runs/sft/mdlm_tiny.grid.json").read_text())
    assert [row["settings"] for row in rows] == [{"schedule.peak": 1e-3}, {"schedule.peak": 1e-2}]
    assert all(row["exit_code"] == 0 and row["steps"] == 2 and 0 < row["validation_nats_per_token"] < 20 for row in rows)
    assert rows[0]["validation_nats_per_token"] != rows[1]["validation_nats_per_token"]
    calls: list[list[str]] = []
    monkeypatch.setattr(grid, "_torchrun", lambda ranks, given: calls.append(given) or (0 if len(calls) == 1 else 64))
    config = replace(sft_config(tmp_path), name="mdlm_tiny", root=str(tmp_path / "runs/sft"))
    assert grid.run_grid(config, grid.Grid({"schedule.peak": [1e-3, 7.0]}, 3), LAUNCHERS / "finetune.py", [*words, "grid={x.y:[1]}", "name=a"]) == 1
    assert calls[1][-2:] == ["schedule.peak=7", "name=mdlm_tiny-peak7.0"] and not any(word.startswith("grid") for word in calls[1])
    table = tmp_path / "runs/sft/mdlm_tiny.grid.json"
    before = table.read_bytes()
    monkeypatch.setattr(grid, "_torchrun", lambda ranks, given: 0)
    assert grid.run_grid(config, grid.Grid({"schedule.peak": [1e-3]}, 1), LAUNCHERS / "finetune.py", [*words, "check=true"], check=True) == 0
    assert table.read_bytes() == before  # a plan leaves the table of what was trained
    monkeypatch.setattr(grid, "_torchrun", lambda ranks, given: 75)
    assert grid.run_grid(config, grid.Grid({"schedule.peak": [1e-3]}, 1), LAUNCHERS / "finetune.py", [*words]) == 75


@pytest.mark.parametrize(("stop", "code"), [(Stopped("SIGTERM"), 75), (KeyboardInterrupt(), 130)])
def test_a_stopped_grid_says_where_it_goes_on(tmp_path, monkeypatch, capsys, stop, code):
    """And not that there was nothing to save: the run that was stopped has saved."""

    def stopped(ranks: int, words: list[str]) -> int:
        raise stop

    monkeypatch.setattr(grid, "_torchrun", stopped)
    config = replace(sft_config(tmp_path), name="a", root=str(tmp_path / "runs"))
    assert grid.run_grid(config, grid.Grid({"seed": [1, 2]}, 1), LAUNCHERS / "finetune.py", []) == code
    assert "grid: stopped in a-seed1; the same command continues" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_says_what_becomes_of_the_problems(tmp_path):
    sft_config(tmp_path)
    words = (
        "+model=duo_tiny", "init_from=null", f"tokenizer={tmp_path}/small.model", f"sft.train={tmp_path}/train.jsonl", "sft=gsm_symbolic",
        "check=true", "sft.format.context=48", "plan.vocabulary=null",
    )  # fmt: skip
    said = python(tmp_path, "finetune.py", *words)
    assert "sft.train: 11 examples of 11 problems" in said and "5 epochs of 1 steps" in said and "Plan of duo_tiny" in said
    assert not (tmp_path / "runs").exists()


def test_no_run_outlives_its_grid():
    """kill -9 of the grid's process: the kernel ends what it had started."""
    script = (
        "import subprocess\nfrom finetune import grid\n"
        "def start(command, **options):\n"
        "    found = subprocess.Popen(['sleep', '60'], **options)\n"
        "    print(found.pid, flush=True)\n"
        "    return found\n"
        "grid._torchrun(1, [], start)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=LAUNCHERS.parent, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
    _, alive = psutil.wait_procs([child], timeout=10)
    assert not alive
