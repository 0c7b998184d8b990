"""The watchdog: verdicts from known situations, and real ranks that hang."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from pretrain.telemetry.heartbeat import Heartbeat, compare
from pretrain.telemetry.progress import figures
from pretrain.telemetry.watchdog import HUNG_EXIT, Sign, Watchdog, describe, read_signs, verdict
from tests.distributed import _CONTEXT, run_distributed
from tests.small_run import small_config


def sign(rank: int, collective: str = "allreduce over default_pg", entered: int = 40, phase: str = "step", step: int = 7) -> Sign:
    return Sign(rank, step, phase, [56, 57], entered, collective, 30.0)


@pytest.mark.parametrize(
    ("signs", "words"),
    [
        ([sign(0), sign(2), sign(3)], "rank 1 gave no sign of life (dead, stopped, or stuck in compiled code); ranks 0, 2, 3 wait in allreduce"),
        ([sign(1)], "rank 0 gave no sign"),
        ([sign(0), sign(1, "", phase="data"), sign(2), sign(3)], "rank 1 is in no collective (phase data); ranks 0, 2, 3 wait in allreduce over"),
        ([sign(0), sign(1), sign(2, "recv over PIPELINE", 38), sign(3)], "rank 2 still in recv over PIPELINE, the others in allreduce"),
        ([sign(0), sign(1), sign(2), sign(3)], "every rank waits in allreduce over default_pg: the network"),
    ],
)
def test_the_rank_that_is_missing_is_named(signs, words):
    said = verdict(signs, 1 + max(3 if len(signs) > 1 else 1, 1))
    assert said.startswith("no step boundary for 30 s after step 7: ") and words in said


def test_a_sign_in_words():
    assert describe(sign(3)) == (
        "rank 3, phase step after step 7, samples 56, 57: waits in collective 40, allreduce over default_pg; 30 s without progress"
    )


def hanging(folder: Path, rank: int, how: str, store: str, codes) -> None:
    """Three ranks: all do an all-reduce, then rank 1 does something else while the others wait for it in the next."""
    import torch.distributed as dist

    os.dup2(os.open(folder / f"said_{rank}", os.O_CREAT | os.O_WRONLY), 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    watchdog = Watchdog(folder, rank, 3, 3.0)
    watchdog.start()
    dist.all_reduce(torch.ones(1))
    watchdog.beat(5, "step", [80 + rank])
    if rank == 1:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            time.sleep(1)  # the stack in the report ends here
    dist.all_reduce(torch.ones(1))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleeping", "stopped"])
def test_ranks_that_wait_name_the_one_that_does_not_come(tmp_path, how):
    processes = [_CONTEXT.Process(target=hanging, args=(tmp_path, rank, how, str(tmp_path / "store"), None)) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        for rank in (0, 2) if how == "stopped" else (0, 1, 2):
            processes[rank].join(60)
        codes = [processes[rank].exitcode for rank in (0, 2)]
        assert codes[0] == HUNG_EXIT and codes[1] in (HUNG_EXIT, 1), "or, once the first has ended, gloo ends the collective"
    finally:
        for process in processes:
            process.kill()
    said = [(tmp_path / f"said_{rank}").read_text() for rank in range(3)]
    lines = [line for text in said for line in text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "after step 5: rank 1 " in lines[0] and "ranks 0, 2 wait in allreduce over default_pg" in lines[0], said
    assert ("is in no collective (phase step)" in lines[0]) is (how == "sleeping")
    assert ("gave no sign of life" in lines[0]) is (how == "stopped")
    signs = {found.rank: found for found in read_signs(tmp_path / "hang")}
    assert signs[0].samples == [80] and signs[0].collective == "allreduce over default_pg"
    if how == "sleeping":
        report = (tmp_path / "hang/rank_1.txt").read_text()
        assert "in no collective" in report and "test_watchdog.py" in report and "in hanging" in report


def test_beats_and_closing_keep_it_quiet(tmp_path):
    ended: list[int] = []
    watchdog = Watchdog(tmp_path, 0, 1, 1.0, end=ended.append)
    watchdog.start()
    for step in range(8):
        time.sleep(0.25)
        watchdog.beat(step, "step")
    watchdog.close()
    time.sleep(1.2)
    off = Watchdog(tmp_path, 0, 1, 0, end=ended.append)
    off.start()
    off.close()
    assert ended == [] and not (tmp_path / "hang").exists()


def test_stragglers_are_compared_by_their_own_time():
    ranks = compare([[0.2, 0.8], [0.9, 0.1], [0.3, 0.7], [0.4, 0.6]])
    assert ranks == {
        "slowest_rank": 1, "slowest_rank_seconds": 0.9, "median_rank_seconds": pytest.approx(0.35), "waiting_share": pytest.approx(0.7)
    }  # fmt: skip
    assert compare([[1.0, 0.0]]) == {}


def test_a_straggler_is_shown_and_an_ordinary_rank_is_not():
    ranks = compare([[0.2, 0.8], [0.9, 0.1], [0.3, 0.7], [0.4, 0.6]])
    assert figures({"lr": 1.0} | ranks) == "lr 1.00e+00 | rank 1 is slow: the others wait 70% of the time"
    assert figures(compare([[0.5, 0.5], [0.55, 0.45]])) == ""


def test_on_cuda_only_the_last_step_before_a_record_is_measured():
    times = iter([1.0, 4.0])
    beat = Heartbeat(lambda own: [own, [2.0, 1.0]], sampled=True, clock=lambda: next(times))
    for last in (False, False, True):
        beat.begin(last=last)
        beat.end()
    assert beat.read() == {"slowest_rank": 0, "slowest_rank_seconds": 3.0, "median_rank_seconds": 2.5, "waiting_share": pytest.approx(1 / 3)}


def slowed(config, rank: int):
    """Train with one rank's every forward pass held up."""
    import torch.distributed as dist

    from pretrain.objectives.mdlm import MDLM
    from tests.small_run import train

    made = MDLM.network_input

    def held_up(*arguments, **options):
        if dist.get_rank() == rank:
            time.sleep(0.03)
        return made(*arguments, **options)

    MDLM.network_input = held_up
    return len(train(config)["losses"])


@pytest.mark.parametrize(("rank", "layout"), [(1, {}), (0, {"pipeline": 2})])
def test_an_artificially_slow_rank_is_named(tmp_path, rank, layout):
    from pretrain.parallel.config import ParallelConfig
    from pretrain.telemetry.log import read_log

    config = small_config(tmp_path, parallel=ParallelConfig(**layout))
    assert run_distributed(slowed, 2, config, rank) == [6, 6]
    records = [r for r in read_log(config.directory / "log.jsonl") if r["kind"] == "train"][1:]
    assert [r["slowest_rank"] for r in records] == [rank] * 5
    assert all(r["slowest_rank_seconds"] > 0.05 and r["waiting_share"] > 0.2 for r in records)
