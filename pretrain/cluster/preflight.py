"""Are the nodes of a job fit for it? One process per node answers, in under a minute, before a rank starts; what is wrong names node and fix.

    1. every node says what it sees (node_report.py) to a store on the first node; one that does not is named
    2. the first node judges the reports side by side
    3. only then collectives: clocks are compared after a barrier, gloo sums, and NCCL on GPUs, over the nodes and within each
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.cluster.node_report import CLOCK_SECONDS, NodeReport, look_around, problems_between
from pretrain.cluster.peers import Peers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

GATHER_SECONDS = 25.0
"""How long the first node waits for the others: Python and torch load from a network disk meanwhile."""
COLLECTIVE_SECONDS = 20.0
PARTING_SECONDS = 5.0
TOKEN = ".preflight"
SAY = partial(print, flush=True)


def preflight(
    peers: Peers, *, port: int, run_directory: Path, gpus: int, free_bytes: int, gather: float = GATHER_SECONDS, say: Callable[[str], None] = SAY
) -> bool:
    """Whether this job may start: the same answer on every node, told by the first. Every node of the job calls it."""
    began = time.monotonic()
    store = _open_store(peers, port, gather, say)
    if store is None:
        return False
    token = run_directory / f"{TOKEN}-{port}"
    try:
        _exchange_token(store, peers, token)
        report = look_around(peers, run_directory=run_directory, gpus=gpus, free_bytes=free_bytes, token=token, expected=store.get("token").decode())
        store.set(f"report/{peers.own}", json.dumps(asdict(report)))
        if peers.own == 0:
            _judge(store, peers, run_directory, gather, say)
        store.wait(["verdict"], timedelta(seconds=2 * gather))
        sound = store.get("verdict") == b"sound" and _collectives(store, peers, gpus, say)
        _part(store, peers)
        if peers.own == 0 and sound:
            say(f"preflight: {len(peers)} node{'s' * (len(peers) > 1)} sound, {report.free_gib:,.1f} GiB free, {time.monotonic() - began:.1f} s")
        return sound
    except Exception as error:  # the store's host left, or a collective failed: said on every node that saw it
        why = "look for the first complaint above, or a firewall between the nodes"
        say(f"preflight: {peers.names[peers.own]} lost the other nodes ({_first_line(error)}): {why}")
        return False
    finally:
        if peers.own == 0:
            token.unlink(missing_ok=True)


def _open_store(peers: Peers, port: int, seconds: float, say: Callable[[str], None]) -> "Store | None":
    from torch._C._distributed_c10d import TCPStore

    try:
        return TCPStore(peers.head, port, is_master=peers.own == 0, timeout=timedelta(seconds=seconds), wait_for_workers=False)
    except Exception as error:
        if peers.own == 0:
            what, fix = f"cannot listen on port {port}", "another program may have it: submit again, or exclude the node"
        else:
            what = f"cannot reach {peers.names[0]} at {peers.head}:{port}"
            fix = "check that it lives, and that no firewall is between; exclude one of the two"
        say(f"preflight: {peers.names[peers.own]} {what} ({_first_line(error)}): {fix}")
        return None


def _exchange_token(store: "Store", peers: Peers, path: Path) -> None:
    """The first node writes a file that the others must be able to read."""
    if peers.own != 0:
        store.wait(["token"])
        return
    text = os.urandom(16).hex()
    with contextlib.suppress(OSError):  # its report says that it cannot write there
        path.write_text(text)
    store.set("token", text)


def _judge(store: "Store", peers: Peers, run_directory: Path, seconds: float, say: Callable[[str], None]) -> None:
    """On the first node: gather the reports, and publish the verdict."""
    deadline, reports, problems = time.monotonic() + seconds, {}, []
    for number, name in enumerate(peers.names):
        try:
            store.wait([f"report/{number}"], timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
            reports[name] = NodeReport(**json.loads(store.get(f"report/{number}")))
        except Exception:  # torch has several classes for a wait that was too long
            what = f"cannot reach {peers.names[0]} at {peers.head}, or hangs"
            problems.append(f"{name} did not report within {seconds:.0f} s: it {what}; leave it out with cluster.extra=[--exclude={name}]")
    problems = [f"{name}: {problem}" for name, report in reports.items() for problem in report.problems] + problems + problems_between(reports)
    for problem in problems:
        say(f"preflight: {problem}")
    if (submitted := submitted_sources(run_directory)) not in ("", reports[peers.names[0]].sources):
        say(f"preflight: note: the sources are no longer those that were submitted (hash {submitted}); see slurm/code.json and code.diff")
    store.set("verdict", "unsound" if problems else "sound")


def submitted_sources(run_directory: Path) -> str:
    """Hash of the sources at the time of the submission; empty if nothing tells."""
    try:
        return str(json.loads((run_directory / "slurm" / "code.json").read_text())["sources"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _part(store: "Store", peers: Peers) -> None:
    """The first node, whose store the others read, leaves last."""
    if peers.own != 0:
        store.set(f"left/{peers.own}", "")
        return
    with contextlib.suppress(Exception):  # one that is gone already needs no store
        store.wait([f"left/{number}" for number in range(1, len(peers))], timedelta(seconds=PARTING_SECONDS))


def _collectives(store: "Store", peers: Peers, gpus: int, say: Callable[[str], None]) -> bool:
    """Whether sums over the nodes are right, and the clocks agree."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    limit, size, own = timedelta(seconds=COLLECTIVE_SECONDS), len(peers), peers.own
    problems: list[str] = []
    for backend, device in [("gloo", "cpu"), *([("nccl", "cuda:0")] if gpus else [])]:
        dist.init_process_group(backend, store=PrefixStore(backend, store), rank=own, world_size=size, timeout=limit)
        try:
            total = torch.full((1024,), float(own + 1), device=device)
            dist.all_reduce(total)
            if not bool((total == size * (size + 1) / 2).all()):
                sums = f"{total[0].item():g}, not {size * (size + 1) / 2:g}"
                problems.append(f"{peers.names[own]}: {backend} summed {size} nodes to {sums}: exclude the node")
            if backend == "gloo":
                problems += _compare_clocks(peers)
        finally:
            dist.destroy_process_group()
    if gpus > 1:
        problems += _sum_within_node(peers, gpus)
    for problem in problems:
        say(f"preflight: {problem}")
    store.set(f"collectives/{own}", "wrong" if problems else "right")
    store.wait([f"collectives/{number}" for number in range(size)], limit)
    return all(store.get(f"collectives/{number}") == b"right" for number in range(size))


