"""How a problem becomes one or two examples of prompt and response. No torch here: configuration must load in milliseconds."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pretrain.data.problems import Problem
from pretrain.errors import UserError

_ANNOTATION = re.compile(r"<<([^<>\n]*)>>")
_SHORTEST_CONTEXT = 8
TEMPLATES = ("question", "rationale", "answer")
"""Fields of an SFTFormat that are texts with a slot."""


def with_line_breaks(said: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a format as a command line says them: in templates, the two characters \\n stand for a line break."""
    return {key: value.replace("\\n", "\n") if key in TEMPLATES and isinstance(value, str) else value for key, value in said.items()}


@dataclass(frozen=True, kw_only=True)
class SFTFormat:
    """Prompt and response of a problem, in segments that are tokenised apart, so that a prompt has the same ids in training and evaluation.

    examples      one: question -> rationale and answer. two: question -> rationale, and question and rationale -> answer, as SMDM does. A problem
                  without a rationale gives one example, question -> answer, in either.
    question      segment of the question; {question} stands for its text.
    rationale     segment of the rationale, with {rationale}.
    answer        segment of the answer, with {answer}.
    annotations   calculator annotations <<48/2=24>>: keep; drop; plain: without the brackets (Deng et al.'s rationales are nothing else).
    segment_bos   whether each segment starts with BOS (as SMDM's does with tokenizers that add one).
    context       tokens of an example, prompt, response and padding together; longer examples are dropped and counted.
    padding       what fills an example up is EOS. scored: it is noised and scored like the response (SMDM). unscored: only the EOS that ends the
                  response is.
    score_prompt  whether prompts are noised and scored as well.
    """

    examples: Literal["one", "two"] = "one"
    question: str = "Question: {question}\n"
    rationale: str = "Answer: {rationale}\n"
    answer: str = "#### {answer}"
    annotations: Literal["keep", "drop", "plain"] = "keep"
    segment_bos: bool = False
    context: int = 256
    padding: Literal["scored", "unscored"] = "scored"
    score_prompt: bool = False

    def __post_init__(self) -> None:
        for field in TEMPLATES:
            template, slot = getattr(self, field), f"{{{field}}}"
            if template.count(slot) != 1:
                raise UserError(f"{field}={template!r} must hold {slot} once, which stands for the {field}'s text")
        if self.context < _SHORTEST_CONTEXT:
            raise UserError(f"context={self.context} must be at least {_SHORTEST_CONTEXT} tokens; use for example 256")

    def prompt(self, problem: Problem) -> str:
        """What a model is asked."""
        return self.question.replace("{question}", problem.question)

    def segments(self, problem: Problem) -> list[tuple[list[str], list[str]]]:
        """(segments of the prompt, segments of the response) of each example; an EOS follows each response.

        UserError where annotations=drop leaves nothing of a rationale.
        """
        question, answer = self.prompt(problem), self.answer.replace("{answer}", problem.answer)
        text = self._rationale(problem)
        if not text:
            return [([question], [answer])]
        rationale = self.rationale.replace("{rationale}", text)
        if self.examples == "one":
            return [([question], [rationale, answer])]
        return [([question], [rationale]), ([question, rationale], [answer])]

    def _rationale(self, problem: Problem) -> str:
        if self.annotations == "keep":
            return problem.rationale
        text = _ANNOTATION.sub("" if self.annotations == "drop" else r"\1", problem.rationale).strip()
        if problem.rationale and not text:
            shown = f"{problem.id} ({problem.rationale[:40]!r})"
            raise UserError(f"annotations=drop leaves nothing of the rationale of problem {shown}; use plain, or keep")
        return text
