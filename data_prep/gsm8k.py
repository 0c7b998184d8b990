"""Published GSM8K data as one file of problems. Bad lines are set aside and counted; overlap with held-out problems is looked for before
anything is written."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.ngrams import Normalization
from data_prep.overlap import Overlap, find_overlaps
from data_prep.problem_config import Gsm8kConfig
from data_prep.progress import say
from pretrain.data.files import atomic_writer, write_once
from pretrain.data.gsm8k_readers import Line, read_problems
from pretrain.data.problems import Problem, problem_lines, read_problem_file
from pretrain.errors import UserError, are, counted
from pretrain.outputs import require_writable

_SHOWN = 3


@dataclass(frozen=True)
class Reading:
    """What was found: good problems, and the lines that are none."""

    problems: list[Problem]
    bad: list[Line]


def write_gsm8k(config: Gsm8kConfig) -> Path:
    """Write the problems, the report and the quarantine. UserError above the failure budget or the allowed overlap; then no problems are written."""
    output = Path(config.output)
    require_writable(output)
    reading = read_inputs(config)
    _write_quarantine(config, reading)
    held_out = _held_out(config)
    overlaps = find_overlaps(reading.problems, held_out, config.ngram) if held_out else []
    report = _report(reading, held_out, overlaps)
    _require_little_overlap(config, held_out, overlaps)
    new = write_once(output, problem_lines(reading.problems))
    with atomic_writer(output.with_name(output.name + ".report.json")) as stream:
        stream.write(json.dumps(report, indent=1).encode())
    say(_summary(output, report) if new else f"{output} already holds what was read, {counted(len(reading.problems), 'problem')}; nothing to do")
    return output


def read_inputs(config: Gsm8kConfig) -> Reading:
    """All lines of all inputs. UserError where too many are bad, or none is good."""
    problems, bad = [], []
    for path in [config.input] if isinstance(config.input, str) else config.input:
        for line in read_problems(Path(path), config.kind):
            if line.problem is None:
                bad.append(line)
            else:
                problems.append(line.problem)
    if len({problem.id for problem in problems}) < len(problems):
        raise UserError("two input files have the same name, so that their problems would have the same ids; rename one")
    lines = len(problems) + len(bad)
    if not lines:
        raise UserError(f"{config.input} holds no line; give a file with problems")
    if len(bad) > config.max_bad_fraction * lines:
        quarantine = _write_quarantine(config, Reading(problems, bad))
        larger = f"accept them with max_bad_fraction={min(1.0, 1.1 * len(bad) / lines):.2g}"
        accepted = larger if problems else f"set another kind= than {config.kind}"
        raise UserError(
            f"{len(bad)} of {counted(lines, 'line')} cannot be read as a problem, more than max_bad_fraction={config.max_bad_fraction:g}; the first "
            f"is line {bad[0].line} of {bad[0].file}: {bad[0].reason}; see {quarantine}, then mend the input, or {accepted}"
        )
    return Reading(problems, bad)


def _write_quarantine(config: Gsm8kConfig, reading: Reading) -> Path:
    path = Path(config.output + ".quarantine.jsonl")
    if reading.bad:
        with atomic_writer(path) as stream:
            for line in reading.bad:
                stream.write((json.dumps({"file": line.file, "line": line.line, "reason": line.reason}, ensure_ascii=False) + "\n").encode())
    else:
        path.unlink(missing_ok=True)  # an earlier try's list
    return path


def _held_out(config: Gsm8kConfig) -> list[Problem]:
    """The problems of `against`: files of problems, or as GSM8K publishes its test set."""
    if config.against is None:
        return []
    held_out: list[Problem] = []
    for name in [config.against] if isinstance(config.against, str) else config.against:
        path = Path(name)
        if _is_original(path):
            lines = list(read_problems(path, "original"))
            if bad := [line for line in lines if line.problem is None]:
                raise UserError(f"line {bad[0].line} of {path}, which the input is compared with, is not a problem: {bad[0].reason}; mend the file")
            held_out += [line.problem for line in lines if line.problem is not None]
        else:
            held_out += read_problem_file(path)
    if not held_out:
        raise UserError(f"against={config.against} holds no problem; give the held-out problems, or leave it out")
    return held_out


def _is_original(path: Path) -> bool:
    """Whether a file's first line lacks what files of problems have."""
    if path.suffix == ".parquet":
        return True
    try:
        with path.open("rb") as stream:
            return b'"rationale"' not in next((line for line in stream if line.strip()), b"")
    except OSError as error:
        raise UserError(f"against={path} cannot be read ({error.strerror or error}); give a file that you may read") from error


def _require_little_overlap(config: Gsm8kConfig, held_out: list[Problem], overlaps: list[Overlap]) -> None:
    if len(overlaps) > config.max_overlap * len(held_out):
        shares = ["equal" if overlap.exact else f"{overlap.share:.0%}" for overlap in overlaps[:_SHOWN]]
        shown = ", ".join(f"{overlap.held_out} in {overlap.training} ({share})" for overlap, share in zip(overlaps, shares, strict=False))
        raise UserError(
            f"{len(overlaps)} of {counted(len(held_out), 'held-out problem')} {are(len(overlaps))} contained in the input, more than "
            f"max_overlap={config.max_overlap:g}: {shown}"
            f"{', …' if len(overlaps) > _SHOWN else ''}; leave those lines out of the input, or accept them with "
            f"max_overlap={min(1.0, 1.1 * len(overlaps) / len(held_out)):.2g}"
        )


def _report(reading: Reading, held_out: list[Problem], overlaps: list[Overlap]) -> dict[str, Any]:
    norm = Normalization()
    questions = Counter(norm.text(problem.question) for problem in reading.problems)
    return {
        "problems": len(reading.problems),
        "bad_lines": len(reading.bad),
        "bad_reasons": dict(Counter(line.reason.split(":")[0] for line in reading.bad).most_common(20)),
        "different_questions": len(questions),
        "held_out_problems": len(held_out),
        "held_out_contained": len(overlaps),
        "held_out_equal": sum(overlap.exact for overlap in overlaps),
        "overlaps": [asdict(overlap) for overlap in overlaps],
    }


def _summary(output: Path, report: dict[str, Any]) -> str:
    different, bad = counted(report["different_questions"], "different question"), counted(report["bad_lines"], "bad line")
    text = f"{output}: {counted(report['problems'], 'problem')}, {different}; {bad}"
    if held_out := report["held_out_problems"]:
        text += f"; contains {report['held_out_contained']:,} of {counted(held_out, 'held-out problem')} ({report['held_out_equal']:,} equal)"
    else:
        text += "; overlap with held-out problems was not checked (against=TEST_FILE checks it)"
    return text
