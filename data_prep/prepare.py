"""Text in, a prepared corpus out: plan the shards, have them written by datatrove's executors, and write the manifests last.

output/prepare.json   what was asked for, written first: a run that was cut off continues, and another request is refused
output/shard_*.bin    and .idx, each whole or absent; of several named sources in output/NAME, a corpus each
output/parts/         the plan, finished shards' counts and bad records, logs, until the manifests are there (data_prep/job.py)
"""

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from data_prep.config import TokenizeConfig, usable_cores
from data_prep.estimate import estimate
from data_prep.filters import spelled_filters
from data_prep.finish import REQUEST, Budget, check_budget, source_request, tidy, write_manifests
from data_prep.inputs import InputFile, find_inputs, fingerprints, shards_of
from data_prep.job import LOGS, PARTS, Job, Part, Plan, load_part
from data_prep.lock import only_writer
from data_prep.progress import Display, display, say
from data_prep.watch import Watch, shown
from pretrain.data.files import Damaged, atomic_writer
from pretrain.data.indexed import dtype_for
from pretrain.data.manifest import FILE_NAME, Manifest, Request, RequestedSource, TokenizerRecord, verify
from pretrain.data.manifest_rules import FORMAT_VERSION
from pretrain.data.records import Malformed, read_record
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError, counted
from pretrain.outputs import require_writable

_MIN_RECORDS = 1000
"""Records before the failure budget can stop a run early; at the end it holds for any number."""
_LOOK_SECONDS = 0.5


def prepare(config: TokenizeConfig) -> dict[str, Manifest]:
    """Tokenise the sources into `config.output`. Name -> manifest; {} where they are left to others (dry_run, executor.wait=false).

    Running it again is quick and changes nothing. UserError for what the user can mend.
    """
    output = Path(config.output)
    require_writable(output, folder=True)
    tokenizer = Tokenizer(config.tokenizer)
    found = {name: find_inputs(source.input, output) for name, source in config.all_sources().items()}
    _require_distinct(found)
    if config.dry_run:
        estimate(config, tokenizer, found)
        return {}
    request = _request(config, tokenizer, found)
    if finished := _finished(config, request):
        _say_finished(output, finished)
        return finished
    _require_ours(output)
    with only_writer(output):
        if finished := _finished(config, request):  # by who held the lock a moment ago
            return finished
        _claim(output, request)
        plan = _plan(config, tokenizer, request, found)
        plan.write(output)
        parts = _run(config, output, plan)
        return {} if parts is None else write_manifests(output, plan, parts)


def _require_distinct(found: dict[str, list[InputFile]]) -> None:
    seen: dict[Path, str] = {}
    for name, files in found.items():
        for file in files:
            other = seen.setdefault(file.path.resolve(), name)
            if other != name:
                raise UserError(f"input {file.path} belongs to the sources {other} and {name}; give it to one of them")


def _request(config: TokenizeConfig, tokenizer: Tokenizer, found: dict[str, list[InputFile]]) -> Request:
    sources = {
        name: RequestedSource(
            text_key=source.text_key, keep=spelled_filters(source.keep), drop=spelled_filters(source.drop), inputs=fingerprints(found[name])
        )
        for name, source in config.all_sources().items()
    }
    return Request(format_version=FORMAT_VERSION, tokenizer=tokenizer.hash, shard_bytes=config.shard_bytes, sources=sources)


def _folder(config: TokenizeConfig, name: str) -> str:
    """Where a source's corpus lies below the output: a mixture weighs corpora, so each of several sources is one."""
    return name if config.sources else ""


def _finished(config: TokenizeConfig, request: Request) -> dict[str, Manifest]:
    """The corpora, if all are there; {} otherwise. UserError for those of another request, Damaged for changed ones."""
    output = Path(config.output)
    folders = {name: output / _folder(config, name) for name in request.sources}
    there = {name: folder for name, folder in folders.items() if (folder / FILE_NAME).exists()}
    manifests = {name: Manifest.load(folder) for name, folder in there.items()}
    for name, manifest in manifests.items():
        _require_same(folders[name], manifest.request, source_request(request, name))
    if len(there) < len(folders):
        return {}
    for name, manifest in manifests.items():
        verify(folders[name], manifest)
    tidy(output)
    return manifests


def _say_finished(output: Path, manifests: dict[str, Manifest]) -> None:
    tokens, documents = (sum(getattr(manifest, key) for manifest in manifests.values()) for key in ("tokens", "documents"))
    say(f"{output} is already prepared: {counted(tokens, 'token')} in {counted(documents, 'document')}; nothing to do")


def _require_ours(output: Path) -> None:
    """UserError for a folder with anything else in it."""
    if output.exists() and not (output / REQUEST).exists() and any(path.name != PARTS for path in output.iterdir()):
        raise UserError(f"output {output} is not empty and was not written by prepare_data; choose another folder, or remove it")


def _claim(output: Path, request: Request) -> None:
    """Make the folder ours, or continue what this same request began. UserError where another was begun."""
    path = output / REQUEST
    if path.exists():
        try:
            begun = read_record(Request, path)
        except Malformed as error:
            raise UserError(f"{path} {error}, so nobody knows what was begun there; choose another output, or remove {output}") from error
        _require_same(output, begun, request)
        return
    with atomic_writer(path) as stream:
        stream.write(json.dumps(asdict(request), indent=1).encode())


