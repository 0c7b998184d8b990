"""Fine-tuning examples as arrays, and their order: a pure function of (seed, step), the same for every layout, restart and loader.

Shape suffixes: L positions of an example, lookahead included where the objective needs it; N examples; T tokens of all of them.

A row has three arrays, and `corrupt(tokens_L, documents_L, noise, prompt=prompt_L)` makes a noised sample of them:
  tokens_L     prompt, response, EOS, and EOS up to the end.
  documents_L  0 where there is text; -1 where nothing is noised, scored or counted: padding that is not scored, and the lookahead.
  prompt_L     text that is visible to every position, and neither noised nor scored.
Noised and scored are the positions with documents_L >= 0 and not prompt_L; their number is the sample's count.

An epoch reads every example once, in a keyed order of its own. Its last step may have fewer examples than the global batch: they are
spread evenly over the batch, so that every part of an objective and every stretch of the time axis gets its share of them, and empty samples
of count 0 stand between. The next epoch starts with the next step.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Protocol

import numpy as np

from pretrain.data.parts import part_of, part_sizes
from pretrain.data.permutation import Permutation
from pretrain.data.phases import Phase
from pretrain.data.problems import Problem
from pretrain.data.samples import BatchSizes, CorruptedSample, NumberedSample, ValidationOrder
from pretrain.data.sft_format import SFTFormat
from pretrain.data.skips import Skips
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.parallel.noise import Noise

_BATCH = 1024

class SFTCorrupt(Protocol):
    """Objective.corrupt for training or for evaluation."""

    def __call__(self, tokens: np.ndarray, documents: np.ndarray, noise: Noise, *, prompt: np.ndarray | None) -> CorruptedSample:
        """tokens int64 [L], documents int32 [L], prompt bool [L] -> the noised sample."""
        ...


@dataclass(frozen=True)
class Row:
    """One example, padded: see the module."""

    tokens_L: np.ndarray
    documents_L: np.ndarray
    prompt_L: np.ndarray


@dataclass(frozen=True)
class Counts:
    """What became of the problems.

    too_long         examples dropped because they are longer than the context.
    prompt_too_long  those among them whose prompt alone leaves no room.
    longest          tokens of the longest example, dropped ones included.
    tokens           prompt and response tokens of all kept examples.
    """

    problems: int
    examples: int
    too_long: int
    prompt_too_long: int
    longest: int
    tokens: int

    def sentence(self, context: int) -> str:
        """For the log."""
        text = f"{self.examples:,} examples of {self.problems:,} problems, {self.tokens:,} tokens, the longest {self.longest}"
        if self.too_long:
            text += f"; dropped {self.too_long:,} longer than the context of {context}, {self.prompt_too_long:,} of them by their prompt alone"
        return text


class SFTExamples:
    """Encoded examples, in the order of their problems. Memory: 4 bytes per token."""

    def __init__(self, problems: Sequence[Problem], tokenizer: Tokenizer, format: SFTFormat) -> None:
        """Encode. UserError where no example fits into the context, or the format asks for a BOS that the tokenizer lacks."""
        self.format, self.eos_id = format, tokenizer.eos_id
        ids, ends, prompts, sources = [np.zeros(0, np.int32)], [0], [], []
        too_long = prompt_too_long = longest = 0
        shortest = None
        for source, prompt, response in _encoded(problems, tokenizer, format):
            length = len(prompt) + len(response)
            longest, shortest = max(longest, length), length if shortest is None else min(shortest, length)
            if length > format.context:
                too_long += 1
                prompt_too_long += len(prompt) >= format.context
                continue
            ids.append(np.asarray([*prompt, *response], np.int32))
            ends.append(ends[-1] + length)
            prompts.append(len(prompt))
            sources.append(source)
        if not prompts:
            rule = f"the shortest example has {shortest} tokens, more than context={format.context}" if shortest else "there is no problem"
            raise UserError(f"{rule}; {'set a larger context' if shortest else 'give a file with problems'}")
        self._ids_T, self._ends_N = np.concatenate(ids), np.asarray(ends, np.int64)
        self.prompt_lengths_N = np.asarray(prompts, np.int32)
        self.problems_N = np.asarray(sources, np.int64)
        """Number of the problem that each example is from."""
        self.counts = Counts(len(problems), len(prompts), too_long, prompt_too_long, longest, int(self._ends_N[-1]))

    def __len__(self) -> int:
        return len(self.prompt_lengths_N)

    def ids(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(prompt, response) of an example as int32 ids; the response ends with EOS."""
        ids = self._ids_T[self._ends_N[number] : self._ends_N[number + 1]]
        return ids[: self.prompt_lengths_N[number]], ids[self.prompt_lengths_N[number] :]

    def row(self, number: int, lookahead: int) -> Row:
        """An example of context + lookahead positions."""
        prompt, response = self.ids(number)
        length, context = len(prompt) + len(response), self.format.context
        tokens_L = np.full(context + lookahead, self.eos_id, np.int64)
        tokens_L[:length] = np.concatenate((prompt, response))
        documents_L = np.zeros(context + lookahead, np.int32)
        documents_L[context if self.format.padding == "scored" else length :] = -1
        prompt_L = np.zeros(context + lookahead, bool)
        prompt_L[: 0 if self.format.score_prompt else len(prompt)] = True
        return Row(tokens_L, documents_L, prompt_L)

    def empty_row(self, lookahead: int) -> Row:
        """A row that fills a batch: nothing in it is noised, scored or counted."""
        length = self.format.context + lookahead
        return Row(np.full(length, self.eos_id, np.int64), np.full(length, -1, np.int32), np.zeros(length, bool))

    def require_length(self, batch: BatchSizes) -> None:
        """UserError unless a batch has rows of the context's length."""
        if batch.length != self.format.context:
            raise UserError(f"batch.length={batch.length} must equal the examples' context={self.format.context}; set both to the same")


