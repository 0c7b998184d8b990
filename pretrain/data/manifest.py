"""manifest.json: what a prepared corpus holds, by whom it was tokenised, and how to tell that it has not changed since.

`verify` looks at sizes, headers and three blocks of every shard, in seconds; `audit` reads and hashes everything.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrain.data.files import Damaged, atomic_writer, file_hash, sampled_hash
from pretrain.data.indexed import IndexedShard
from pretrain.data.manifest_rules import FORMAT_VERSION, first_broken
from pretrain.data.manifest_upgrade import from_version_1
from pretrain.data.records import Malformed, parse, shown, typed_record
from pretrain.errors import UserError

FILE_NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """One shard of one source: `file`.bin and `file`.idx. Hashes are BLAKE2b; `sample` covers the size and three blocks of the .bin."""

    file: str
    source: str
    tokens: int
    documents: int
    bin_bytes: int
    idx_bytes: int
    bin_hash: str
    idx_hash: str
    sample: str


@dataclass(frozen=True, kw_only=True)
class TokenizerRecord:
    """The tokenizer that made the ids: file name, BLAKE2b of its bytes, ids that it can emit, and the end-of-document id."""

    name: str
    hash: str
    size: int
    eos_id: int


@dataclass(frozen=True, kw_only=True)
class InputRecord:
    """An input file as it was read: name, size, and hash of three blocks; does not change when the file is copied."""

    name: str
    bytes: int
    sample: str


@dataclass(frozen=True, kw_only=True)
class RequestedSource:
    """A source as it was asked for: where its text is, which records stay, and the files. Filters map a dotted key to values."""

    text_key: str
    keep: dict[str, tuple[str, ...]]
    drop: dict[str, tuple[str, ...]]
    inputs: tuple[InputRecord, ...]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for; decides whether a re-run has anything to do. `tokenizer` is its hash, `sources` map name -> source."""

    format_version: int
    tokenizer: str
    shard_bytes: int
    sources: dict[str, RequestedSource]


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """What a source gave: tokens (end-of-document ids included), and its records: kept, empty, unreadable, and filtered by `KEY=VALUE`."""

    tokens: int
    documents: int
    empty: int
    bad: int
    filtered: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class CodeRecord:
    """Which code prepared the corpus: version of this package, and its git commit (`unknown` outside a repository)."""

    version: str
    commit: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A prepared corpus.

    dtype      uint16 or int32: the smaller one that holds every id and the mask id.
    sources    name -> what it gave.
    counts     over all sources: documents kept, empty ones dropped, bad records quarantined, records filtered.
    """

    format_version: int
    tokenizer: TokenizerRecord
    dtype: str
    tokens: int
    documents: int
    shards: tuple[ShardRecord, ...]
    sources: dict[str, SourceRecord]
    request: Request
    counts: dict[str, int]
    code: CodeRecord

    def write(self, folder: Path) -> None:
        """Write manifest.json atomically; it goes last, so its presence means that the corpus is complete."""
        with atomic_writer(folder / FILE_NAME) as stream:
            stream.write(json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read manifest.json. UserError where the folder was never prepared or is incomplete; Damaged, naming the field, where it does not hold."""
        path = folder / FILE_NAME
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise UserError(
                f"no prepared corpus in {folder} ({FILE_NAME} is missing); prepare it with: "
                f"python launchers/prepare_data.py tokenize input=TEXT tokenizer=TOKENIZER output={folder}"
            ) from None
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror or error}); give the folder that launchers/prepare_data.py wrote") from error
        try:
            manifest = cls._parse(content)
        except Malformed as error:
            raise Damaged(f"{path} {error}", folder) from error
        if broken := first_broken(manifest):
            raise Damaged(f"{path} {broken}", folder)
        return manifest

    @classmethod
    def _parse(cls, content: bytes) -> "Manifest":
        raw = parse(content)
        version = raw.get("format_version") if isinstance(raw, dict) else None
        if version == 1:
            raw, version = from_version_1(raw), FORMAT_VERSION
        if version != FORMAT_VERSION:
            raise Malformed(f"has format version {shown(version)}, and this code reads version {FORMAT_VERSION}")
        return typed_record(cls, raw)


