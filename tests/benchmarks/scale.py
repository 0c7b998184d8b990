"""Start of a training run at 2.1T tokens: time and memory of the 8 ranks of one node, first batch included, and the audit's speed.

    python tests/benchmarks/scale.py                                    4,000 shards in 20 sources, 525M tokens and 525,000 documents each
    python tests/benchmarks/scale.py --data                             the data alone: no network, optimizer, process group and log
    python tests/benchmarks/scale.py --folder /scratch/scale --ranks 8 --shards 4000 --sources 20

The corpora are made in a temporary folder: every .bin is a hole of its real size (4.2 TB of uint16, no disk), so their ids read as 0, and every
.idx is a name of one real file of its source (21 bytes for each of 525,000 documents is what a shard of web text has). Reading a hole and a
cached index is quicker than a cold network file system: what is measured is this program's work. Each rank is a process of its own that runs
launchers/pretrain.py as torchrun starts it: configuration, plan, process group, its share of the shards verified, network, DeepSpeed, run
directory, log, and the first batches of an AR run (L 2048, two phases) in place of the training. The network is tiny, since its memory is the
plan's matter. Memory by part is what a rank alone holds beyond the imports (anonymous pages). That of the node is read when all ranks have
their batches: the sum of their proportional set sizes, in which a page that several share counts once.
"""

import argparse
import dataclasses
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from pretrain.backbones.config import BackboneConfig  # noqa: E402
from pretrain.cluster.submission import PRESET, frozen_presets  # noqa: E402
from pretrain.data.config import DataConfig, PhaseConfig, SourceConfig  # noqa: E402
from pretrain.data.manifest import Manifest  # noqa: E402
from pretrain.errors import counted  # noqa: E402
from pretrain.objectives.config import ObjectiveConfig  # noqa: E402
from pretrain.run_config import BatchConfig, DurationConfig, RunConfig  # noqa: E402
from pretrain.telemetry.config import TelemetryConfig  # noqa: E402

TOKENS, DOCUMENTS = 525_000_000, 525_000
TOKENIZER, CONFIGS, CORPORA, RUNS = "small.model", "configs", "corpora", "runs"


def write(folder: Path, sources: int, shards: int) -> None:
    """Tokenizer, corpora and configuration, where they are not there yet."""
    from pretrain.data.tokenizer import Tokenizer
    from tests.data.examples import sentencepiece_file
    from tests.data.sparse import write_sparse

    if not (folder / TOKENIZER).exists():
        sentencepiece_file(folder)
    tokenizer = Tokenizer(str(folder / TOKENIZER))
    for number in range(sources):
        path = folder / CORPORA / f"source_{number:02d}"
        if not (path / "manifest.json").exists():
            about = {"ids": tokenizer.size, "tokenizer_hash": tokenizer.hash, "eos_id": tokenizer.eos_id}
            write_sparse(path, shards=shards // sources, tokens=TOKENS, documents=DOCUMENTS, **about)
    tree = dataclasses.asdict(run_of(folder))
    del tree["backbone"]["inputs"]  # no key: the rules derive it
    for path, text in frozen_presets(tree, folder / CONFIGS).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run_of(folder: Path) -> RunConfig:
    """Two thirds of the run in one mixture, the rest in another, as in the 1.7B runs."""
    names = sorted(path.name for path in (folder / CORPORA).iterdir())
    even, uneven = dict.fromkeys(names, 1.0), {name: 1.0 + number % 3 for number, name in enumerate(names)}
    tokens = sum(Manifest.load(folder / CORPORA / name).tokens for name in names)
    return RunConfig(
        name="scale", root=str(folder / RUNS), tokenizer=str(folder / TOKENIZER), objective=ObjectiveConfig(name="ar"),
        backbone=BackboneConfig(kind="dit", hidden=64, layers=2, heads=2, cond_dim=16),
        data=DataConfig(
            train={name: SourceConfig(path=str(folder / CORPORA / name)) for name in names},
            phases=[PhaseConfig(until=tokens * 2 / 3, mix=even), PhaseConfig(mix=uneven)],
        ),
        batch=BatchConfig(global_sequences=256, micro_sequences=2, length=2048), duration=DurationConfig(tokens=float(tokens)),
        telemetry=TelemetryConfig(wandb="off", peak_tflops=1),
    )  # fmt: skip


def kibibytes(process: int | str, *kinds: str) -> list[int]:
    """What /proc says about a process's memory, by kind of page."""
    lines = dict(line.split(":") for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:])
    return [int(lines[kind].split()[0]) for kind in kinds]


