"""GSM8K-style problems from templates: to train on, held out, and as text.

Which side a question is on, training or held-out, is decided by a hash of its text (one in eight is held out), so that no held-out question can stand
in the training data, whatever the counts. Problem i is a function of (seed, split, templates, difficulty) alone: templates take turns.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from random import Random

from data_prep.problem_config import GsmSymbolicConfig
from data_prep.progress import say
from data_prep.symbolic_templates import BROKEN, Template, load_templates
from pretrain.data.files import write_once
from pretrain.data.problems import MARK, Problem, answer_value, problem_lines
from pretrain.errors import UserError, are, counted
from pretrain.outputs import require_writable

TEST, TRAIN, TEXT = "test", "train", "text"
_HELD_OUT = 8
"""One question in so many is on the held-out side."""
_TRIES = 400
"""Draws of one template without a new question after which it has no more."""
_SAMPLES = 15
"""Instances that a template's effort is the median of."""


def write_symbolic(config: GsmSymbolicConfig) -> None:
    """Write train.jsonl, test.jsonl and, where it was asked for, text.jsonl. UserError where the templates cannot give so many problems."""
    output = Path(config.output)
    require_writable(output, folder=True)
    templates = choose_templates(config, load_templates())
    said = []
    for split, count in ((TRAIN, config.count), (TEST, config.test_count), (TEXT, config.text_count)):
        if count:
            draws = Draws(config, templates, split)
            write_once(output / f"{split}.jsonl", _content(draws.take(count), as_text=split == TEXT))
            ended = f" ({counted(len(draws.exhausted), 'template')} ran out of new questions)" if draws.exhausted else ""
            said.append(f"{count:,} to {'pretrain on' if split == TEXT else 'train on' if split == TRAIN else 'hold out'}{ended}")
    steps = [effort(template, config.difficulty)[0] for template in templates.values()]
    which = f"{counted(len(templates), 'template')} of {min(steps):g} to {max(steps):g} steps: {', '.join(map(str, templates))}"
    say(f"{output}: {', '.join(said)}; {which}")


def problem_text(problem: Problem) -> str:
    """A problem as running text, in the words of the fine-tuning format."""
    return f"Question: {problem.question}\nAnswer: {problem.rationale}\n{MARK} {problem.answer}\n"


def choose_templates(config: GsmSymbolicConfig, known: dict[int, Template]) -> dict[int, Template]:
    """The templates that the configuration names, or the easiest ones, in the order of their numbers. UserError for unknown numbers."""
    if config.templates is not None:
        for number in config.templates:
            if number in BROKEN:
                raise UserError(f"template {number} is marked as broken by the authors of reasoning-gym; leave it out of templates=")
            if number not in known:
                raise UserError(f"there is no template {number}; templates have the numbers {min(known)} to {max(known)}")
        return {number: known[number] for number in sorted(config.templates)}
    if config.easiest is not None:
        if config.easiest > len(known):
            raise UserError(f"easiest={config.easiest} is more than the {len(known)} templates that there are; leave it out for all")
        ranked = sorted(known, key=lambda number: (*effort(known[number], config.difficulty), number))
        return {number: known[number] for number in sorted(ranked[: config.easiest])}
    return known


def effort(template: Template, difficulty: float) -> tuple[float, float]:
    """(reasoning steps, characters of the problem): lines of the worked answer, and what breaks ties; medians over some instances."""
    made = [_instance(template, Random(f"effort/{number}"), difficulty) for number in range(_SAMPLES)]
    whole = [problem for problem in made if problem is not None]
    steps = statistics.median(rationale.count("\n") + 1 for _, rationale, _ in whole)
    return steps, statistics.median(len(question) + len(rationale) for question, rationale, _ in whole)


@dataclass
class Draws:
    """New questions of one split, templates taking turns; `exhausted` are the templates that have no more."""

    config: GsmSymbolicConfig
    templates: dict[int, Template]
    split: str
    exhausted: list[int] = field(default_factory=list)

    def take(self, count: int) -> list[Problem]:
        """The first `count` problems. UserError if there are fewer."""
        streams = {number: self._questions(number) for number in self.templates}
        problems: list[Problem] = []
        while streams and len(problems) < count:
            for number in list(streams):
                problem = next(streams[number], None)
                if problem is None:
                    del streams[number]
                    self.exhausted.append(number)
                elif len(problems) < count:
                    problems.append(problem)
        if len(problems) < count:
            raise UserError(
                f"{counted(len(self.templates), 'template')} cannot make more than {counted(len(problems), f'different {self.split} question')}, and "
                f"{count:,} {are(count)} wanted; "
                "use more templates, or a smaller count"
            )
        return problems

    def _questions(self, number: int) -> Iterator[Problem]:
        seen: set[str] = set()
        draw = failures = 0
        while failures < _TRIES:
            random = Random(f"{self.config.seed}/{self.split}/{number}/{draw}")
            made = _instance(self.templates[number], random, self.config.difficulty)
            draw, failures = draw + 1, failures + 1
            if made is not None and made[0] not in seen and held_out(made[0]) == (self.split == TEST):
                failures = 0
                seen.add(made[0])
                question, rationale, answer = made
                name = f"gsm_symbolic-{self.split}-{number}-{draw - 1}"
                yield Problem(id=name, source="gsm_symbolic", question=question, rationale=rationale, answer=answer, template=number)


def held_out(question: str) -> bool:
    """Whether a question is on the held-out side."""
    return int.from_bytes(blake2b(question.encode(), digest_size=8).digest()) % _HELD_OUT == 0


def _instance(template: Template, random: Random, difficulty: float) -> tuple[str, str, str] | None:
    """(question, rationale, answer), or None where the template has no problem for these numbers or contradicts itself."""
    try:
        made = template(random, difficulty)
    except (ValueError, IndexError, ZeroDivisionError):  # a few templates find no whole numbers
        return None
    question, answer, solution = str(made["question"]).strip(), str(made["answer"]).strip(), str(made["metadata"]["answer_cot"])
    rationale, mark, final = (part.strip() for part in solution.rpartition(MARK))
    value = answer_value(answer)
    if not mark or value is None or answer_value(final) != value:
        return None
    return question, rationale, answer


def _content(problems: list[Problem], *, as_text: bool) -> bytes:
    if not as_text:
        return problem_lines(problems)
    return b"".join((json.dumps({"text": problem_text(problem)}, ensure_ascii=False) + "\n").encode() for problem in problems)
