"""Slurm by a stand-in for its commands that runs the scripts, and Ray by the sentence for those who lack it (or itself, where it is installed)."""

import importlib.util
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from data_prep import cluster
from data_prep.config import ExecutorConfig, FinishConfig, TokenizeConfig
from data_prep.finish import finish
from data_prep.prepare import prepare
from pretrain.data.manifest import Manifest
from pretrain.errors import UserError
from tests.data.examples import text, write_jsonl

SBATCH = """#!{python}
import os, pathlib, re, subprocess, sys
here = pathlib.Path(__file__).parent
number = len(list(here.glob("job*.sh"))) + 1
script = pathlib.Path(sys.argv[-1]).read_text()
(here / f"job{{number}}.sh").write_text(script)
array = re.search(r"--array=(\\d+)-(\\d+)", script)
ids = range(int(array[1]), int(array[2]) + 1) if array else [None]
offset = next((word.split("RUN_OFFSET=")[1] for word in sys.argv if "RUN_OFFSET=" in word), "0")
output = re.search(r"--output=(.*)", script)[1]
for task in ids:
    extra = {{}} if task is None else {{"SLURM_ARRAY_TASK_ID": str(task), "SLURM_NODELIST": "n1", "RUN_OFFSET": offset}}
    with open(output.replace("%A", str(number)).replace("%a", str(task)).replace("%j", str(number)), "wb") as log:
        job = subprocess.Popen(["bash", str(here / f"job{{number}}.sh")], env=os.environ | extra, stdout=log, stderr=log)
    if array:
        job.wait()
print("Submitted batch job", number)
"""
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done
exec "$@"
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of Slurm: arrays run at once, task after task, and are gone from the queue when sbatch returns; other jobs run by themselves."""
    folder = tmp_path / "bin"
    folder.mkdir()
    commands = {"sbatch": SBATCH.format(python=sys.executable), "srun": SRUN, "scontrol": "#!/bin/sh\necho n1\n", "squeue": "#!/bin/sh\n"}
    for name, content in commands.items():
        (folder / name).write_text(content)
        (folder / name).chmod(0o755 | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(cluster, "POLL_SECONDS", 0.01)
    return folder


def config(folder: Path, model: Path, **values: object) -> TokenizeConfig:
    executor = ExecutorConfig(**({"kind": "slurm", "partition": "cpu"} | values))  # type: ignore[arg-type]
    return TokenizeConfig(input=str(folder / "text"), tokenizer=str(model), output=str(folder / "out"), shard_bytes=1, executor=executor)


def three_shards(folder: Path) -> None:
    for number in range(3):
        write_jsonl(folder / f"text/{number}.jsonl", [text(20, 10 * number + i) for i in range(5)])


@pytest.mark.slow
def test_an_array_of_jobs_gives_what_this_machine_gives(slurm: Path, tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three_shards(tmp_path)
    made = prepare(config(tmp_path, model_file, array_limit=2, account="lab"))["main"]
    here = prepare(TokenizeConfig(input=str(tmp_path / "text"), tokenizer=str(model_file), output=str(tmp_path / "here"), shard_bytes=1, workers=1))
    assert made == here["main"] and len(made.shards) == 3
    script = (slurm / "job1.sh").read_text()
    assert "#SBATCH --array=0-1\n" in script and "#SBATCH --account=lab\n" in script and "#SBATCH --partition=cpu\n" in script
    assert sorted(path.name for path in slurm.glob("job*")) == ["job1.sh", "job2.sh"], "an array of two, one of the third, and nothing after them"
    assert "submitted: 1, 2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_last_job_finishes_what_nobody_waits_for(slurm: Path, tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three_shards(tmp_path)
    assert prepare(config(tmp_path, model_file, wait=False)) == {}
    deadline = time.monotonic() + 60
    while (tmp_path / "out/parts").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert Manifest.load(tmp_path / "out").documents == 15
    last = (slurm / "job2.sh").read_text()
    assert "#SBATCH --dependency=afterany:1\n" in last and "--array" not in last
    assert finish(FinishConfig(output=str(tmp_path / "out")))["main"].documents == 15
    assert "already finished" in capsys.readouterr().err


@pytest.mark.slow
def test_a_task_that_fails_is_named_and_only_it_runs_again(slurm: Path, tmp_path: Path, model_file: Path) -> None:
    three_shards(tmp_path)
    (tmp_path / "text/1.jsonl").rename(tmp_path / "text/1.jsonl.gz")
    with pytest.raises(UserError, match=r"1 of 3 shards is missing, the first because of: .*1\.jsonl\.gz is damaged or cut off .*; logs are in"):
        prepare(config(tmp_path, model_file))
    with pytest.raises(UserError, match=r"1 of 3 shards is missing, the first because of: .*run the tokenize command again"):
        finish(FinishConfig(output=str(tmp_path / "out")))
    with pytest.raises(UserError, match="1 of 1 shard is missing"):
        prepare(config(tmp_path, model_file))
    assert "#SBATCH --array=0-0\n" in (slurm / "job2.sh").read_text()


def test_a_dry_run_shows_the_script_and_writes_nothing(slurm: Path, tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three_shards(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    made = TokenizeConfig(
        input=str(tmp_path / "text"), tokenizer=str(model_file), output=str(tmp_path / "out"), shard_bytes=1, dry_run=True,
        executor=ExecutorConfig(kind="slurm", partition="cpu", setup="module load python"),
    )  # fmt: skip
    assert prepare(made) == {}
    said = capsys.readouterr().err
    assert "#SBATCH --array=0-2\n" in said and "module load python; export PATH=" in said
    assert f"launch_pickled_pipeline {tmp_path}/out/parts/datatrove/executor.pik" in said
    assert sorted(tmp_path.rglob("*")) == before


def test_jobs_of_an_earlier_command_are_watched(slurm: Path, tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The front end was ended while the jobs wait: the same command finds them in the queue, and submits nothing."""
    three_shards(tmp_path)
    (slurm / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 7\n")
    (slurm / "squeue").write_text(f"#!/bin/sh\ncat {slurm}/queue 2>/dev/null || true\n")
    with pytest.raises(UserError, match="3 of 3 shards are missing, without a word: they were killed, or ran out of time or memory"):
        prepare(config(tmp_path, model_file))
    (slurm / "sbatch").write_text("#!/bin/sh\necho called again >&2; exit 1\n")
    (slurm / "queue").write_text("7 RUNNING\n")
    (slurm / "squeue").write_text(f"#!/bin/sh\ncat {slurm}/queue 2>/dev/null; rm -f {slurm}/queue\n")
    with pytest.raises(UserError, match="3 of 3 shards are missing"):
        prepare(config(tmp_path, model_file))
    assert "the jobs 7 of an earlier command are still in the queue; watching them" in capsys.readouterr().err


def test_machines_without_slurm_and_jobs_that_are_refused(slurm: Path, tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_shards(tmp_path)
    (slurm / "sbatch").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(UserError, match=r"sbatch refused the job \(exit code 3"):
        prepare(config(tmp_path, model_file))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="needs sbatch, which is not on PATH"):
        prepare(config(tmp_path, model_file))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"partition": ""}, "needs executor.partition"), ({"time": "soon"}, "executor.time='soon' must be a time as Slurm writes it"),
        ({"array_limit": 0}, "executor.array_limit=0 must lie"),
        ({"cpus_per_task": 0}, "executor.cpus_per_task=0"),
    ],
)  # fmt: skip
def test_settings_of_executors_that_cannot_be(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ExecutorConfig(**({"kind": "slurm", "partition": "cpu"} | values))  # type: ignore[arg-type]


@pytest.mark.slow
def test_ray(tmp_path: Path, model_file: Path) -> None:
    three_shards(tmp_path)
    made = config(tmp_path, model_file, kind="ray", memory_gb_per_cpu=1)
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(UserError, match=r"ray is needed for executor=ray .*; install it with: pip install -e '\.\[ray\]'"):
            prepare(made)
        return
    assert prepare(made)["main"].documents == 15
