"""A Slurm of two nodes on this machine, in a folder of its own: Debian's slurmctld, slurmd and munge, as root, without systemd.

Both nodes are this machine under two names and ports. Every daemon is stopped by its own process id.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n1", "n2")


def available() -> bool:
    """Whether this machine can run one: the packages are installed, and this is root."""
    return os.geteuid() == 0 and all(_daemon(name) for name in DAEMONS) and shutil.which("sbatch") is not None


def _daemon(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class RealSlurm:
    """The daemons. environment: what a command of Slurm needs to find them."""

    kind = "real"

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, dict[str, subprocess.Popen[bytes]]()
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("state", "spool_n1", "spool_n2", "munge"):
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o711)
        self._write_configuration()
        try:
            self._start("munged", "--foreground", "--force", *self._munge())
            self._until(lambda: (folder / "munge" / "socket").exists(), "munged")
            self._start("slurmctld", "-D", "-i", "-f", self.environment["SLURM_CONF"])
            for node in NODES:
                self.start_node(node)
            self._until(lambda: self.command("sinfo", "--noheader", "--format=%T").stdout.split() == ["idle"], "slurmd")
        except BaseException:
            self.stop()
            raise

    def _munge(self) -> list[str]:
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        return [f"--{option}={self.folder / 'munge' / name}" for option, name in files.items()]

    def _write_configuration(self) -> None:
        host, folder = socket.gethostname().partition(".")[0], self.folder
        control, *ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr={host} Port={port} CPUs={os.cpu_count()} RealMemory=1000 State=UNKNOWN"
            for name, port in zip(NODES, ports, strict=True)
        )
        (folder / "slurm.conf").write_text(
            f"""ClusterName=test
SlurmctldHost={host}({host})
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=5
MinJobAge=300
RebootProgram=/bin/true
{nodes}
PartitionName=test Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE State=UP
"""
        )

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._start("slurmd", "-D", "-N", node, "-f", self.environment["SLURM_CONF"], name=node)

    def _start(self, daemon: str, *words: str, name: str | None = None) -> None:
        path = _daemon(daemon)
        assert path is not None
        log = (self.folder / f"{name or daemon}.out").open("ab")
        self.processes[name or daemon] = subprocess.Popen([path, *words], stdout=log, stderr=log, env=self.environment, start_new_session=True)

    def command(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """A command of Slurm."""
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)

    def fail_node(self, node: str) -> None:
        """As if its machine lost power: the daemon goes first, then every step before it can report, then what the steps ran."""
        daemon = self.processes.pop(node)
        daemon.kill()
        daemon.wait(10)
        steps = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "slurmstepd" and self._is_on(process, node)]
        family = [*steps, *(child for step in steps for child in step.children(recursive=True))]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _is_on(self, step: psutil.Process, node: str) -> bool:
        """Whether a step of this cluster runs on a node: its tasks know, and Slurm gives them the configuration."""
        for child in step.children():
            with contextlib.suppress(psutil.Error):
                environment = child.environ()
                if (environment.get("SLURMD_NODENAME"), environment.get("SLURM_CONF")) == (node, self.environment["SLURM_CONF"]):
                    return True
        return False

    def _until(self, holds: object, what: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not holds():  # type: ignore[operator]
            logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")]))
            assert time.monotonic() < deadline, f"{what} did not come up within {seconds} s:\n{logs}"
            time.sleep(0.1)

    def stop(self) -> None:
        """End every daemon that was started here, steps first."""
        if (self.folder / "slurm.conf").exists() and "slurmctld" in self.processes:
            self.command("scancel", "--user=root")
            deadline = time.monotonic() + 20
            while self.command("squeue", "--noheader").stdout.strip() and time.monotonic() < deadline:
                time.sleep(0.2)
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        self.processes.clear()
