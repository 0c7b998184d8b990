"""Text in, a prepared corpus out: plan the shards, run them, and write manifest.json last.

output/prepare.json   what was asked for, written first: a run that was cut off continues, and another request is refused
output/shard_*.bin    and .idx, each whole or absent
output/parts/         finished shards' counts and bad records, until the manifest is there
"""

import json
import shutil
from dataclasses import asdict, fields
from pathlib import Path

from data_prep.config import TokenizeConfig, usable_cores
from data_prep.inputs import InputFile, find_inputs
from data_prep.pool import run_jobs
from data_prep.progress import progress_bar, say
from data_prep.worker import PARTS, Job, Part, load_part
from pretrain.data.files import Damaged, atomic_writer
from pretrain.data.indexed import dtype_for
from pretrain.data.manifest import FILE_NAME, Manifest, Request, TokenizerRecord, verify
from pretrain.data.manifest_rules import FORMAT_VERSION
from pretrain.data.records import Malformed, read_record
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.outputs import require_writable

REQUEST = "prepare.json"
QUARANTINE = "quarantine.jsonl"
_MIN_RECORDS = 1000
"""Records before the failure budget can stop a run early; at the end it holds for any number."""


def prepare(config: TokenizeConfig) -> Manifest:
    """Tokenise `config.input` into `config.output`. Running it again is quick and changes nothing. UserError for what the user can mend."""
    output = Path(config.output)
    require_writable(output, folder=True)
    tokenizer = Tokenizer(config.tokenizer)
    files = find_inputs(config.input, output)
    request = _request(config, tokenizer, files)
    if (finished := _finished(output, request)) is not None:
        say(f"{output} is already prepared: {finished.tokens:,} tokens in {finished.documents:,} documents; nothing to do")
        return finished
    _claim(output, request)
    jobs = _plan(config, files, output, str(dtype_for(tokenizer.size)))
    parts = _run(config, jobs, tokenizer.size, sum(file.size for file in files))
    manifest = _finish(output, tokenizer, request, jobs, parts)
    say(_summary(output, manifest))
    return manifest


def _request(config: TokenizeConfig, tokenizer: Tokenizer, files: list[InputFile]) -> Request:
    return Request(
        format_version=FORMAT_VERSION,
        tokenizer=tokenizer.hash,
        text_key=config.text_key,
        shard_bytes=config.shard_bytes,
        inputs=tuple(file.fingerprint() for file in files),
    )


def _finished(output: Path, request: Request) -> Manifest | None:
    if not (output / FILE_NAME).exists():
        return None
    manifest = Manifest.load(output)
    _require_same(output, manifest.request, request)
    verify(output, manifest)
    return manifest


def _claim(output: Path, request: Request) -> None:
    """Make the folder ours, or continue what this same request began. UserError for a folder with anything else in it."""
    path = output / REQUEST
    if path.exists():
        try:
            begun = read_record(Request, path)
        except Malformed as error:
            raise UserError(f"{path} {error}, so nobody knows what was begun there; choose another output, or remove {output}") from error
        _require_same(output, begun, request)
        return
    if output.exists() and any(output.iterdir()):
        raise UserError(f"output {output} is not empty and was not written by prepare_data; choose another folder, or remove it")
    with atomic_writer(path) as stream:
        stream.write(json.dumps(asdict(request), indent=1).encode())


def _require_same(output: Path, found: Request, wanted: Request) -> None:
    different = [field.name for field in fields(Request) if getattr(found, field.name) != getattr(wanted, field.name)]
    if different:
        raise UserError(f"output {output} holds a preparation with other {', '.join(different)}; choose another output, or remove that folder")


def _plan(config: TokenizeConfig, files: list[InputFile], output: Path, dtype: str) -> list[Job]:
    groups: list[list[InputFile]] = []
    room = 0
    for file in files:
        if not groups or file.size > room:
            groups.append([])
            room = config.shard_bytes
        groups[-1].append(file)
        room -= file.size
    return [
        Job(number, tuple((file.path, file.name) for file in group), output, Path(config.tokenizer), config.text_key, dtype)
        for number, group in enumerate(groups)
    ]


