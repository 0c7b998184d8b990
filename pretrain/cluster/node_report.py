"""What one node sees of itself, its disk, its GPUs and the names of the others; and what two reports must agree on. torch only for GPUs."""

import errno
import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.cluster.code_version import sources_hash
from pretrain.cluster.peers import Peers

GIB = 1024**3
CLOCK_SECONDS = 2.0
"""How far clocks may differ: the lock of a run directory and its logs compare times of several machines."""
TOKEN_SECONDS = 10.0
"""How long a file of another node may take to appear: network file systems keep what they know of a folder for a while."""
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """problems are sentences without the node's name. boot tells machines apart; sources is the hash of the code that runs there."""

    boot: str
    sources: str
    gpu: str
    driver: str
    free_gib: float
    problems: list[str] = field(default_factory=list)


def look_around(peers: Peers, *, run_directory: Path, gpus: int, free_bytes: int, token: Path, expected: str) -> NodeReport:
    """The report of this node. token is the first node's file, which holds `expected`."""
    free, disk = disk_problems(run_directory, free_bytes)
    gpu, driver, devices = _gpus(gpus)
    problems = [*name_problems(peers), *disk, *token_problems(token, expected, peers.names[0]), *devices]
    return NodeReport(boot=_boot(), sources=sources_hash(REPOSITORY), gpu=gpu, driver=driver, free_gib=free / GIB, problems=problems)


def problems_between(reports: dict[str, NodeReport]) -> list[str]:
    """What is wrong with reports side by side: a GPU, a driver or sources unlike those of most nodes; a loopback address between machines."""
    found = []
    fixes = {"gpu": "ask for one kind with cluster.constraint", "driver": "exclude the node", "sources": "let every node see one checkout"}
    for what, fix in fixes.items():
        values = [getattr(report, what) for report in reports.values()]
        usual = max(values, key=values.count, default="")
        found += [
            f"{name}: its {what} is {getattr(report, what) or 'none'}, and {usual or 'none'} on most nodes: {fix}"
            for name, report in reports.items()
            if getattr(report, what) != usual
        ]
    return found


def name_problems(peers: Peers) -> list[str]:
    """Names that do not resolve, or to this machine where another is meant. Nodes of one machine (tests) may share a loopback address."""
    found = []
    for number, (name, address) in enumerate(zip(peers.names, peers.addresses, strict=True)):
        try:
            resolved = {str(entry[4][0]) for entry in socket.getaddrinfo(address, None)}
        except OSError as error:
            found.append(f"the address {address} of {name} does not resolve ({error.strerror or error}): mend DNS or /etc/hosts")
            continue
        loopback = [each for each in resolved if each.startswith("127.") or each == "::1"]
        if loopback and len(set(peers.addresses)) > 1:
            whose = "its own address" if number == peers.own else f"the address of {name}"
            found.append(f"{whose}, {address}, resolves to {loopback[0]}, which every machine takes for itself: mend /etc/hosts")
    return found


def disk_problems(run_directory: Path, free_bytes: int) -> tuple[int, list[str]]:
    """Free bytes of the run directory, and what is wrong with it: it is missing, cannot be written, or is too full."""
    probe = run_directory / f".preflight-{socket.gethostname()}-{os.getpid()}"
    try:
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
        free = shutil.disk_usage(run_directory).free
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free some space" if full else "mount the file system there, or choose another root="
        return 0, [f"the run directory {run_directory} cannot be written ({error.strerror}): {fix}"]
    if free < free_bytes:
        fix = "free some space, or choose another root="
        return free, [f"{free / GIB:,.1f} GiB are free in {run_directory}, and the next two checkpoints need {free_bytes / GIB:,.1f} GiB: {fix}"]
    return free, []


def token_problems(token: Path, expected: str, writer: str, seconds: float = TOKEN_SECONDS) -> list[str]:
    """Whether a file that another node wrote is seen here."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if token.read_text() == expected:
                return []
        except OSError:
            pass
        if time.monotonic() > deadline:
            return [f"a file that {writer} wrote into {token.parent} is not seen: the run directory must be on a file system that all nodes share"]
        time.sleep(0.2)


def _gpus(expected: int) -> tuple[str, str, list[str]]:
    """Kind of GPU, driver, and what is wrong with them."""
    if not expected:
        return "", "", []
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count != expected:
        return "", "", [f"PyTorch sees {count} GPUs, and the job asked for {expected}: look at nvidia-smi there, or exclude the node"]
    try:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return torch.cuda.get_device_name(0), "", ["nvidia-smi does not answer: the driver is missing or hangs; exclude the node"]
    return torch.cuda.get_device_name(0), driver, []


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
