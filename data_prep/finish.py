"""The last stage: finished shards into a manifest.json per source, which goes last. It can be run again, and after jobs that nobody waited for."""

import functools
import importlib.metadata
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from data_prep.config import FinishConfig
from data_prep.job import PARTS, Job, Part, Plan, has_plan, load_part
from data_prep.lock import only_writer
from data_prep.progress import say
from pretrain.data.files import atomic_writer
from pretrain.data.manifest import FILE_NAME, CodeRecord, Manifest, Request, SourceRecord
from pretrain.data.manifest_rules import FORMAT_VERSION
from pretrain.errors import UserError, are, counted

REQUEST = "prepare.json"
QUARANTINE = "quarantine.jsonl"
_PATIENCE = 60.0
"""Seconds that the last job waits for the command that submitted it to end."""


def finish(config: FinishConfig) -> dict[str, Manifest]:
    """Write the manifests of a preparation whose shards are all there. UserError where some are missing or damaged, or the budget is exceeded."""
    output = Path(config.output)
    if (output / PARTS).exists():
        with only_writer(output, _PATIENCE):
            if has_plan(output):  # or who held the lock has finished meanwhile
                return _finish(output, Plan.load(output))
    corpora = _finished_below(output)
    if not corpora:
        Plan.load(output)  # says that nothing was begun
    tidy(output)
    say(f"{output} is already finished: {', '.join(str(folder) for folder in corpora)}; nothing to do")
    return {name: manifest for manifest in corpora.values() for name in manifest.sources}


def _finish(output: Path, plan: Plan) -> dict[str, Manifest]:
    parts = {}
    for job in plan.jobs:
        part = load_part(output, job, dtype=plan.dtype, ids=plan.tokenizer.size)
        if part is not None:
            parts[job.number] = part
    if missing := [job for job in plan.jobs if job.number not in parts]:
        which = f"{len(missing)} of {counted(len(plan.jobs), 'shard')} {are(len(missing))} missing{_reason(output, missing)}"
        raise UserError(f"{which}; run the tokenize command again, which continues")
    return write_manifests(output, plan, parts)


def _finished_below(output: Path) -> dict[Path, Manifest]:
    folders = [output, *sorted(path for path in output.iterdir() if path.is_dir())] if output.is_dir() else []
    return {folder: Manifest.load(folder) for folder in folders if (folder / FILE_NAME).exists()}


def _reason(output: Path, missing: list[Job]) -> str:
    for job in missing:
        path = job.file(output, ".failed")
        if path.exists():
            return f", the first because of: {path.read_text(encoding='utf-8', errors='replace')}"
    return ""


@dataclass
class Budget:
    """Records so far, and the bad ones among them."""

    bad: int = 0
    records: int = 0

    @classmethod
    def of(cls, parts: Iterable[Part]) -> "Budget":
        """Of finished shards."""
        budget = cls()
        for part in parts:
            budget.add(part)
        return budget

    def add(self, part: Part) -> None:
        """One more shard."""
        counts = part.counts
        self.bad += counts.bad
        self.records += counts.bad + counts.documents + counts.empty + sum(counts.filtered.values())


def check_budget(output: Path, plan: Plan, parts: Mapping[int, Part], budget: Budget, min_records: int) -> None:
    """UserError where more records are unreadable than the plan allows, once there are `min_records`."""
    bad, records = budget.bad, budget.records
    if records >= min_records and bad > plan.max_bad_fraction * records:
        quarantine = merge_quarantine(output, plan, parts)
        key, accepted = ("", f", or run again with max_bad_fraction={min(1.0, 1.1 * bad / records):.2g}") if bad < records else (" or text_key", "")
        raise UserError(
            f"{bad} of {counted(records, 'record')} {are(bad)} unreadable, more than max_bad_fraction={plan.max_bad_fraction:g}, "
            f"the first because of: {_first_reason(quarantine)}; see {quarantine}, then mend the input{key} and remove {output}{accepted}"
        )


def _first_reason(quarantine: Path) -> str:
    with quarantine.open(encoding="utf-8") as lines:
        return str(json.loads(next(lines, '{"reason": "their list is gone"}'))["reason"])


def merge_quarantine(output: Path, plan: Plan, parts: Mapping[int, Part]) -> Path:
    """All lists of bad records in one. Of a file that was read in parts, lines are counted from its start where all parts before are known;
    elsewhere `from` says at which byte the part began that they are counted from."""
    before = _lines_before(plan, parts)
    with atomic_writer(output / QUARANTINE) as merged:
        for job in plan.jobs:
            path = job.file(output, ".quarantine.jsonl")
            if not path.exists():
                continue
            with path.open("rb") as listed:
                for line in listed:
                    entry = json.loads(line)
                    if (known := before.get((entry["file"], entry.get("from", 0)))) is not None and "from" in entry:
                        del entry["from"]
                        entry["line"] += known
                        line = (json.dumps(entry) + "\n").encode()
                    merged.write(line)
    return output / QUARANTINE