class Laps:
    """Seconds of each part of a start, and MiB that this process alone holds after it beyond the imports (libraries and files left out)."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._before, self._start = kibibytes("self", "Anonymous")[0], time.perf_counter()

    def end(self, name: str) -> None:
        """The part called `name` ends."""
        self.found[name] = time.perf_counter() - self._start
        self.found[f"MiB after it: {name}"] = (kibibytes("self", "Anonymous")[0] - self._before) / 2**10
        self._start = time.perf_counter()

    def around(self, owner: Any, function: str, before: str, name: str) -> None:
        """What comes before owner.function is the part `before`, and the function is the part `name`."""
        wrapped: Callable[..., Any] = getattr(owner, function)

        def measured(*args: Any, **kwargs: Any) -> Any:
            self.end(before)
            result = wrapped(*args, **kwargs)
            self.end(name)
            return result

        setattr(owner, function, measured)


def rank(folder: Path) -> None:
    """One rank's start, by the launcher's own code; it says what it measured, and holds its memory until it is told to go."""
    from launchers.pretrain import main as launch
    from pretrain import build, trainer

    print("ready", flush=True)
    sys.stdin.readline()  # all ranks of the node begin together
    laps = Laps()

    def first_batches(run: trainer.Trainer) -> str:
        laps.end("checkpoints, log and the rest")
        with run._training_loader() as loader:
            next(loader)
            laps.end("first batch")
            next(loader)
            laps.end("second batch")
            run.samples.fingerprint(run.derived.steps // 2)
            laps.end("fingerprint of a batch (at each save and resume)")
            run.samples.documents(run.derived.steps // 2)
            laps.end("audit of a step")
            print(json.dumps(laps.found), flush=True)
            sys.stdin.readline()
        return "the benchmark"

    laps.around(build, "open_corpora", "configuration, plan and process group", "corpora opened and verified")
    laps.around(trainer, "build_engine", "run directory", "network and DeepSpeed")
    trainer.Trainer.fit = first_batches  # type: ignore[method-assign]
    trainer.preemption.exit_code = lambda reason: 0  # type: ignore[assignment]
    sys.argv[1:] = ["--config-dir", str(folder / CONFIGS), f"+model={PRESET}"]
    sys.exit(launch())


def data_rank(folder: Path) -> None:
    """What of that is the data's: plan, verification and batches, by the same classes; torch and DALI are imported for them."""
    import nvidia.dali.pipeline  # noqa: F401  # the loader imports it: not the data's memory

    from pretrain.data.corpus import open_corpora
    from pretrain.data.loader import build_loader
    from pretrain.data.samples import TrainingSamples
    from pretrain.data.tokenizer import Tokenizer
    from pretrain.objectives.ar import AR
    from pretrain.plan.epochs import check_repetition, readings
    from pretrain.rules import resolve, run_vocabulary

    print("ready", flush=True)
    sys.stdin.readline()
    laps, number, ranks = Laps(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = run_of(folder)
    tokenizer = Tokenizer(config.tokenizer)
    vocabulary = run_vocabulary(config, tokenizer)
    derived = resolve(config, world_size=ranks, model_size=vocabulary.model_size)
    check_repetition(config, readings(config, derived))
    laps.end("plan: manifests and epochs")
    corpora = open_corpora(config.data.train, tokenizer, (number, ranks))
    laps.end("corpora opened and verified")
    corrupt = functools.partial(AR(vocabulary, config.objective).corrupt, evaluation=False)
    samples = TrainingSamples(config.data, corpora, config.batch, corrupt=corrupt, lookahead=1, random_length=False, seed=1)
    with build_loader(samples, config.data, config.batch, dp_rank=number, dp_size=ranks) as loader:
        next(loader)
        laps.end("first batch")
        next(loader)
        laps.end("second batch")
        print(json.dumps(laps.found), flush=True)
        sys.stdin.readline()
    sys.exit(0)


def start(folder: Path, ranks: int, *words: str) -> "list[subprocess.Popen[str]]":
    """The ranks of a node, with the words of torchrun in their environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    node = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--folder", str(folder), "--rank", *words]
    return [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env=os.environ | node | {"RANK": str(number), "LOCAL_RANK": str(number)},
        )
        for number in range(ranks)
    ]  # fmt: skip


def report(folder: Path, ranks: int, *words: str) -> None:
    """A table for one number of ranks."""
    shutil.rmtree(folder / RUNS, ignore_errors=True)
    begun = time.perf_counter()
    processes = start(folder, ranks, *words)
    pipes = [(process.stdin, process.stdout) for process in processes]
    for _, out in pipes:
        assert out is not None and out.readline() == "ready\n"
    ready = time.perf_counter()
    _tell(pipes)
    answers = [_answer(out) for _, out in pipes]
    end = time.perf_counter()
    pages = [kibibytes(process.pid, "Pss", "Anonymous") for process in processes]
    _tell(pipes)
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    print(f"\n{counted(ranks, 'rank')}: imports {ready - begun:.1f} s, then all of this in {end - ready:.1f} s\n  slowest, largest    all ranks")
    for name in answers[0]:
        values = [answer[name] for answer in answers]
        unit = "MiB" if name.startswith("MiB") else "s  "
        print(f"  {max(values):8.2f} {unit}    {sum(values):8.2f} {unit}  {name}")
    total, private = (sum(kind) for kind in zip(*pages, strict=True))
    print(f"memory of all ranks together: {total * 1024 / 1e9:.2f} GB ({total / 1024:,.0f} MiB); {private / 1024 / ranks:,.0f} MiB are each "
          "rank's own, the rest are pages of libraries and data files that all share", flush=True)  # fmt: skip


def _tell(pipes: list[tuple[Any, Any]]) -> None:
    for into, _ in pipes:
        into.write("\n")
        into.flush()


def _answer(out: Any) -> dict[str, float]:
    """The figures, after whatever the run says."""
    for line in out:
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError("a rank ended before its first batch")


def main() -> int:
    """Make the corpora, then start one rank, then a node of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to make the corpora, or where they are; left there. Default: a temporary folder")
    parser.add_argument("--sources", type=int, default=20)
    parser.add_argument("--shards", type=int, default=4000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--data", action="store_true", help="without network, optimizer, process group and log")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        data_rank(options.folder) if options.data else rank(options.folder)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        begun = time.perf_counter()
        write(folder, options.sources, options.shards)
        total = sum(Manifest.load(Path(source.path)).tokens for source in run_of(folder).data.train.values())
        print(f"{total:.4g} tokens in {options.shards:,} shards of {options.sources} sources, {DOCUMENTS:,} documents a shard; "
              f"made in {time.perf_counter() - begun:.0f} s", flush=True)  # fmt: skip
        for ranks in sorted({1, options.ranks}):
            report(folder, ranks, *(["--data"] if options.data else []))
    return 0


if __name__ == "__main__":
    sys.exit(main())