class SFTSamples:
    """The training order. Sample `number` is position number % G of the stream's step number // G, with G = batch.global_sequences.

    Optimizer step s reads the stream's step `skips.data_step(s)`, which is s itself until a rewind leaves examples out; a run is as long
    all the same, and reads as many of a further epoch.

    lookahead  tokens that the objective needs beyond the L inputs (AR: 1).
    parts      shares of the global batch that the objective noises in different ways.
    """

    def __init__(
        self,
        examples: SFTExamples,
        batch: BatchSizes,
        *,
        corrupt: SFTCorrupt,
        lookahead: int,
        seed: int,
        parts: tuple[float, ...] = (1.0,),
        described: str = "",
    ) -> None:
        """described: what a log says of the examples."""
        examples.require_length(batch)
        self.examples = examples
        self._corrupt, self._lookahead, self._seed = corrupt, lookahead, seed
        self._global_sequences = batch.global_sequences
        self._parts = part_sizes(parts, batch.global_sequences)
        self._order = lru_cache(maxsize=2)(self._new_order)
        self.skips, self.phases, self.description = Skips(), (), described
        self.steps_per_epoch = -(-len(examples) // batch.global_sequences)

    def steps(self, epochs: int) -> int:
        """Optimizer steps of so many whole epochs."""
        return epochs * self.steps_per_epoch

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that a step belongs to."""
        return step // self.steps_per_epoch

    def example(self, number: int) -> int:
        """Which example sample `number` is; -1 for one that only fills the batch."""
        step, position = divmod(number, self._global_sequences)
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        first = step_of_epoch * self._global_sequences
        left = min(len(self.examples) - first, self._global_sequences)
        place, before = ((position + add) * left // self._global_sequences for add in (1, 0))
        return self._order(epoch)(first + before) if place > before else -1

    def sample(self, number: int) -> NumberedSample:
        """The noised sample with this number; an empty one with count 0 and number -1 where the epoch has no more examples."""
        example, noise = self.example(number), self._noise(number)
        row = self.examples.row(example, self._lookahead) if example >= 0 else self.examples.empty_row(self._lookahead)
        return NumberedSample(number if example >= 0 else -1, self._corrupt(row.tokens_L, row.documents_L, noise, prompt=row.prompt_L))

    def follow(self, phases: Sequence[Phase]) -> None:
        """There are no phases to follow: every epoch reads every example."""

    def numbers(self, step: int) -> range:
        """The samples that optimizer step `step` sees, in the order of the global batch."""
        first = self.skips.data_step(step) * self._global_sequences
        return range(first, first + self._global_sequences)

    def origin_of(self, number: int) -> str:
        """The example that a sample is, by the number of its problem in the file."""
        example = self.example(number)
        return "no example" if example < 0 else f"problem {self.examples.problems_N[example] + 1} of the file"

    def fingerprint(self, step: int) -> str:
        """Hash of the examples of a step, for the resume card: equal where a resumed run sees the same data."""
        digest = hashlib.blake2b(digest_size=8)
        for number in self.numbers(step):
            example = self.example(number)
            digest.update(f"{example}/".encode())
            if example >= 0:
                row = self.examples.row(example, 0)
                digest.update(row.tokens_L.tobytes() + row.documents_L.tobytes() + row.prompt_L.tobytes())
        return digest.hexdigest()

    def _new_order(self, epoch: int) -> Permutation:
        return Permutation(len(self.examples), f"{self._seed}/sft/epoch/{epoch}")

    def _noise(self, number: int) -> Noise:
        data_step, position = divmod(number, self._global_sequences)
        part, place = part_of(position, self._parts)
        size = self._parts[part]
        return Noise(self._seed, number, place, size, part=part, share=size / self._global_sequences, step=self.skips.step_of(data_step))


class SFTValidationSamples:
    """Every example `draws` times in each of `parts` ways of noising, in order; len() of them.

    Numbered by a ValidationOrder, as pretraining's validation is.
    """

    def __init__(
        self, examples: SFTExamples, batch: BatchSizes, *, corrupt: SFTCorrupt, lookahead: int, draws: int, seed: int, parts: int = 1
    ) -> None:
        examples.require_length(batch)
        self.examples = examples
        self._corrupt, self._lookahead = corrupt, lookahead
        self._order = ValidationOrder(
            len(examples), draws=draws, parts=parts, micro_sequences=batch.micro_sequences, seed=seed, key="sft/validation"
        )

    def __len__(self) -> int:
        return len(self._order)

    def sequences(self, count: int) -> np.ndarray:
        """[count]: the example that each of the first `count` samples scores; -1 for one that only fills a batch."""
        return self._order.items(count)

    def sample(self, number: int) -> NumberedSample:
        """Sample `number`; an empty one with count 0 and number -1 where there is none."""
        example, noise = self._order.draw(number)
        row = self.examples.empty_row(self._lookahead) if example is None else self.examples.row(example, self._lookahead)
        return NumberedSample(-1 if example is None else number, self._corrupt(row.tokens_L, row.documents_L, noise, prompt=row.prompt_L))


def _encoded(problems: Iterable[Problem], tokenizer: Tokenizer, format: SFTFormat) -> Iterator[tuple[int, list[int], list[int]]]:
    """(number of the problem, prompt ids, response ids with EOS) of every example."""
    bos = []
    if format.segment_bos:
        if "bos" not in tokenizer.special_ids:
            raise UserError(f"segment_bos=true needs a tokenizer with a BOS token, which {tokenizer.name} has not; set segment_bos=false")
        bos = [tokenizer.special_ids["bos"]]
    numbered = enumerate(problems)
    while batch := list(islice(numbered, _BATCH)):
        examples = [(number, *example) for number, problem in batch for example in format.segments(problem)]
        texts = [text for _, prompt, response in examples for text in (*prompt, *response)]
        encoded = iter(tokenizer.encode(texts))
        for number, prompt, response in examples:
            prompt_ids = [token for _ in prompt for token in (*bos, *next(encoded))]
            response_ids = [token for _ in response for token in (*bos, *next(encoded))]
            yield number, prompt_ids, [*response_ids, tokenizer.eos_id]