def _compare_clocks(peers: Peers) -> list[str]:
    """On the first node: whose clock is away from the median. After a barrier all read theirs within a fraction of a second."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    mine = torch.tensor([time.time()], dtype=torch.float64)
    everyone = [torch.zeros_like(mine) for _ in peers.names]
    dist.all_gather(everyone, mine)
    return clock_problems(peers.names, [clock.item() for clock in everyone]) if peers.own == 0 else []


def clock_problems(names: Sequence[str], clocks: Sequence[float]) -> list[str]:
    """A sentence for every clock (seconds) that is further than CLOCK_SECONDS from the median."""
    median = sorted(clocks)[len(clocks) // 2]
    return [
        f"{name}: its clock is {abs(clock - median):.1f} s {'ahead' if clock > median else 'behind'}, and may be {CLOCK_SECONDS:g} s off: "
        "start chrony or ntpd there"
        for name, clock in zip(names, clocks, strict=True)
        if abs(clock - median) > CLOCK_SECONDS
    ]


def _sum_within_node(peers: Peers, gpus: int) -> list[str]:
    """NCCL over the GPUs of this node, from one process."""
    import torch
    from torch.cuda import nccl

    parts = [torch.full((1024,), float(gpu + 1), device=f"cuda:{gpu}") for gpu in range(gpus)]
    nccl.all_reduce(parts)
    wrong = [gpu for gpu, part in enumerate(parts) if not bool((part == gpus * (gpus + 1) / 2).all())]
    return [f"{peers.names[peers.own]}: NCCL gave a wrong sum on GPU {gpu}: exclude the node, and have the GPU looked at" for gpu in wrong]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
