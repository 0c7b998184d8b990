"""The shards on many machines: a Slurm job array, or tasks of a Ray cluster. All of them must see the same file system."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datatrove.executor.ray import RayPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor

from data_prep.config import ExecutorConfig
from data_prep.job import LOGS, PARTS
from data_prep.local import silence
from data_prep.progress import Display, say
from data_prep.steps import pipeline
from data_prep.watch import Watch, shown
from pretrain.data.files import atomic_writer
from pretrain.errors import UserError, are, counted
from pretrain.optional import require

REPOSITORY = Path(__file__).resolve().parents[1]
POLL_SECONDS = 5.0
_SUBMITTED = "slurm.json"
_GONE = "Invalid job id"


class SlurmArray(SlurmPipelineExecutor):
    """datatrove's array of jobs. What follows it is our last stage, where nobody waits for it, instead of a job that sums up statistics."""

    def __init__(self, output: Path, config: ExecutorConfig, tasks: int, workers: int | None, logs: Path) -> None:
        self.output, self.follow, self.job_ids = output, not config.wait, list[str]()
        super().__init__(
            pipeline(output),
            tasks=tasks,
            time=config.time,
            partition=config.partition,
            cpus_per_task=config.cpus_per_task,
            mem_per_cpu_gb=config.memory_gb_per_cpu,
            workers=workers or -1,
            job_name="prepare_data",
            qos=config.qos,
            env_command=_environment(config.setup),
            sbatch_args={"account": config.account} if config.account else {},
            max_array_size=config.array_limit,
            job_id_retriever=self._remember,
            logging_dir=str(logs),
            mail_user=None,
        )

    def _remember(self, said: str) -> str:
        self.job_ids.append(said.split()[-1])
        return self.job_ids[-1]

    def launch_merge_stats(self) -> None:
        """A job that finishes the preparation when the array is through, whether or not each of its tasks succeeded: it says what is missing."""
        if self.follow:
            launcher = REPOSITORY / "launchers" / "prepare_data.py"
            settings = self.get_sbatch_args() | {"job-name": "prepare_data_finish", "dependency": f"afterany:{':'.join(self.job_ids)}"}
            settings.pop("array")
            settings["output"] = settings["error"] = str(Path(self.slurm_logs_folder) / "finish_%j.out")
            command = shlex.join([sys.executable, str(launcher), "finish", f"output={_quoted(self.output)}"])
            self.submit(self.get_launch_file_contents(settings, command))

    def submit(self, script: str) -> None:
        """Give a script to sbatch."""
        with tempfile.NamedTemporaryFile("w", suffix=".slurm") as file:
            file.write(script)
            file.flush()
            self._remember(subprocess.check_output(["sbatch", file.name], text=True))


def _quoted(path: Path) -> str:
    """A path as a value that Hydra reads back as it is."""
    return "'" + str(path.resolve()).replace("'", "\\'") + "'"


def _environment(setup: str | None) -> str:
    """Lines that give a job this Python and this code."""
    lines = [
        setup or "",
        f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
        f"export PYTHONPATH={shlex.quote(str(REPOSITORY))}${{PYTHONPATH:+:$PYTHONPATH}}",
        "export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 DATATROVE_COLORIZE_LOGS=0",
    ]
    return "; ".join(line for line in lines if line)


def slurm_script(output: Path, config: ExecutorConfig, tasks: int, workers: int | None) -> str:
    """The script that would be submitted, without a file written."""
    logs = output.resolve() / PARTS / LOGS
    with tempfile.TemporaryDirectory() as folder:  # datatrove makes the folder of its logs when it is asked for the script
        array = SlurmArray(output, config, tasks, workers, Path(folder))
        settings = array.get_sbatch_args(min(tasks, config.array_limit))
        script = array.get_launch_file_contents(settings, f"srun  -l -n 1 launch_pickled_pipeline {logs}/executor.pik")
        return str(script.replace(str(Path(folder)), str(logs)))


def run_on_slurm(
    output: Path, config: ExecutorConfig, tasks: int, workers: int | None, watch: Watch, display: Display, check: Callable[[], None]
) -> bool:
    """Submit what waits (or find the jobs that an earlier command submitted), and watch it. False where nobody waits for the end.

    UserError where jobs end without all shards, with the first reason.
    """
    record = output / PARTS / _SUBMITTED
    jobs = [job for job in _submitted(record) if _in_queue([job])]
    if jobs:
        say(f"the jobs {', '.join(jobs)} of an earlier command are still in the queue; watching them")
    else:
        jobs = _submit(output, config, tasks, workers)
        with atomic_writer(record) as stream:
            stream.write(json.dumps(jobs).encode())
        say(f"submitted: {', '.join(jobs)}")
    if not config.wait:
        say(f"when they have ended, a last job writes the manifest; `prepare_data.py finish output={output}` does the same")
        return False
    quiet = 0
    try:
        while True:
            quiet = 0 if _in_queue(jobs) else quiet + 1
            watch.look()
            display.show(watch.done_bytes, watch.tokens)
            check()
            if len(watch.finished) == len(watch.waiting):
                return True
            if quiet > 1:  # a network file system may show the last shard a moment after its job has ended
                raise _incomplete(output, watch)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        say(f"the jobs go on; run the same command to watch them again, or `scancel {' '.join(jobs)}` to end them")
        raise


