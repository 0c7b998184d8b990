"""What a preparation would take, from a sample of its input: tokens, shards, disk and time. Writes nothing.

The sample is the same each time: parts of files spread evenly over each source, the first records of each part. The ratio of tokens to input bytes
is taken over all parts of a source, and its spread between them gives the interval; parts of one file that are alike make it too narrow.
"""

import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from data_prep.config import ExecutorConfig, InputConfig, TokenizeConfig, usable_cores
from data_prep.filters import RecordFilter, spelled_filters
from data_prep.inputs import InputFile, Piece, shards_of
from data_prep.progress import say, spelled_time
from data_prep.readers import Wanted, read_records
from pretrain.data.indexed import dtype_for
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import counted

PARTS_SAMPLED = 24
_RECORDS = 400
_CHARACTERS = 400_000
_IDX_BYTES_PER_DOCUMENT = 20
_LEAST_PART = 1 << 20


@dataclass
class Sample:
    """What one part of a source gave."""

    input_bytes: int = 0
    tokens: int = 0
    documents: int = 0
    records: int = 0
    bad: int = 0
    seconds: float = 0.0


@dataclass
class Estimate:
    """Of one source, or of several added up: `half` is half of the 95% interval of the tokens (nan: one part cannot say)."""

    input_bytes: int = 0
    sampled_bytes: int = 0
    tokens: float = 0.0
    half: float = 0.0
    documents: float = 0.0
    seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    def add(self, other: "Estimate") -> None:
        """Sources are sampled apart, so their variances add up."""
        self.input_bytes += other.input_bytes
        self.sampled_bytes += other.sampled_bytes
        self.tokens += other.tokens
        self.half = math.hypot(self.half, other.half)
        self.documents += other.documents
        self.seconds += other.seconds
        self.samples += other.samples


def estimate(config: TokenizeConfig, tokenizer: Tokenizer, found: dict[str, list[InputFile]]) -> Estimate:
    """Say what a preparation would take; for Slurm also the script that would be submitted. UserError for a file that cannot be read."""
    total = Estimate()
    shards = 0
    for name, source in config.all_sources().items():
        one = estimate_source(source, tokenizer, found[name])
        shards += len(shards_of(found[name], config.shard_bytes))
        if len(found) > 1:
            say(f"{name}: {counted(len(found[name]), 'file')}, {_size(one.input_bytes)}; {_tokens(one)}")
        total.add(one)
    _say_total(config, tokenizer, total, sum(map(len, found.values())), shards)
    if config.executor.kind == "slurm":
        from data_prep.cluster import slurm_script

        say("the script that would be submitted:")
        say(slurm_script(Path(config.output), config.executor, shards, config.workers))
    return total


def estimate_source(source: InputConfig, tokenizer: Tokenizer, files: list[InputFile]) -> Estimate:
    """From a sample of the files of one source."""
    wanted = Wanted(source.text_key, RecordFilter(spelled_filters(source.keep), spelled_filters(source.drop)))
    samples = [sample for piece in _spread(files) if (sample := _sample(piece, wanted, tokenizer)).input_bytes]
    size = sum(file.size for file in files)
    read = sum(sample.input_bytes for sample in samples)
    if not read:
        return Estimate(input_bytes=size)
    tokens = sum(sample.tokens for sample in samples)
    ratio = tokens / read
    n = len(samples)
    half = math.nan
    if n > 1:  # of a ratio estimator
        from scipy.special import stdtrit  # only a dry run needs it

        spread = sum((sample.tokens - ratio * sample.input_bytes) ** 2 for sample in samples) / (n - 1)
        share = min(read / size, 1.0)
        half = stdtrit(n - 1, 0.975) * math.sqrt(spread / n * (1 - share)) / (read / n) * size
    elif read >= size:
        half = 0.0
    scale = size / read
    documents = sum(sample.documents for sample in samples) * scale
    return Estimate(size, read, ratio * size, half, documents, sum(sample.seconds for sample in samples) * scale, samples)