def _run(config: TokenizeConfig, jobs: list[Job], ids: int, total_bytes: int) -> list[Part]:
    parts = {job.number: part for job in jobs if (part := _finished_part(job, ids)) is not None}
    waiting = [job for job in jobs if job.number not in parts]
    if parts:
        say(f"continuing: {len(parts)} of {len(jobs)} shards were finished before")
    done_bytes = sum(path.stat().st_size for job in jobs if job.number in parts for path, _ in job.files)
    with progress_bar(total_bytes, done_bytes) as report:
        for job, part in run_jobs(waiting, config.workers or usable_cores(), report):
            parts[job.number] = part
            _check_budget(config, jobs, list(parts.values()), _MIN_RECORDS)
    ordered = [parts[job.number] for job in jobs]
    _check_budget(config, jobs, ordered, 1)
    return ordered


def _finished_part(job: Job, ids: int) -> Part | None:
    """What an earlier run finished, if it is still whole: a shard that is not is made again."""
    try:
        return load_part(job, ids)
    except Damaged as damage:
        say(f"{damage.problem}: {job.shard} is made again")
        return None


def _check_budget(config: TokenizeConfig, jobs: list[Job], parts: list[Part], min_records: int) -> None:
    bad = sum(part.bad for part in parts)
    records = bad + sum(part.documents + part.empty for part in parts)
    if records >= min_records and bad > config.max_bad_fraction * records:
        quarantine = _merge_quarantine(Path(config.output), jobs)
        accepted = f", or run again with max_bad_fraction={min(1.0, 1.1 * bad / records):.2g}" if bad < records else " or text_key"
        raise UserError(
            f"{bad} of {records} records are unreadable, more than max_bad_fraction={config.max_bad_fraction:g}, "
            f"the first because of: {_first_reason(quarantine)}; see {quarantine}, then mend the input{accepted}"
        )


def _first_reason(quarantine: Path) -> str:
    with quarantine.open(encoding="utf-8") as lines:
        return str(json.loads(next(lines, '{"reason": "their list is gone"}'))["reason"])


def _merge_quarantine(output: Path, jobs: list[Job]) -> Path:
    with atomic_writer(output / QUARANTINE) as merged:
        for job in jobs:
            if job.quarantine.exists():
                with job.quarantine.open("rb") as part:
                    shutil.copyfileobj(part, merged)
    return output / QUARANTINE


def _finish(output: Path, tokenizer: Tokenizer, request: Request, jobs: list[Job], parts: list[Part]) -> Manifest:
    shards = tuple(part.record for part in parts if part.record is not None)
    counts = {key: sum(getattr(part, key) for part in parts) for key in ("documents", "empty", "bad")}
    if not shards:
        raise UserError(f"the input holds no text: {counts['empty']} empty and {counts['bad']} unreadable documents; give files with text")
    if counts["bad"]:
        _merge_quarantine(output, jobs)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tokenizer=TokenizerRecord(name=tokenizer.name, hash=tokenizer.hash, size=tokenizer.size, eos_id=tokenizer.eos_id),
        dtype=jobs[0].dtype,
        tokens=sum(shard.tokens for shard in shards),
        documents=counts["documents"],
        shards=shards,
        request=request,
        counts=counts,
    )
    manifest.write(output)
    shutil.rmtree(output / PARTS)
    (output / REQUEST).unlink()
    return manifest


def _summary(output: Path, manifest: Manifest) -> str:
    dropped = f"; dropped {manifest.counts['empty']:,} empty" if manifest.counts["empty"] else ""
    bad = f"; {manifest.counts['bad']:,} unreadable, see {output / QUARANTINE}" if manifest.counts["bad"] else ""
    size = f"{manifest.tokens:,} tokens in {manifest.documents:,} documents, {len(manifest.shards)} shard(s) of {manifest.dtype}"
    return f"{output}: {size}{dropped}{bad}"
