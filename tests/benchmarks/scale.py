"""Start-up of a training loader at 2.1T tokens: time and memory of 8 ranks of one node, first batch included, and the audit's speed.

    python tests/benchmarks/scale.py                                    4,000 shards in 20 sources, 525M tokens and 525,000 documents each
    python tests/benchmarks/scale.py --folder /scratch/scale --ranks 8 --shards 4000 --sources 20

The corpora are made in a temporary folder: every .bin is a hole of its real size (8.4 TB of int32, no disk), so their ids read as 0, and every
.idx is a name of one real file of its source (21 bytes for each of 525,000 documents is what a shard of web text has). Reading a hole and a
cached index is quicker than a cold network file system: what is measured is this program's work. Each rank is a process of its own, as under
torchrun: it makes the plan's checks, opens the corpora and verifies its share of their shards, and takes the first batch from the loader of
an AR run (L 2048, two phases). Memory is what a rank alone holds beyond its imports (anonymous pages), after each part.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

import psutil  # noqa: E402

from pretrain.backbones.config import BackboneConfig  # noqa: E402
from pretrain.data.config import DataConfig, PhaseConfig, SourceConfig  # noqa: E402
from pretrain.data.corpus import open_corpora  # noqa: E402
from pretrain.data.loader import build_loader  # noqa: E402
from pretrain.data.manifest import Manifest  # noqa: E402
from pretrain.data.samples import TrainingSamples  # noqa: E402
from pretrain.objectives.ar import AR  # noqa: E402
from pretrain.objectives.config import ObjectiveConfig  # noqa: E402
from pretrain.parallel.vocabulary import Vocabulary  # noqa: E402
from pretrain.plan.epochs import check_repetition, readings  # noqa: E402
from pretrain.rules import resolve  # noqa: E402
from pretrain.run_config import BatchConfig, DurationConfig, RunConfig  # noqa: E402
from tests.data.sparse import write_sparse  # noqa: E402

IDS, HASH = 131072, "0" * 64
TOKENS, DOCUMENTS = 525_000_000, 525_000


class Tokenizer:
    """What a corpus is compared with."""

    name, hash, size, eos_id = "tokenizer.json", HASH, IDS, 0


def write(folder: Path, sources: int, shards: int) -> None:
    """The corpora, where they are not there yet."""
    for number in range(sources):
        path = folder / f"source_{number:02d}"
        if not (path / "manifest.json").exists():
            write_sparse(path, shards=shards // sources, tokens=TOKENS, documents=DOCUMENTS, ids=IDS, tokenizer_hash=HASH)


def run_of(folder: Path) -> RunConfig:
    """Two thirds of the run in one mixture, the rest in another, as in the 1.7B runs."""
    names = sorted(path.name for path in folder.iterdir())
    even, uneven = dict.fromkeys(names, 1.0), {name: 1.0 + number % 3 for number, name in enumerate(names)}
    tokens = sum(Manifest.load(folder / name).tokens for name in names)
    return RunConfig(
        name="scale", root=str(folder / "none"), tokenizer="tokenizer.json", objective=ObjectiveConfig(name="ar"),
        backbone=BackboneConfig(kind="dit", hidden=2176, layers=28, heads=17),
        data=DataConfig(
            train={name: SourceConfig(path=str(folder / name)) for name in names},
            phases=[PhaseConfig(until=tokens * 2 / 3, mix=even), PhaseConfig(mix=uneven)],
        ),
        batch=BatchConfig(global_sequences=256, micro_sequences=2, length=2048), duration=DurationConfig(tokens=float(tokens)),
    )  # fmt: skip


def anonymous() -> int:
    """Bytes that this process alone holds: pages of libraries and files, which others share, left out."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def rank(folder: Path, number: int, of: int) -> dict[str, float]:
    """One rank's start: seconds of each part, and MiB beyond the imports."""
    import nvidia.dali.pipeline  # noqa: F401  # the loader imports it: not the data's memory

    print("ready", flush=True)
    sys.stdin.readline()  # all ranks of the node begin together
    before, laps, start = anonymous(), {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal start
        laps[name] = time.perf_counter() - start
        laps[f"MiB after it: {name}"] = (anonymous() - before) / 2**20
        start = time.perf_counter()

    config = run_of(folder)
    derived = resolve(config, world_size=of, model_size=IDS)
    check_repetition(config, readings(config, derived))
    lap("plan: manifests and epochs")
    corpora = open_corpora(config.data.train, Tokenizer(), share=(number, of))  # type: ignore[arg-type]
    lap("open and verify")
    objective = AR(Vocabulary(tokenizer_size=IDS, model_size=IDS, padded_size=IDS, mask_id=None, eos_id=0), config.objective)
    samples = TrainingSamples(
        config.data, corpora, config.batch, corrupt=partial(objective.corrupt, evaluation=False), lookahead=1, random_length=False, seed=1
    )
    lap("phases")
    with build_loader(samples, config.data, config.batch, dp_rank=number, dp_size=of) as loader:
        next(loader)
        lap("first batch")
        next(loader)
        lap("second batch")
    samples.fingerprint(derived.steps // 2)
    lap("fingerprint of a batch (at each save and resume)")
    samples.documents(derived.steps // 2)
    lap("audit of a step")
    return laps | {"MiB of the process, shared pages counted in part": psutil.Process().memory_full_info().pss / 2**20}


def node(folder: Path, ranks: int) -> tuple[float, float, list[dict[str, float]]]:
    """Seconds of the imports, seconds from then until the last rank has its first batches, and what each said."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--folder", str(folder), "--ranks", str(ranks), "--rank"]
    processes = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for number in range(ranks)
    ]
    pipes = [(process.stdin, process.stdout) for process in processes]
    for _, out in pipes:
        assert out is not None and out.readline() == "ready\n"
    ready = time.perf_counter()
    for into, _ in pipes:
        assert into is not None
        into.write("\n")
        into.flush()
    answers = [json.loads(out.readline()) for _, out in pipes if out is not None]
    end = time.perf_counter()
    for process in processes:
        process.wait()
    return ready - start, end - ready, answers


def report(folder: Path, ranks: int) -> None:
    """A table for one number of ranks."""
    imports, seconds, answers = node(folder, ranks)
    print(f"\n{ranks} rank{'s' * (ranks > 1)}: imports {imports:.1f} s, then all of this in {seconds:.1f} s\n  slowest, largest    all ranks")
    for name in answers[0]:
        values = [answer[name] for answer in answers]
        unit = "MiB" if name.startswith("MiB") else "s  "
        print(f"  {max(values):8.2f} {unit}    {sum(values):8.2f} {unit}  {name}")
    print(flush=True)


def main() -> int:
    """Make the corpora, then start one rank, then a node of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to make the corpora, or where they are; left there. Default: a temporary folder")
    parser.add_argument("--sources", type=int, default=20)
    parser.add_argument("--shards", type=int, default=4000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        answer: dict[str, Any] = rank(options.folder, options.rank, options.ranks)
        print(json.dumps(answer))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        start = time.perf_counter()
        write(folder, options.sources, options.shards)
        config = run_of(folder)
        total = sum(Manifest.load(Path(source.path)).tokens for source in config.data.train.values())
        print(f"{total:.4g} tokens in {options.shards:,} shards of {len(config.data.train)} sources, {DOCUMENTS:,} documents a shard; "
              f"made in {time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
        for ranks in sorted({1, options.ranks}):
            report(folder, ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
