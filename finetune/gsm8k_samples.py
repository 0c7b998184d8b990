"""The folder of an evaluation: settings.json says of what, samples.jsonl grows line by line, so that a killed command goes on where it was."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

from finetune.answers import EXTRACTORS, Extractor, extract
from finetune.gsm8k_data import answer_number
from finetune.gsm8k_decode import Answered
from pretrain.checkpoint.lock import RunLock
from pretrain.data.files import atomic_writer
from pretrain.data.problems import Problem
from pretrain.data.records import Malformed, parse, typed_record
from pretrain.errors import UserError, spelled
from pretrain.outputs import cannot_write

SETTINGS, SAMPLES = "settings.json", "samples.jsonl"
_HASH_LETTERS = 12


@dataclass(frozen=True, kw_only=True)
class Record:
    """One answered problem: a line of samples.jsonl.

    item     number in the data file, from 0; id: the problem's own.
    prompt   the question as it was asked, without shots.
    output   what the model wrote, up to the first EOS.
    gold     the right answer.
    answers  what each extractor found, as a number or a ratio; None: no number.
    correct  whether that is the right answer.
    fits     whether the prompt left room in the context; if not, nothing was asked, and the problem counts as wrong.
    ended    whether the output ended with EOS.
    tokens   generated ones, EOS included; masked: masks left among them.
    nfe      network evaluations; seconds: the problem's share of its batch's time.
    settings hash of the settings that it was answered with.
    """

    item: int
    id: str
    prompt: str
    output: str
    gold: str
    answers: dict[str, str | None]
    correct: dict[str, bool]
    fits: bool
    ended: bool
    tokens: int
    masked: int
    nfe: int
    seconds: float
    settings: str

    def answer(self, extractor: Extractor) -> str | None:
        """What an extractor found."""
        return self.answers[extractor]

    @property
    def agree(self) -> bool:
        """Whether all extractors found the same."""
        return len(set(self.answers.values())) == 1


def record_of(item: int, problem: Problem, prompt: str, output: str, answered: Answered | None, settings: str) -> Record:
    """Judge an output. answered: None where the prompt did not fit."""
    found, gold = extract(output), answer_number(problem)
    return Record(
        item=item, id=problem.id, prompt=prompt, output=output, gold=problem.answer,
        answers={name: _spelled(found[name]) for name in EXTRACTORS}, correct={name: found[name] == gold for name in EXTRACTORS},
        fits=answered is not None, ended=answered is not None and answered.ended, tokens=answered.tokens if answered else 0,
        masked=answered.masked if answered else 0, nfe=answered.evaluations if answered else 0,
        seconds=round(answered.seconds, 4) if answered else 0.0, settings=settings,
    )  # fmt: skip


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Of everything that outputs depend on."""
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=32).hexdigest()[:_HASH_LETTERS]


class SampleFolder:
    """A folder with the samples of one evaluation, held against a second one. Use it as a context.

    records  number of the problem -> what is there already, and what `add` adds.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Raises UserError where the folder holds an evaluation with other settings, something else, or is being written to."""
        self.folder, self.settings, self.hash = folder, settings, settings_hash(settings)
        self.records: dict[int, Record] = {}
        self._lock = RunLock(folder)
        try:
            self._lock.acquire()
            folder.mkdir(parents=True, exist_ok=True)
        except UserError as error:  # the lock speaks of runs
            raise UserError(str(error).replace("another name=", "another output=")) from error
        except OSError as error:
            self._lock.release()
            raise cannot_write(folder, error) from error
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> "SampleFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._file.close()
        except OSError as refused:  # after a refused write it tries again, and that sentence has been said
            if error is None:
                raise cannot_write(self.folder / SAMPLES, refused) from refused
        finally:
            self._lock.release()

    def add(self, record: Record) -> None:
        """Write one line, which survives whatever happens to this process next. UserError where the disk refuses."""
        try:
            self._file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise cannot_write(self.folder / SAMPLES, error) from error
        self.records[record.item] = record

    def _open(self) -> None:
        path = self.folder / SAMPLES
        if (self.folder / SETTINGS).exists():
            self._require_same()
            self.records = _read(path, self.hash)
        elif path.exists():
            raise UserError(f"{path} is not from an evaluation; choose another output=")
        else:
            with atomic_writer(self.folder / SETTINGS) as stream:
                stream.write((json.dumps(dict(self.settings), indent=1, sort_keys=True) + "\n").encode())
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise cannot_write(path, error) from error

    def _require_same(self) -> None:
        try:
            before = parse((self.folder / SETTINGS).read_bytes())
        except (OSError, Malformed) as error:
            raise UserError(f"{self.folder / SETTINGS} cannot be used ({error}); choose another output=, or remove the folder") from error
        now = json.loads(json.dumps(dict(self.settings)))
        if before != now:
            changed = _differences(before if isinstance(before, dict) else {}, now)
            raise UserError(f"{self.folder} holds an evaluation with other settings ({changed}); choose another output=, or use those settings")


def _read(path: Path, settings: str) -> dict[int, Record]:
    """The records of a file, whose last line may be torn: it is cut off. UserError for anything else that is no record."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    records = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            record = typed_record(Record, parse(line))
        except Malformed as error:
            raise UserError(f"line {number} of {path} {error}; remove the line, and its problem is answered again") from error
        if record.settings != settings:
            raise UserError(f"line {number} of {path} was made with other settings ({record.settings}, not {settings}); remove the line")
        records[record.item] = record
    return records


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str:
    """The first keys that differ, then and now."""
    found = []
    for key in sorted({*before, *now}):
        then, this = before.get(key), now.get(key)
        if then == this:
            continue
        if isinstance(then, dict) and isinstance(this, dict):
            found.append(_differences(then, this, f"{prefix}{key}."))
        else:
            found.append(f"{prefix}{key}={_short(then)}, now {_short(this)}")
    return "; ".join(found[:3])


def _short(value: Any) -> str:
    text = spelled(value).replace("\n", "\\n")
    return text if len(text) <= 40 else f"{text[:37]}…"


def _spelled(value: Fraction | None) -> str | None:
    return None if value is None else str(value)
