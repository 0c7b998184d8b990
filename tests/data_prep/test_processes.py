"""Workers that are killed, Ctrl-C, a front end that dies: an error in a sentence or none, nothing half-written, nobody left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from data_prep.config import TrainTokenizerConfig
from data_prep.train_tokenizer import train_tokenizer
from pretrain.data.manifest import Manifest
from pretrain.data.tokenizer import Tokenizer
from tests.data.examples import text, write_jsonl

LAUNCHER = Path(__file__).resolve().parents[2] / "launchers/prepare_data.py"
Start = Callable[[], tuple[subprocess.Popen[str], list[psutil.Process]]]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of some seconds each."""
    folder = tmp_path_factory.mktemp("text")
    documents = [text(2000, seed) for seed in range(40)]
    for number in range(2):
        write_jsonl(folder / f"{number}.jsonl", documents * 48)
    return folder


@pytest.fixture
def running(source: Path, model_file: Path, tmp_path: Path) -> Iterator[Start]:
    """A front end whose two workers are at work."""
    begun: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        arguments = [f"input={source}", f"tokenizer={model_file}", f"output={tmp_path}/out", "shard_bytes=1", "workers=2"]
        process = subprocess.Popen(
            [sys.executable, str(LAUNCHER), *arguments], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        begun.append(process)
        deadline = time.monotonic() + 60
        while len(list((tmp_path / "out/parts").glob("*.progress"))) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        children = psutil.Process(process.pid).children(recursive=True)
        return process, [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]

    yield start
    for process in begun:
        if process.poll() is None:
            process.kill()


def ended(processes: list[psutil.Process]) -> bool:
    """Whether all are gone within ten seconds."""
    return not psutil.wait_procs(processes, timeout=10)[1]


def test_a_killed_worker_is_a_sentence_and_the_rest_continues(running: Start, tmp_path: Path) -> None:
    process, workers = running()
    assert len(workers) == 2
    workers[0].kill()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 64
    assert said == "error: a worker was killed, probably for lack of memory; run the same command to continue, with fewer workers=\n"
    assert ended(workers)
    process, _ = running()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0 and Manifest.load(tmp_path / "out").documents == 3840, said
    assert not list((tmp_path / "out").rglob("*.tmp")), "not even what the killed one could not remove"


def test_ctrl_c_ends_everything_and_says_nothing(running: Start, tmp_path: Path) -> None:
    process, workers = running()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
    assert ended(workers) and not list((tmp_path / "out").rglob("*.tmp"))


def test_workers_do_not_outlive_the_front_end(running: Start, tmp_path: Path) -> None:
    process, workers = running()
    process.kill()
    assert ended(workers) and not list((tmp_path / "out").rglob("*.tmp"))
    again, _ = running()  # the lock is free
    os.killpg(again.pid, signal.SIGINT)
    again.communicate(timeout=60)


@pytest.mark.long
def test_a_document_of_200_megabytes_on_one_line(tmp_path: Path) -> None:
    """In a process of its own, whose memory is measured: some times the document, and no hundred bytes for each of its characters."""
    pair = "the king "
    words = write_jsonl(tmp_path / "words.jsonl", [pair * 50])
    model_file = train_tokenizer(TrainTokenizerConfig(input=str(words), output=str(tmp_path / "two.model"), vocab_size=19, byte_fallback=False))
    count = 200_000_000 // len(pair)
    with (tmp_path / "a.jsonl").open("w") as stream:
        stream.write('{"text": "' + pair * count + '"}\n{"text": "the end"}\n')
    script = (
        "import pathlib, re, sys\n"
        "from data_prep.config import TokenizeConfig\n"
        "from data_prep.prepare import prepare\n"
        "prepare(TokenizeConfig(input='a.jsonl', tokenizer=sys.argv[1], output='out', workers=1))\n"
        "print(re.search(r'VmHWM:\\s*([0-9]+)', pathlib.Path('/proc/self/status').read_text())[1])\n"  # ru_maxrss counts the parent before exec
    )
    run = [sys.executable, "-c", script, str(model_file)]
    done = subprocess.run(run, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(LAUNCHER.parents[1])}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    manifest, tokenizer = Manifest.load(tmp_path / "out"), Tokenizer(model_file)
    one, two, end = (len(ids) for ids in tokenizer.encode([pair, pair * 2, "the end"]))
    assert manifest.counts == {"documents": 2, "empty": 0, "bad": 0, "filtered": 0}
    assert manifest.tokens == one + (count - 1) * (two - one) + 1 + end + 1
    assert int(done.stdout) < 1_600_000, "kilobytes"
