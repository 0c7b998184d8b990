"""What the agent of torchrun is taught, on stand-ins for its classes; tests/test_preemption.py has the real ones."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretrain import agent


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "told", [])


def test_the_first_request_is_forwarded_and_the_second_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(agent.os, "kill", lambda pid, number: sent.append((pid, number)))
    before = signal.getsignal(signal.SIGUSR1)

    def at_once(number: int, frame: object) -> None:
        raise RuntimeError(f"stopped by {number}")

    class Context:
        def start(self) -> None:
            processes._terminate_process_handler(15, None)

        def pids(self) -> dict[int, int]:
            return {0: 1000, 1: 1001}

    processes = SimpleNamespace(_terminate_process_handler=at_once, PContext=Context)
    agent._forward_signals(processes)
    try:
        with pytest.raises(RuntimeError, match="stopped by 1$"):
            processes._terminate_process_handler(1, None)
        Context().start()
        assert sent == [(1000, 15), (1001, 15)] and agent.told == [signal.SIGTERM]
        with pytest.raises(RuntimeError, match="stopped by 15"):
            processes._terminate_process_handler(15, None)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_ranks_are_told_that_another_one_failed(tmp_path: Path) -> None:
    closed: list[object] = []

    class Context:
        error_files = {0: str(tmp_path / "attempt_0/0/error.json"), 1: "/dev/null"}

        def close(self, death_sig: object = None, timeout: int = 30) -> None:
            assert (tmp_path / "attempt_0" / agent.CLOSING).exists()
            closed.append(death_sig)

    (tmp_path / "attempt_0").mkdir()
    agent._mark_closing(SimpleNamespace(PContext=Context))
    Context().close(signal.SIGTERM, 5)
    assert closed == [signal.SIGTERM]


@pytest.mark.parametrize(("codes", "left"), [((64,), 0), ((75, -15), 0), ((1,), 3), ((-9, 69), 3), ((70,), 3), ((), 3)])
def test_ranks_that_explained_themselves_are_not_restarted(codes: tuple[int, ...], left: int) -> None:
    class Agent:
        _remaining_restarts = 3

        def _monitor_workers(self, group: object) -> SimpleNamespace:
            return SimpleNamespace(failures={rank: SimpleNamespace(exitcode=code) for rank, code in enumerate(codes)} or None)

    agent._end_restarts(Agent, frozenset({64, 65, 75, 130}))
    running = Agent()
    running._monitor_workers(None)
    assert running._remaining_restarts == left


def test_what_is_changed_is_there_in_the_installed_torch() -> None:
    import torch.distributed.elastic.agent.server.local_elastic_agent as agents
    import torch.distributed.elastic.multiprocessing.api as processes

    assert callable(processes._terminate_process_handler) and callable(agents.LocalElasticAgent._monitor_workers)
    assert callable(processes.PContext.start) and callable(processes.PContext.close)


def test_whoever_waits_long_is_told_how_to_end_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(agent, "PATIENCE", 0.01)
    agent._remind(signal.SIGTERM).join(5)
    words = "torchrun: 0.01 s after SIGTERM the ranks have not ended; SIGTERM again stops them in half a minute, saved or not\n"
    assert capsys.readouterr().err == words
