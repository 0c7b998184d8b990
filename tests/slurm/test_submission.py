"""What is rendered, frozen and refused: no job runs here."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir

from finetune.command import fine_tuning_tree
from finetune.grid import taken_grid
from pretrain.cluster import slurm
from pretrain.cluster.checks import check_submission, time_limit
from pretrain.cluster.code_version import code_version, sources_hash
from pretrain.cluster.script import Job, render
from pretrain.cluster.submission import Submission, fitting_batch, frozen_presets, refuse_living, submitted_jobs
from pretrain.compose import CONFIGS, command_from, command_from_tree, resolved
from pretrain.errors import UserError
from pretrain.parallel.config import ParallelConfig
from pretrain.presets import register
from pretrain.run_config import BatchConfig
from pretrain.submit_config import ClusterConfig, ContainerConfig, DrillConfig, SubmitConfig
from tests.slurm.jobs import submit, words

CLUSTER = ClusterConfig(gpus_per_node=8, time="2:00:00", partition="a b", environment={"A": "it's"}, setup=["module load cuda"])


def job(cluster: ClusterConfig = CLUSTER, **changes: object) -> Job:
    settings = {"name": "run", "run_directory": Path("/shared/runs/run"), "work_directory": Path("/shared"), "free_bytes": 7, "task": "train"}
    return Job(submission=SubmitConfig(cluster=cluster, nodes=2, after=12), **settings | changes)  # type: ignore[arg-type]


def test_the_script_asks_slurm_for_what_was_set_and_is_bash() -> None:
    script = render(job())
    head = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    wanted = [
        "--job-name=run", "--output=/shared/runs/run/slurm/job_%j.log", "--open-mode=append", "--export=ALL", "--nodes=2", "--ntasks-per-node=1",
        "--partition='a b'", "--gpus-per-node=8", "--time=2:00:00", "--dependency=afterok:12", "--requeue", "--signal=B:USR1@300",
    ]  # fmt: skip
    assert head == wanted
    assert "export A='it'\"'\"'s'" in script and "module load cuda || {" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""


def test_a_container_mounts_every_path_that_the_job_uses() -> None:
    container = ContainerConfig(image="/images/x.sqsh", mounts=["/data:/data"])
    script = render(job(ClusterConfig(gpus_per_node=8, container=container)))
    line = next(line for line in script.splitlines() if line.startswith("SRUN="))
    assert "--container-image=/images/x.sqsh" in line and ":/shared/runs/run,/data:/data" in line and "--container-workdir=/shared" in line
    assert "PYTHON=python3\n" in script


def test_a_preflight_is_neither_signalled_nor_requeued() -> None:
    script = render(job(task="preflight"))
    assert "#SBATCH --no-requeue" in script and "#SBATCH --signal" not in script and "TASK=preflight" in script


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:00:01", 7201), ("1-00", 86400), ("1-01:30", 91800), ("2-00:00:10", 172810)],
)
def test_time_limits_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert time_limit(text) == seconds


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"nodes": 0}, "nodes=0 must be a number of nodes"),
        ({"after": 0}, "after=0 must be the number of a job"),
        ({"cluster": ClusterConfig()}, "set cluster.processes_per_node=N"),
        ({"cluster": ClusterConfig(gpus_per_node=8, processes_per_node=4)}, "must be cluster.gpus_per_node=8"),
        ({"cluster": ClusterConfig(gpus_per_node=8, time="4:00")}, "use cluster.signal_lead=60"),
        ({"cluster": ClusterConfig(gpus_per_node=8, time="soon")}, "cluster.time=soon must be a time limit"),
        ({"cluster": ClusterConfig(gpus_per_node=8, environment={"WANDB_API_KEY": "x"})}, "looks like a secret"),
        ({"cluster": ClusterConfig(gpus_per_node=8, extra=["reservation=x"])}, "no option of sbatch"),
        ({"cluster": ClusterConfig(gpus_per_node=8, setup=["a\nb"])}, "holds a line break"),
        ({"drill": DrillConfig(steps=10, signal_at=10)}, "use drill.signal_at=2"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_submission(SubmitConfig(**{"cluster": CLUSTER} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", ["duo_1p7b", "mdm_prime_v2_1p1b", "replaid_tiny", "ar_llama_tiny", "esolm_231M"])
def test_what_is_frozen_is_what_was_composed(preset: str, tmp_path: Path) -> None:
    """Through Hydra again, as the job's `--config-dir` reads it, and over another choice of data, backbone and recipe."""
    register()
    arguments = [f"+model={preset}", "seed=3", "+data.train.more.path=/more"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        tree = resolved(compose("pretrain", arguments))
    for path, text in frozen_presets(tree, tmp_path).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        again = compose("pretrain", ["+model=submitted", f"hydra.searchpath=[file://{tmp_path}]"])
    assert command_from(again).run == command_from_tree(tree).run


def test_a_frozen_fine_tuning_run_is_what_was_composed(tmp_path: Path) -> None:
    register()
    arguments = ["+model=replaid_tiny", "init_from=runs/x", "sft.train=a.jsonl", "sft=gsm_symbolic", "sft.format.context=96", "schedule.peak=3e-3"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        tree, _ = taken_grid(fine_tuning_tree(resolved(compose("finetune", arguments)), arguments))
    for path, text in frozen_presets(tree, tmp_path).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    frozen = ["+model=submitted", f"hydra.searchpath=[file://{tmp_path}]"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        again, _ = taken_grid(fine_tuning_tree(resolved(compose("finetune", frozen)), frozen))
    assert command_from_tree(again).run == command_from_tree(tree).run and command_from_tree(again).run.schedule.peak == 3e-3


def answering(folder: Path, monkeypatch: pytest.MonkeyPatch, **commands: str) -> None:
    """Commands of Slurm that are one line of shell each."""
    folder.mkdir()
    for name, line in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_run_whose_job_lives_is_refused_with_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "small"
    (run / "slurm").mkdir(parents=True)
    (run / "slurm" / "jobs.jsonl").write_text('{"job": 7}\n{"job": 41}\n')
    assert submitted_jobs(run) == [7, 41]
    answering(tmp_path / "bin", monkeypatch, squeue='case "$*" in *41*) echo PENDING;; *) echo "Invalid job id specified" >&2; exit 1;; esac')
    with pytest.raises(UserError, match="belongs to job 41, which is pending: wait for it, end it with scancel 41"):
        refuse_living(run)
    (run / "slurm" / "jobs.jsonl").write_text('{"job": 7}\n')
    refuse_living(run)
    assert slurm.state(7) == slurm.GONE


def test_what_slurm_refuses_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(tmp_path / "bin", monkeypatch, sbatch='echo "sbatch: error: invalid partition" >&2; exit 1')
    with pytest.raises(UserError, match="cannot submit the job: sbatch: error: invalid partition"):
        slurm.submit(tmp_path / "x")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="squeue is not on PATH; run this on a login node"):
        slurm.state(1)


def test_a_submission_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(tmp_path / "bin", monkeypatch, sbatch="echo 5", squeue="echo COMPLETED")
    environment = dict(os.environ) | {"WANDB_API_KEY": "very secret"}
    dry = submit(tmp_path, environment, *words(6), "--dry-run")
    assert dry.returncode == 0 and "#SBATCH --nodes=2" in dry.stdout and not (tmp_path / "runs").exists(), dry.stderr
    # the plan of two nodes of one rank each, 8 sequences of 16 tokens a step
    wanted = ("Plan of small", "2 = tensor 1 x pipeline 1 x data 2", "8 sequences x 16 = 128 tokens", "Tokens by phase")
    assert all(text in dry.stderr for text in wanted), dry.stderr
    done = submit(tmp_path, environment, *words(6))
    assert done.returncode == 0 and "job 5: small on 2 nodes with 2 ranks" in done.stdout, done.stderr
    folder = tmp_path / "runs/small/slurm"
    assert (folder / "job.sbatch").read_text() + "\n" == dry.stdout
    version = json.loads((folder / "code.json").read_text())
    assert version["sources"] == sources_hash(Path(__file__).parents[2])
    assert "very secret" not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    (tmp_path / "runs/small/log.jsonl").write_text("")
    fresh = submit(tmp_path, environment, *words(6), "resume=fresh")
    assert "was moved to" in fresh.stdout and (tmp_path / "runs/small.old-1/log.jsonl").exists(), fresh.stderr
    assert "resume: auto" in (folder / "model/submitted.yaml").read_text(), "a requeue must not start over"
    refused = submit(tmp_path, environment, *words(6, "nodes=3"))
    assert refused.returncode == 64 and "or use nodes=2 or nodes=4" not in refused.stderr and "or use nodes=2" in refused.stderr
    unknown = submit(tmp_path, environment, "prefligth")
    assert unknown.returncode == 64 and "did you mean preflight?" in unknown.stderr


@pytest.mark.parametrize(("word", "where"), [("cluster.setup=[echo very-secret-value]", "batch script"), ("name=very-secret-value", "frozen config")])
def test_a_secret_of_the_environment_is_written_nowhere(word: str, where: str, tmp_path: Path) -> None:
    done = submit(tmp_path, dict(os.environ) | {"HF_TOKEN": "very-secret-value"}, *words(6, word), "--dry-run")
    assert done.returncode == 64 and f"the {where}" in done.stderr and "very-secret" not in done.stderr + done.stdout, done.stderr


def test_code_version_of_a_changed_checkout(tmp_path: Path) -> None:
    for folder in ("pretrain", "configs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pretrain" / "a.py").write_text("a")
    before = code_version(tmp_path)
    assert before.commit is None and before.changed == []
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "pretrain" / "a.py").write_text("b")
    after = code_version(tmp_path)
    assert after.commit and after.changed == ["pretrain/a.py"] and after.sources != before.sources


def test_help_names_every_task() -> None:
    done = subprocess.run([sys.executable, "launchers/slurm/submit.py", "--help"], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0 and all(text in done.stdout for text in ("drill", "preflight", "--dry-run", "cluster: h100, local")), done.stderr


@pytest.mark.parametrize(("nodes", "split", "expected"), [(2, {}, 64), (16, {}, 128), (3, {"tensor": 4}, 60), (1, {"pipeline": 8}, 64)])
def test_a_preflight_and_a_drill_fit_every_number_of_nodes(nodes: int, split: dict[str, int], expected: int) -> None:
    """Micro-batches of 1, 1, 10 and 4 on 16, 128, 6 and 1 replicas of 8 ranks a node: the multiple that is nearest to 64."""
    micro = {2: 1, 16: 1, 3: 10, 1: 4}[nodes]
    run = SimpleNamespace(parallel=ParallelConfig(**split), batch=BatchConfig(global_sequences=64, micro_sequences=micro, length=8))
    settings = SubmitConfig(nodes=nodes, cluster=ClusterConfig(gpus_per_node=8))
    submission = Submission(command=SimpleNamespace(run=run), settings=settings, tree={})  # type: ignore[arg-type]
    assert fitting_batch(submission) == {"global_sequences": expected}