def _require_same(output: Path, found: Request, wanted: Request) -> None:
    different = [field.name for field in fields(Request) if field.name != "sources" and getattr(found, field.name) != getattr(wanted, field.name)]
    if list(found.sources) != list(wanted.sources):
        different.append("sources")
    else:
        for name, source in wanted.sources.items():
            prefix = f"sources.{name}." if len(wanted.sources) > 1 else ""
            different += [prefix + field.name for field in fields(source) if getattr(found.sources[name], field.name) != getattr(source, field.name)]
    if different:
        raise UserError(f"output {output} holds a preparation with other {', '.join(different)}; choose another output, or remove that folder")


def _plan(config: TokenizeConfig, tokenizer: Tokenizer, request: Request, found: dict[str, list[InputFile]]) -> Plan:
    jobs: list[Job] = []
    for name, source in request.sources.items():
        for index, pieces in enumerate(shards_of(found[name], config.shard_bytes)):
            job = Job(
                number=len(jobs), source=name, folder=_folder(config, name), index=index, pieces=tuple(pieces),
                text_key=source.text_key, keep=source.keep, drop=source.drop,
            )  # fmt: skip
            jobs.append(job)
    record = TokenizerRecord(name=tokenizer.name, hash=tokenizer.hash, size=tokenizer.size, eos_id=tokenizer.eos_id)
    return Plan(
        request=request,
        tokenizer=record,
        tokenizer_path=str(Path(config.tokenizer).resolve()),
        dtype=str(dtype_for(tokenizer.size)),  # the size is the mask's id, one more than the largest of the tokenizer's
        max_bad_fraction=config.max_bad_fraction,
        jobs=tuple(jobs),
    )


def _run(config: TokenizeConfig, output: Path, plan: Plan) -> dict[int, Part] | None:
    """All parts, or None where the shards are left to jobs that nobody waits for."""
    parts = {job.number: part for job in plan.jobs if (part := _finished_part(output, plan, job)) is not None}
    waiting = [job for job in plan.jobs if job.number not in parts]
    if parts:
        say(f"continuing: {len(parts)} of {counted(len(plan.jobs), 'shard')} finished before")
    _mark_completed(output, plan, parts)
    watch, budget = Watch.over(output, waiting), Budget.of(parts.values())

    def take(number: int) -> None:
        part = load_part(output, plan.jobs[number], dtype=plan.dtype, ids=plan.tokenizer.size)
        if part is None:
            raise UserError(f"{plan.jobs[number].name} is gone from {output} since it was written; run the same command to continue")
        parts[number] = part
        budget.add(part)
        check_budget(output, plan, parts, budget, _MIN_RECORDS)

    def take_new() -> None:
        for number in sorted(watch.finished - parts.keys()):
            take(number)

    if waiting:
        with display(sum(job.size for job in waiting)) as bar:
            if config.executor.kind == "local":
                _run_here(config, output, watch, len(plan.jobs), take, bar)
            elif not _run_elsewhere(config, output, watch, len(plan.jobs), take_new, bar):
                return None
    return parts


def _run_here(config: TokenizeConfig, output: Path, watch: Watch, tasks: int, take: Callable[[int], None], bar: Display) -> None:
    # datatrove takes half a second to import, which other tasks and a finished corpus need not wait for
    from data_prep.local import WatchedExecutor, silence
    from data_prep.steps import pipeline

    silence()
    workers = config.workers or usable_cores()
    executor = WatchedExecutor(pipeline(output), tasks=tasks, workers=workers, logging_dir=str((output / PARTS / LOGS).resolve()))
    with shown(watch, bar, _LOOK_SECONDS):
        executor.run_ranks(list(watch.waiting), take)


def _run_elsewhere(config: TokenizeConfig, output: Path, watch: Watch, tasks: int, check: Callable[[], None], bar: Display) -> bool:
    """False where nobody waits for the end."""
    from data_prep.cluster import run_on_ray, run_on_slurm

    if config.executor.kind == "ray":
        run_on_ray(output, config.executor, tasks, config.workers, watch, bar)
    elif not run_on_slurm(output, config.executor, tasks, config.workers, watch, bar, check):
        return False
    check()
    return True


def _mark_completed(output: Path, plan: Plan, parts: dict[int, Part]) -> None:
    """datatrove skips tasks that are marked: exactly those whose shards are whole."""
    marks = output / PARTS / LOGS / "completions"
    marks.mkdir(parents=True, exist_ok=True)
    for job in plan.jobs:
        mark = marks / f"{job.number:05d}"
        if job.number in parts:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)


def _finished_part(output: Path, plan: Plan, job: Job) -> Part | None:
    """What an earlier run finished, if it is still whole: a shard that is not is made again."""
    try:
        part = load_part(output, job, dtype=plan.dtype, ids=plan.tokenizer.size)
    except Damaged as damage:
        say(f"{damage.problem}: {job.name} is made again")
        part = None
    if part is None:
        job.file(output, ".json").unlink(missing_ok=True)  # whoever watches must not take it for the new one
    return part