def _submit(output: Path, config: ExecutorConfig, tasks: int, workers: int | None) -> list[str]:
    array = SlurmArray(output.resolve(), config, tasks, workers, output.resolve() / PARTS / LOGS)
    silence()
    try:
        array.run()
    except FileNotFoundError as error:
        raise UserError("executor=slurm needs sbatch, which is not on PATH; run this on a login node, or leave executor=slurm out") from error
    except subprocess.CalledProcessError as error:
        raise UserError(f"sbatch refused the job (exit code {error.returncode}; its words are above); --dry-run shows the script") from error
    return array.job_ids


def _submitted(record: Path) -> list[str]:
    try:
        return [str(job) for job in json.loads(record.read_bytes())]
    except (FileNotFoundError, ValueError, TypeError):
        return []


def _in_queue(jobs: list[str]) -> bool:
    """Whether any of the jobs waits or runs. A queue that does not answer is no answer: true."""
    try:
        answer = subprocess.run(["squeue", "--noheader", "--format=%i %T", f"--jobs={','.join(jobs)}"], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError("executor=slurm needs squeue, which is not on PATH; run this on a login node of the cluster") from error
    if answer.returncode and _GONE not in answer.stderr:
        say(f"squeue does not answer ({' '.join(answer.stderr.split())[:200] or f'exit code {answer.returncode}'}); asking again")
        return True
    return bool(answer.stdout.strip())


def _incomplete(output: Path, watch: Watch) -> UserError:
    missing = len(watch.waiting) - len(watch.finished)
    reasons = watch.failures()
    why = f"the first because of: {reasons[0]}" if reasons else "without a word: they were killed, or ran out of time or memory"
    logs = output / PARTS / LOGS
    which = f"{missing} of {counted(len(watch.waiting), 'shard')} {are(missing)} missing"
    return UserError(f"{which}, {why}; logs are in {logs}; run the same command to continue")


def run_on_ray(output: Path, config: ExecutorConfig, tasks: int, workers: int | None, watch: Watch, display: Display) -> None:
    """Run what waits on a Ray cluster. UserError where Ray is missing, or shards are."""
    ray = require("ray", "executor=ray", "pip install -e '.[ray]'")
    output = output.resolve()
    path = os.pathsep.join(part for part in (str(REPOSITORY), os.environ.get("PYTHONPATH", "")) if part)
    environment = {"env_vars": {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}}
    try:
        ray.init(address=config.address, runtime_env=environment, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except (ConnectionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"no Ray cluster answers ({reason}); start one with `ray start --head`, or mend executor.address") from error
    try:
        _require_room(ray, config)
        with shown(watch, display, POLL_SECONDS / 5), open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            silence()
            executor = _ray_executor(output, config, tasks, workers or max(1, int(ray.cluster_resources().get("CPU", 1))))
            with contextlib.suppress(RuntimeError, OSError):  # of tasks, whose own words follow, and of statistics of tasks that ran before
                executor.run()
    finally:
        ray.shutdown()
        silence()
    watch.look()
    if len(watch.finished) < len(watch.waiting):
        raise _incomplete(output, watch)


def _ray_executor(output: Path, config: ExecutorConfig, tasks: int, workers: int) -> RayPipelineExecutor:
    return RayPipelineExecutor(
        pipeline(output),
        tasks=tasks,
        workers=workers,
        logging_dir=str(output / PARTS / LOGS),
        cpus_per_task=config.cpus_per_task,
        mem_per_cpu_gb=config.memory_gb_per_cpu,
    )


def _require_room(ray: Any, config: ExecutorConfig) -> None:
    """Ray waits for ever for a task that no machine has room for."""
    wanted = {"CPU": config.cpus_per_task, "memory": config.memory_gb_per_cpu * config.cpus_per_task * 1024**3}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(kind, 0) >= amount for kind, amount in wanted.items()) for node in nodes):
        largest = max((node.get("memory", 0) for node in nodes), default=0) / 1024**3
        raise UserError(
            f"no machine of the Ray cluster has {config.cpus_per_task} cores and {wanted['memory'] / 1024**3:.0f} GB for a task "
            f"(the largest has {largest:.1f} GB); set executor.cpus_per_task and executor.memory_gb_per_cpu lower"
        )