def _spread(files: list[InputFile]) -> Iterator[Piece]:
    """Parts of files, evenly over their bytes. A part is whole where the file's kind cannot be entered in the middle."""
    total = sum(file.size for file in files)
    step, wanted, position = total / PARTS_SAMPLED, 0.0, 0
    few = len(files) <= PARTS_SAMPLED  # then none is left out
    for file in files:
        taken = entered = False
        while wanted < position + file.size:
            if file.path.suffix == ".jsonl" and file.size > PARTS_SAMPLED * _LEAST_PART:
                start = min(int(wanted - position), file.size - _LEAST_PART)
                yield Piece(str(file.path), file.name, _LEAST_PART, start, start + _LEAST_PART)
            elif not taken:
                yield from _inner(file)
                taken = True
            entered = True
            wanted += max(step, 1.0)
        if few and not entered:
            yield from _inner(file)
        position += file.size


def _inner(file: InputFile) -> list[Piece]:
    """A Parquet file's middle row group, or the file."""
    whole = Piece(str(file.path), file.name, file.size)
    if file.path.suffix != ".parquet":
        return [whole]
    from data_prep.read_columns import row_group_sizes

    sizes = row_group_sizes(file.path)
    middle = len(sizes) // 2
    return [replace(whole, size=sizes[middle], start=middle, stop=middle + 1)] if len(sizes) > 1 else [whole]


def _sample(piece: Piece, wanted: Wanted, tokenizer: Tokenizer) -> Sample:
    sample, start = Sample(), time.perf_counter()
    texts: list[str] = []
    characters = 0
    records = read_records(piece, wanted)
    for record in islice(records, _RECORDS):
        sample.input_bytes, sample.records = record.position, sample.records + 1
        sample.bad += record.text is None and not record.filtered
        if record.text is not None and record.text.strip():
            texts.append(record.text[:_CHARACTERS])
            characters += len(record.text)
            if len(record.text) > _CHARACTERS:  # of a long document the start stands for the whole
                break
        if characters > _CHARACTERS:
            break
    else:
        if next(records, None) is None:
            sample.input_bytes = piece.size  # to the end: headers and footers count too
    ids = tokenizer.encode(texts)
    scale = characters / max(sum(map(len, texts)), 1)
    sample.tokens = round(sum(map(len, ids)) * scale) + len(ids)
    sample.documents = len(ids)
    sample.seconds = (time.perf_counter() - start) * scale
    return sample


def _say_total(config: TokenizeConfig, tokenizer: Tokenizer, total: Estimate, files: int, shards: int) -> None:
    dtype = dtype_for(tokenizer.size)
    disk = total.tokens * dtype.itemsize + total.documents * _IDX_BYTES_PER_DOCUMENT
    share = total.sampled_bytes / max(total.input_bytes, 1)
    sampled = f"{counted(len(total.samples), 'part')}, {_size(total.sampled_bytes)} ({share:.2%})"
    say(f"dry run: {counted(files, 'file')}, {_size(total.input_bytes)}; sampled {sampled}")
    say(f"{_tokens(total)}; {counted(total.documents, 'document')}, {counted(shards, 'shard')} of {dtype}")
    bad, records = (sum(getattr(sample, key) for sample in total.samples) for key in ("bad", "records"))
    if bad:
        over = bad > config.max_bad_fraction * records
        fails = f": more than max_bad_fraction={config.max_bad_fraction:g}, so the preparation would fail" if over else ""
        say(f"unreadable: {bad:,} of {counted(records, 'sampled record')}{fails}")
    place = next(path for path in (Path(config.output).absolute(), *Path(config.output).absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    enough = "" if free > 1.05 * disk else ": not enough"
    say(f"disk: {_size(disk)}, and {_size(free)} are free at {place}{enough}")
    if total.seconds and total.tokens:
        workers = _workers(config.executor, config.workers, shards)
        speed = total.tokens / total.seconds
        duration = spelled_time(total.seconds / workers)
        say(f"time: about {duration} with {counted(workers, 'worker')}, at {speed:,.0f} tokens/s each, as in the sample on this machine")
    say("nothing was written")


def _workers(executor: ExecutorConfig, workers: int | None, shards: int) -> int:
    most = usable_cores() if executor.kind == "local" else shards
    return max(1, min(workers or most, shards))


def _tokens(one: Estimate) -> str:
    if one.half == 0:
        return f"about {counted(one.tokens, 'token')} (all of it was looked at)"
    if math.isnan(one.half):
        return f"about {counted(one.tokens, 'token')} (one part was sampled, so there is no interval)"
    return f"{counted(one.tokens, 'token')} ({max(one.tokens - one.half, 0):,.0f} to {one.tokens + one.half:,.0f}: 95% interval)"


def _size(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"