WHOLE_INDEX_BYTES = 64 << 20
"""Indexes up to this size, all shards together, are hashed whole at every start (a tenth of a second); of larger ones three blocks are looked at,
and the audit hashes them. The indexes of 2T tokens take 40 GB."""


_READERS = 16
"""Threads of `verify`: a network file system answers many small reads in the time of one."""


def verify(folder: Path, manifest: Manifest) -> None:
    """Sizes, headers, sampled blocks and indexes of every shard against the manifest. Damaged names the first shard that differs."""
    whole_index = sum(record.idx_bytes for record in manifest.shards) <= WHOLE_INDEX_BYTES

    def verify_one(record: ShardRecord) -> None:
        verify_shard(folder, record, dtype=manifest.dtype, ids=manifest.tokenizer.size, whole_index=whole_index)

    with ThreadPoolExecutor(min(_READERS, len(manifest.shards))) as readers:
        try:
            for _ in readers.map(verify_one, manifest.shards):  # raises what the first damaged shard raised
                pass
        finally:
            readers.shutdown(wait=False, cancel_futures=True)


def verify_shard(folder: Path, record: ShardRecord, *, dtype: str, ids: int, whole_index: bool = True) -> None:
    """One shard of a tokenizer with so many ids, in milliseconds; `whole_index` hashes its .idx, if that is not large. Raises Damaged."""
    shard = IndexedShard(folder / record.file)
    found = (shard.tokens, shard.documents, str(shard.dtype))
    if found != (record.tokens, record.documents, dtype):
        raise Damaged(
            f"{shard.idx_path} holds {found[0]} tokens, {found[1]} documents of {found[2]}, but the manifest says "
            f"{record.tokens}, {record.documents}, {dtype}; the shard changed after preparation",
            folder,
        )
    if sampled_hash(shard.bin_path) != record.sample:
        raise Damaged(f"{shard.bin_path} changed after preparation (sampled blocks differ from the manifest)", folder)
    if (size := shard.idx_path.stat().st_size) != record.idx_bytes:
        raise Damaged(f"{shard.idx_path} changed after preparation ({size} bytes, and the manifest says {record.idx_bytes})", folder)
    if not whole_index or record.idx_bytes > WHOLE_INDEX_BYTES:
        shard.check_index()
    elif file_hash(shard.idx_path) != record.idx_hash:
        raise Damaged(f"{shard.idx_path} changed after preparation (its hash differs from the manifest)", folder)
    shard.check_ids(ids)


def audit(folder: Path, manifest: Manifest) -> Iterator[tuple[ShardRecord, str]]:
    """Every shard with its problem, empty where it is whole: `verify_shard`, then the full hash of both files."""
    for record in manifest.shards:
        try:
            verify_shard(folder, record, dtype=manifest.dtype, ids=manifest.tokenizer.size)
            for suffix, expected in ((".bin", record.bin_hash), (".idx", record.idx_hash)):
                path = folder / (record.file + suffix)
                if file_hash(path) != expected:
                    raise Damaged(f"{path} changed after preparation (its hash differs from the manifest)", folder)
        except Damaged as damage:
            yield record, damage.problem
        except OSError as error:  # a disk that fails while it is read
            yield record, f"{folder / record.file} cannot be read ({error.strerror or error})"
        else:
            yield record, ""


def shard_record(prefix: Path, source: str) -> ShardRecord:
    """Describe a shard that was just written."""
    shard = IndexedShard(prefix)
    return ShardRecord(
        file=prefix.name,
        source=source,
        tokens=shard.tokens,
        documents=shard.documents,
        bin_bytes=shard.bin_path.stat().st_size,
        idx_bytes=shard.idx_path.stat().st_size,
        bin_hash=file_hash(shard.bin_path),
        idx_hash=file_hash(shard.idx_path),
        sample=sampled_hash(shard.bin_path),
    )
