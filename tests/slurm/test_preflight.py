"""Preflights of several processes that stand for nodes, each with one thing wrong: the sentence names the node and what helps."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from pretrain.cluster.node_report import NodeReport, disk_problems, name_problems, problems_between, token_problems
from pretrain.cluster.peers import Peers
from pretrain.cluster.preflight import clock_problems, preflight
from pretrain.errors import UserError
from tests.distributed import run_distributed


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def peers(own: int, count: int = 2) -> Peers:
    return Peers(names=tuple(f"n{number}" for number in range(count)), addresses=("127.0.0.1",) * count, own=own)


def on_node(run_directory: str, port: int, changes: dict[int, dict[str, object]]) -> tuple[bool, list[str], float]:
    """A preflight on this rank's node; `changes` holds other arguments for some of them."""
    import torch.distributed as dist

    own, count = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # it makes its own
    said: list[str] = []
    settings = {"run_directory": Path(run_directory), "gpus": 0, "free_bytes": 1, "gather": 5.0} | changes.get(own, {})
    began = time.monotonic()
    sound = preflight(peers(own, count), port=port, say=said.append, **settings)  # type: ignore[arg-type]
    return sound, said, time.monotonic() - began


def test_sound_nodes(tmp_path: Path) -> None:
    answers = run_distributed(on_node, 3, str(tmp_path), free_port(), {})
    assert [sound for sound, _, _ in answers] == [True] * 3
    said = answers[0][1]
    assert len(said) == 1 and said[0].startswith("preflight: 3 nodes sound, ") and answers[1][1] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({"free_bytes": 1 << 60}, ["n1: ", "and the next two checkpoints need 1,073,741,824.0 GiB: free some space"]),
        ({"gpus": 8}, ["n1: PyTorch sees 0 GPUs, and the job asked for 8"]),
    ],
)
def test_one_unsound_node_stops_all_and_is_named(tmp_path: Path, changes: dict[str, object], sentences: list[str]) -> None:
    answers = run_distributed(on_node, 2, str(tmp_path), free_port(), {1: changes})
    assert [sound for sound, _, _ in answers] == [False, False]
    said = "\n".join(answers[0][1])
    assert all(sentence in said for sentence in sentences) and "n0:" not in said, said


def test_a_directory_that_is_not_shared_is_named(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    problems = token_problems(tmp_path / "own" / "token", "text", "n0", seconds=0.3)
    assert len(problems) == 1 and "a file that n0 wrote into" in problems[0] and "file system that all nodes share" in problems[0]
    (tmp_path / "own" / "token").write_text("text")
    assert token_problems(tmp_path / "own" / "token", "text", "n0") == []


def test_a_missing_node_is_named_in_time(tmp_path: Path) -> None:
    said: list[str] = []
    began = time.monotonic()
    assert not preflight(peers(0), port=free_port(), run_directory=tmp_path, gpus=0, free_bytes=0, gather=2.0, say=said.append)
    assert time.monotonic() - began < 15
    assert said[0].startswith("preflight: n1 did not report within 2 s: it cannot reach n0 at 127.0.0.1, or hangs; leave it out with"), said


def test_an_unreachable_first_node_is_named(tmp_path: Path) -> None:
    said: list[str] = []
    port = free_port()
    assert not preflight(peers(1), port=port, run_directory=tmp_path, gpus=0, free_bytes=0, gather=2.0, say=said.append)
    assert said[0].startswith(f"preflight: n1 cannot reach n0 at 127.0.0.1:{port} (") and "firewall" in said[0]


def test_a_first_node_that_dies_is_no_hang(tmp_path: Path) -> None:
    """A listener that accepts and says nothing, as a stuck head would."""
    with socket.socket() as stuck:
        stuck.bind(("127.0.0.1", 0))
        stuck.listen()
        threading.Timer(1.0, stuck.close).start()
        said: list[str] = []
        began = time.monotonic()
        assert not preflight(peers(1), port=stuck.getsockname()[1], run_directory=tmp_path, gpus=0, free_bytes=0, gather=2.0, say=said.append)
        assert time.monotonic() - began < 30 and len(said) == 1


def test_clocks() -> None:
    names = ("a", "b", "c")
    assert clock_problems(names, (100.0, 101.9, 98.1)) == []
    assert clock_problems(names, (100.0, 100.1, 103.0)) == ["c: its clock is 2.9 s ahead, and may be 2 s off: start chrony or ntpd there"]


def test_names() -> None:
    both = Peers(names=("n0", "n1"), addresses=("127.0.1.1", "no-such-host.invalid"), own=0)
    problems = name_problems(both)
    assert "its own address, 127.0.1.1, resolves to 127.0.1.1, which every machine takes for itself" in problems[0]
    assert problems[1].startswith("the address no-such-host.invalid of n1 does not resolve (") and "mend DNS" in problems[1]
    assert name_problems(peers(0)) == [], "nodes of one machine may share its loopback address"


def test_disk(tmp_path: Path) -> None:
    free, problems = disk_problems(tmp_path, 0)
    assert free > 0 and problems == []
    assert "cannot be written (No such file or directory): mount the file system there" in disk_problems(tmp_path / "none", 0)[1][0]


def test_nodes_that_differ() -> None:
    report = {"boot": "x", "free_gib": 1.0, "driver": "580.1", "gpu": "H100"}
    reports = {name: NodeReport(sources="a", **report) for name in ("n0", "n1")}  # type: ignore[arg-type]
    assert problems_between(reports) == []
    reports["n2"] = NodeReport(sources="b", **report | {"gpu": "A100"})  # type: ignore[arg-type]
    assert problems_between(reports) == [
        "n2: its gpu is A100, and H100 on most nodes: ask for one kind with cluster.constraint",
        "n2: its sources is b, and a on most nodes: let every node see one checkout",
    ]


def test_code_that_changed_since_the_submission_is_told(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "code.json").write_text(json.dumps({"sources": "other"}))
    said: list[str] = []
    assert preflight(peers(0, 1), port=free_port(), run_directory=tmp_path, gpus=0, free_bytes=0, say=said.append)
    assert "the sources are no longer those that were submitted (hash other)" in said[0]


@pytest.mark.parametrize(("text", "node"), [("n0=1.2.3.4,n1", "0"), ("n0=1.2.3.4", "1"), ("n0=1.2.3.4", "")])
def test_peers_that_make_no_sense_are_refused(text: str, node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NODEID", node)
    with pytest.raises(UserError, match="--peers"):
        Peers.of_task(text)
