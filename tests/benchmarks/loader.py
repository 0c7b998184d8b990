"""Tokens per second that the loader gives a training loop, objective by objective, against what eight H100 eat.

    python tests/benchmarks/loader.py                          all, DALI and plain, 1 and 2 threads; V 131,072 (32,000 for MDM-Prime), L 2048
    python tests/benchmarks/loader.py --objectives ar duo_curriculum --loaders plain --workers 2 --seconds 10

One process stands for one rank. A corpus of random ids (documents of about 1,000 tokens) is written to a temporary folder with its manifest, and
read as a training run reads it: mixture, memory maps, document numbers, noise, stacking, hand-over. `next` is called as fast as it answers.
The ratio is to 240,000 tokens/s, what the eight GPUs of a node take at 1.7B parameters; each of them has a process of its own there, with its own
cores, and needs an eighth.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np  # noqa: E402

from pretrain.build import build_objective  # noqa: E402
from pretrain.data.config import DataConfig, SourceConfig  # noqa: E402
from pretrain.data.corpus import Corpus  # noqa: E402
from pretrain.data.indexed import ShardWriter, dtype_for  # noqa: E402
from pretrain.data.loader import build_loader  # noqa: E402
from pretrain.data.samples import TrainingSamples  # noqa: E402
from pretrain.objectives.config import DuoConfig, EsoLMConfig, MDMPrimeConfig, ObjectiveConfig  # noqa: E402
from pretrain.parallel.vocabulary import Vocabulary  # noqa: E402
from pretrain.run_config import BatchConfig  # noqa: E402
from tests.data.sparse import manifest_of  # noqa: E402

NODE = 240_000
"""Tokens per second of eight H100 at 1.7B parameters."""
OBJECTIVES: dict[str, tuple[ObjectiveConfig, int, float]] = {
    "ar": (ObjectiveConfig(name="ar"), 131072, 5),
    "mdlm": (ObjectiveConfig(name="mdlm"), 131072, 2),
    "duo": (ObjectiveConfig(name="duo"), 131072, 2),
    "duo_curriculum": (ObjectiveConfig(name="duo", duo=DuoConfig(curriculum="topk")), 131072, 2),
    "esolm": (ObjectiveConfig(name="esolm"), 131072, 2),
    "esolm_mixed": (ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)), 131072, 2),
    "replaid": (ObjectiveConfig(name="replaid"), 131072, 2),
    "mdm_prime": (ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=15)), 32000, 2),
}
"""Name -> objective, ids of the model, and the target as a multiple of NODE."""
TOKENS, DOCUMENT = 8 << 20, 1000


def write_corpus(folder: Path, ids: int) -> Corpus:
    """Random ids in two shards."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for shard in range(2):
        with ShardWriter(folder / f"shard_{shard:05d}", dtype_for(ids)) as writer:
            while writer.tokens < TOKENS // 2:
                writer.add(random.integers(0, ids, size=int(random.integers(2, 2 * DOCUMENT))))
    (folder / "manifest.json").write_text(json.dumps(manifest_of(folder, ids=ids)))
    return Corpus(folder, name="random")


def samples_of(name: str, folder: Path, batch: BatchConfig) -> TrainingSamples:
    """The training stream of an objective."""
    config, classes, _ = OBJECTIVES[name]
    tokenizer_size = classes - config.has_mask
    path = folder / str(tokenizer_size)
    corpus = Corpus(path, name="random") if path.exists() else write_corpus(path, tokenizer_size)
    mask_id = classes - 1 if config.has_mask else None
    vocabulary = Vocabulary(tokenizer_size=tokenizer_size, model_size=classes, padded_size=classes, mask_id=mask_id, eos_id=0)
    objective = build_objective(config, vocabulary)
    data = DataConfig(train={"random": SourceConfig(path=str(path))}, random_length_probability=0.01)
    return TrainingSamples(
        data, {"random": corpus}, batch, corrupt=partial(objective.corrupt, evaluation=False), lookahead=objective.lookahead,
        random_length=objective.random_length, seed=1, parts=objective.parts,
    )  # fmt: skip


def speed(samples: TrainingSamples, loader: str, workers: int, batch: BatchConfig, seconds: float) -> float:
    """Tokens per second after the first two steps."""
    config = DataConfig(loader=loader, workers=workers)  # type: ignore[arg-type]
    with build_loader(samples, config, batch, dp_rank=0, dp_size=1) as batches:
        list(itertools.islice(batches, 2))
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            next(batches)
            steps += 1
        return steps * batch.global_sequences * batch.length / (time.perf_counter() - start)


def rows(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, int, float, float]]:
    """(objective, loader, threads, tokens/s, target as a multiple of NODE)."""
    batch = BatchConfig(global_sequences=16, micro_sequences=2, length=options.length)
    for name in options.objectives:
        samples = samples_of(name, folder, batch)
        for loader, workers in itertools.product(options.loaders, options.workers):
            yield name, loader, workers, speed(samples, loader, workers, batch, options.seconds), OBJECTIVES[name][2]


def main() -> int:
    """0 where every objective reaches its target with one of the loaders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--loaders", nargs="+", choices=("dali", "plain"), default=["dali", "plain"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args()
    best: dict[str, float] = {}
    print(f"| objective | loader | threads | tokens/s | x {NODE:,} | target |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, loader, workers, rate, target in rows(options, Path(folder)):
            print(f"| `{name}` | {loader} | {workers} | {rate:,.0f} | {rate / NODE:.1f} | {target:g} |", flush=True)
            best[name] = max(best.get(name, 0), rate / NODE / target)
    return int(any(share < 1 for share in best.values()))


if __name__ == "__main__":
    sys.exit(main())
