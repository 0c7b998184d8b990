"""One shard to write, the plan of all of them, and what a finished one leaves: small files in output/parts that any machine may read.

parts/plan.json               the plan, for workers on other machines
parts/SHARD.json              a finished shard and its counts; goes last
parts/SHARD.quarantine.jsonl  its bad records
parts/SHARD.progress          bytes read and tokens written so far
parts/SHARD.failed            why its last attempt failed, in a sentence
parts/datatrove               datatrove's own logs, statistics and completion marks
"""

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from data_prep.filters import RecordFilter
from data_prep.inputs import Piece
from data_prep.readers import Wanted
from pretrain.data.files import Damaged, atomic_writer
from pretrain.data.manifest import Request, ShardRecord, TokenizerRecord, verify_shard
from pretrain.data.records import Malformed, read_record
from pretrain.errors import UserError

PARTS = "parts"
LOGS = "datatrove"
_PLAN = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One shard of one source: its pieces, and what of their records is read.

    number          datatrove's rank. folder: of the source's corpus, below the output ("" for the output itself). index: number in that corpus.
    """

    number: int
    source: str
    folder: str
    index: int
    pieces: tuple[Piece, ...]
    text_key: str
    keep: dict[str, tuple[str, ...]]
    drop: dict[str, tuple[str, ...]]

    @property
    def shard(self) -> str:
        """Name of the shard's files, without suffix."""
        return f"shard_{self.index:05d}"

    @property
    def name(self) -> str:
        """For messages: the shard with its folder."""
        return f"{self.folder}/{self.shard}".lstrip("/")

    @property
    def size(self) -> int:
        """Input bytes."""
        return sum(piece.size for piece in self.pieces)

    @property
    def wanted(self) -> Wanted:
        """What the readers look for."""
        return Wanted(self.text_key, RecordFilter(self.keep, self.drop))

    def file(self, output: Path, suffix: str) -> Path:
        """parts/SHARD + suffix, where SHARD has the job's number."""
        return output / PARTS / f"shard_{self.number:05d}{suffix}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All jobs of a preparation. `tokenizer_path` is where the machine that made the plan found the tokenizer."""

    request: Request
    tokenizer: TokenizerRecord
    tokenizer_path: str
    dtype: str
    max_bad_fraction: float
    jobs: tuple[Job, ...]

    def write(self, output: Path) -> None:
        """Into parts/, atomically."""
        with atomic_writer(output / PARTS / _PLAN) as stream:
            stream.write(json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, output: Path) -> "Plan":
        """UserError where there is none that can be read."""
        path = output / PARTS / _PLAN
        try:
            return read_record(cls, path)
        except FileNotFoundError:
            raise UserError(f"{output} holds no preparation that was begun ({path} is missing); run the tokenize task first") from None
        except Malformed as error:
            raise UserError(f"{path} {error}; run the tokenize task again, which writes it anew") from error


def has_plan(output: Path) -> bool:
    """Whether a preparation was begun there, and not finished."""
    return (output / PARTS / _PLAN).exists()


@lru_cache(maxsize=1)
def load_plan(output: Path, stamp: tuple[int, int]) -> Plan:
    """Plan.load, once per process and version of the file (`stamp`)."""
    return Plan.load(output)


def plan_stamp(output: Path) -> tuple[int, int]:
    """Changes when the plan is written anew."""
    try:
        status = (output / PARTS / _PLAN).stat()
    except FileNotFoundError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Records of a shard: kept, empty, unreadable, and filtered by `KEY=VALUE`."""

    documents: int
    empty: int
    bad: int
    filtered: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A finished shard and its counts; `record` is None where no document was left. `lines`: of every piece, for the quarantine of files in parts."""

    record: ShardRecord | None
    counts: Counts
    lines: tuple[int, ...]


def load_part(output: Path, job: Job, *, dtype: str, ids: int) -> Part | None:
    """The part that an earlier run with a tokenizer of `ids` ids finished, or None. Damaged where it, or its shard, is no longer whole."""
    path = job.file(output, ".json")
    try:
        part = read_record(Part, path)
    except FileNotFoundError:
        return None
    except Malformed as error:
        raise Damaged(f"{path} {error}", output) from error
    counts = part.counts
    if min(counts.documents, counts.empty, counts.bad) < 0 or counts.documents != (part.record.documents if part.record else 0):
        raise Damaged(f"{path} counts {counts.documents} documents, which its shard does not hold", output)
    if part.record is not None:
        if part.record.file != job.shard:
            raise Damaged(f"{path} describes {part.record.file}", output)
        verify_shard(output / job.folder, part.record, dtype=dtype, ids=ids)
    return part
