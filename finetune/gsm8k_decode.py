"""Answers of a model: batches of unequal prompts, outputs up to EOS, and what they cost.

The noise of a problem follows from the seed and the problem's number, so neither the batch nor its neighbours change an output. From left to right a
sequence ends with its EOS; the other samplers fill the whole context, and what stands after the first EOS is cut off.

Shape suffixes: B sequences, L positions.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from pretrain.hf_model.modeling_dit import DiT
from pretrain.hf_model.modeling_llama import Llama
from pretrain.hf_model.sampling_draw import TokenLaw
from pretrain.hf_model.sampling_methods import Constants, Method, alike_only, fill
from pretrain.hf_model.sampling_network import BLANK, Request
from pretrain.parallel.vocabulary import Vocabulary
from pretrain.sampling.generate import mistakes_of_users

_STAGE = 1 << 40
"""Problems are numbered below it; the second stage of a problem has noise of its own."""


@dataclass(frozen=True)
class Asked:
    """A problem's number and its prompt. The second stage of the two-example format asks for the answer after the rationale."""

    item: int
    prompt: tuple[int, ...]
    stage: int = 0


@dataclass(frozen=True)
class Answered:
    """What a model wrote.

    output       ids after the prompt, up to the first EOS and without it.
    ended        whether the answer ended with EOS.
    tokens       generated, as the scaling study counts them: with EOS, without the prompt and without what follows EOS.
    masked       masks that were left in it.
    evaluations  of the network.
    seconds      its share of its batch's time.
    """

    output: tuple[int, ...]
    ended: bool
    tokens: int
    masked: int
    evaluations: int
    seconds: float

    def then(self, later: "Answered") -> "Answered":
        """Both stages of the two-example format as one; the EOS between them is counted, and is not in the output."""
        return Answered(
            output=self.output + later.output, ended=later.ended, tokens=self.tokens + later.tokens, masked=self.masked + later.masked,
            evaluations=self.evaluations + later.evaluations, seconds=self.seconds + later.seconds,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A model, how it is sampled, and the length of its canvas."""

    network: DiT | Llama
    constants: Constants
    method: Method
    law: TokenLaw
    vocabulary: Vocabulary
    seed: int
    context: int

    def batches(self, asked: Sequence[Asked], batch: int) -> Iterator[list[Asked]]:
        """At most `batch` together: neighbours in the file, or those with as many tokens to draw where that says how many steps are taken."""
        groups: dict[int, list[Asked]] = {}
        for one in asked:
            groups.setdefault(len(one.prompt) if alike_only(self.method) else 0, []).append(one)
        for group in groups.values():
            yield from (group[first : first + batch] for first in range(0, len(group), batch))

    def answer(self, asked: Sequence[Asked]) -> list[Answered]:
        """One batch; every prompt is shorter than the context. Raises UserError for settings that turn out not to fit the model."""
        device = self.network.lm_head.weight.device
        start = time.perf_counter()
        canvas_BL = torch.tensor([[*one.prompt, *[BLANK] * (self.context - len(one.prompt))] for one in asked], device=device)
        request = Request(
            law=self.law, vocab_size=self.vocabulary.model_size, seed=self.seed, end=self.vocabulary.eos_id,
            sequences_B=torch.tensor([one.item + one.stage * _STAGE for one in asked], device=device),
        )  # fmt: skip
        with mistakes_of_users():
            ids_BL, evaluations_B = fill(self.network, canvas_BL, request, self.constants, self.method)
        rows, evaluations = ids_BL.tolist(), evaluations_B.tolist()  # waits for the device
        seconds = (time.perf_counter() - start) / len(asked)
        return [self._cut(row[len(one.prompt) :], nfe, seconds) for one, row, nfe in zip(asked, rows, evaluations, strict=True)]

    def _cut(self, ids: list[int], evaluations: int, seconds: float) -> Answered:
        eos, mask = self.vocabulary.eos_id, self.vocabulary.mask_id
        ended = eos in ids
        output = ids[: ids.index(eos)] if ended else ids
        masked = sum(token in (mask, BLANK) for token in output)
        return Answered(tuple(output), ended, len(output) + ended, masked, evaluations, seconds)


HasAnswer = Callable[[tuple[int, ...]], bool]
"""Whether an output has come to an answer."""


def answers(decoder: Decoder, asked: Sequence[Asked], batch: int, has_answer: HasAnswer | None) -> Iterator[list[tuple[Asked, Answered]]]:
    """Batch by batch.

    has_answer  of the two-example format: who has ended a rationale without an answer is asked for it after the rationale. (From left to right a
                model may go on by itself: training shows it both the end and the answer after a rationale.) None: one stage.
    """
    for group in decoder.batches(asked, batch):
        found = {one.item: answered for one, answered in zip(group, decoder.answer(group), strict=True)}
        if has_answer is not None:
            _second_stage(decoder, [one for one in group if found[one.item].ended and not has_answer(found[one.item].output)], batch, found)
        yield [(one, found[one.item]) for one in group]


def _second_stage(decoder: Decoder, group: Sequence[Asked], batch: int, found: dict[int, Answered]) -> None:
    """Ask for the answers, and put them after the rationales in `found`: where an EOS stood, there is room."""
    later = [Asked(one.item, one.prompt + found[one.item].output, 1) for one in group]
    for second in decoder.batches(later, batch):
        for one, answered in zip(second, decoder.answer(second), strict=True):
            found[one.item] = found[one.item].then(answered)