def _lines_before(plan: Plan, parts: Mapping[int, Part]) -> dict[tuple[str, int], int]:
    """(file, first byte of a part of it) -> lines of the parts before, where they are known."""
    known: dict[tuple[str, int], int] = {}
    lines: dict[str, int | None] = {}
    for job in plan.jobs:
        part = parts.get(job.number)
        for number, piece in enumerate(job.pieces):
            sum_before = lines.get(piece.name, 0)
            if sum_before is not None:
                known[piece.name, piece.start] = sum_before
            lines[piece.name] = None if sum_before is None or part is None else sum_before + part.lines[number]
    return known


def write_manifests(output: Path, plan: Plan, parts: Mapping[int, Part]) -> dict[str, Manifest]:
    """Check the budget for all records, write a manifest per source, and remove what only the preparation needed.

    UserError where a source has no text left.
    """
    check_budget(output, plan, parts, Budget.of(parts.values()), 1)
    manifests = {name: _manifest(plan, parts, name) for name in plan.request.sources}
    if any(part.counts.bad for part in parts.values()):
        merge_quarantine(output, plan, parts)
    else:
        (output / QUARANTINE).unlink(missing_ok=True)  # of a run that stopped, before its input was mended
    folders = {job.source: output / job.folder for job in plan.jobs}
    for name, manifest in manifests.items():
        manifest.write(folders[name])
    tidy(output)
    for name, manifest in manifests.items():
        say(summary(folders[name], manifest, output / QUARANTINE))
    return manifests


def _manifest(plan: Plan, parts: Mapping[int, Part], name: str) -> Manifest:
    source = _source(plan, parts, name)
    counts = {"documents": source.documents, "empty": source.empty, "bad": source.bad, "filtered": sum(source.filtered.values())}
    shards = tuple(part.record for job in plan.jobs if job.source == name and (part := parts[job.number]).record is not None)
    if not shards:
        filtered = f", and {counts['filtered']} filtered out" if counts["filtered"] else ""
        whose = f"the source {name}" if len(plan.request.sources) > 1 else "the input"
        without = f"{counts['empty']} empty and {counted(counts['bad'], 'unreadable document')}"
        raise UserError(f"{whose} holds no text: {without}{filtered}; give files with text")
    return Manifest(
        format_version=FORMAT_VERSION,
        tokenizer=plan.tokenizer,
        dtype=plan.dtype,
        tokens=source.tokens,
        documents=source.documents,
        shards=tuple(shard for shard in shards if shard),
        sources={name: source},
        request=source_request(plan.request, name),
        counts=counts,
        code=code_record(),
    )


def source_request(request: Request, name: str) -> Request:
    """What was asked of one source."""
    return replace(request, sources={name: request.sources[name]})


def _source(plan: Plan, parts: Mapping[int, Part], name: str) -> SourceRecord:
    own = [parts[job.number] for job in plan.jobs if job.source == name]
    filtered: Counter[str] = Counter()
    for part in own:
        filtered.update(part.counts.filtered)
    return SourceRecord(
        tokens=sum(part.record.tokens for part in own if part.record),
        documents=sum(part.counts.documents for part in own),
        empty=sum(part.counts.empty for part in own),
        bad=sum(part.counts.bad for part in own),
        filtered=dict(sorted(filtered.items())),
    )


def tidy(output: Path) -> None:
    """Remove what only the preparation needed."""
    shutil.rmtree(output / PARTS, ignore_errors=True)
    (output / REQUEST).unlink(missing_ok=True)


@functools.lru_cache(maxsize=1)
def code_record() -> CodeRecord:
    """Version of this package, and its commit where it runs from a git repository (`-dirty` with changes)."""
    repository, commit = Path(__file__).resolve().parents[1], "unknown"
    if (repository / ".git").exists():
        try:
            ask = ["git", "-C", str(repository), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
            commit = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):  # no git, or not ours to ask
            commit = "unknown"
    try:
        version = importlib.metadata.version("pretrain")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return CodeRecord(version=version, commit=commit)


def summary(folder: Path, manifest: Manifest, quarantine: Path) -> str:
    """One line about a corpus."""
    dropped = f"; dropped {manifest.counts['empty']:,} empty" if manifest.counts["empty"] else ""
    filtered = f"; filtered {manifest.counts['filtered']:,}" if manifest.counts["filtered"] else ""
    bad = f"; {manifest.counts['bad']:,} unreadable, see {quarantine}" if manifest.counts["bad"] else ""
    size = f"{counted(manifest.tokens, 'token')} in {counted(manifest.documents, 'document')}"
    return f"{folder}: {size}, {counted(len(manifest.shards), 'shard')} of {manifest.dtype}{dropped}{filtered}{bad}"
