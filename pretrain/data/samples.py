"""From a sample's number to its noised arrays: a pure function of (seed, number), the same for every layout, restart and loader.

`TrainingSamples` walks the mixture without end; `ValidationSamples` reads every window of every source once, in order.
Both answer `sample(n)`; who asks for which numbers is decided by `positions`.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from pretrain.data.config import DataConfig
from pretrain.data.corpus import Corpus
from pretrain.data.mixture import Address, Mixture
from pretrain.data.parts import part_of, part_sizes
from pretrain.data.permutation import Permutation
from pretrain.data.phases import Phase, planned_phases
from pretrain.data.skips import Skips
from pretrain.errors import UserError
from pretrain.parallel.noise import Noise


class CorruptedSample(Protocol):
    """What an objective makes of one sample; `count` is 0 for a sample that only fills the batch."""

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """Arrays for the network; among them `documents`."""
        ...

    @property
    def targets(self) -> dict[str, np.ndarray]:
        """Arrays for the loss."""
        ...

    @property
    def count(self) -> int:
        """Divisor of the sample's loss."""
        ...

    @property
    def t(self) -> float | None:
        """Diffusion time."""
        ...


Corrupt = Callable[[np.ndarray, np.ndarray, Noise], CorruptedSample]
"""(tokens int64 [L + lookahead], documents int32 [L + lookahead], noise) -> the noised sample."""


@dataclass(frozen=True)
class NumberedSample:
    """A noised sample with its number; -1 for one that only fills the batch."""

    number: int
    corrupted: CorruptedSample


class Samples(Protocol):
    """Something that can make any sample by its number."""

    def sample(self, number: int) -> NumberedSample:
        """The sample with this number."""
        ...


class TrainingStream(Samples, Protocol):
    """The training data of a run, as its trainer sees it: any sample by its number, and which numbers a step reads."""

    skips: Skips

    @property
    def description(self) -> str:
        """What a log says of the data when a run starts; empty where nothing is left to say."""
        ...

    @property
    def phases(self) -> Sequence[Phase]:
        """Phases of a mixture, past and to come; empty where there is none."""
        ...

    def follow(self, phases: Sequence[Phase]) -> None:
        """Keep to these phases in place of those that the configuration states. Not called where there are none."""
        ...

    def numbers(self, step: int) -> range:
        """The samples that optimizer step `step` sees, in the order of the global batch."""
        ...

    def fingerprint(self, step: int) -> str:
        """Hash of what a step reads, for the resume card."""
        ...

    def origin_of(self, number: int) -> str:
        """Where a sample's text is from, for messages."""
        ...


class HeldOutSamples(Samples, Protocol):
    """A held-out set, whole and in order; len() of its samples."""

    def __len__(self) -> int: ...

    def sequences(self, count: int) -> np.ndarray:
        """[count]: what each of the first `count` samples scores; -1 for one that only fills a batch."""
        ...


class BatchSizes(Protocol):
    """Sizes of a global batch (a BatchConfig)."""

    @property
    def global_sequences(self) -> int:
        """Sequences of one optimizer step."""
        ...

    @property
    def micro_sequences(self) -> int:
        """Sequences of one forward pass on one rank."""
        ...

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        ...


class TrainingSamples:
    """The endless training stream.

    Window k of a source is tokens [k L, k L + L + lookahead) of its stream; the mixture says which window sample n is. Optimizer step s reads
    the samples of the stream's step `skips.data_step(s)`, which is s itself until a rewind leaves text out.

    lookahead      tokens that the objective needs beyond the L inputs (AR: 1).
    random_length  whether the random-length rule of the configuration applies to this objective.
    parts          shares of the global batch that the objective noises in different ways.

    UserError if a source does not fill one window.
    """

    def __init__(
        self,
        config: DataConfig,
        corpora: Mapping[str, Corpus],
        batch: BatchSizes,
        *,
        corrupt: Corrupt,
        lookahead: int,
        random_length: bool,
        seed: int,
        parts: tuple[float, ...] = (1.0,),
    ) -> None:
        self._corpora = corpora
        self._corrupt = corrupt
        self._length, self._span = batch.length, batch.length + lookahead
        self._document_masks = config.document_masks
        self._cut_probability = config.random_length_probability if random_length else 0.0
        self._global_sequences = batch.global_sequences
        self._parts = part_sizes(parts, batch.global_sequences)
        self._seed = seed
        self.skips = Skips()
        windows = {name: (corpus.tokens - lookahead) // batch.length for name, corpus in corpora.items()}
        for name, count in windows.items():
            if count < 1:
                raise UserError(
                    f"data source '{name}' ({corpora[name].folder}) has {corpora[name].tokens} tokens, fewer than one sample of {self._span}; "
                    "add text to it, or set a smaller batch.length"
                )
        self._windows = windows
        self.follow(planned_phases(config, global_sequences=batch.global_sequences, length=batch.length))

    def follow(self, phases: Sequence[Phase]) -> None:
        """Draw from these phases in place of those that the configuration states: a run that continues keeps the ones it has recorded."""
        self.mixture = Mixture(phases, self._windows, seed=self._seed)

    def sample(self, number: int) -> NumberedSample:
        """Sample `number` of the stream: its step s, position i is number s * global_sequences + i."""
        noise = self._noise(number)
        tokens, documents = self.text(self.mixture.address(number))
        if self._cut_probability > 0:
            random = noise.stream("random_length")
            if random.random() < self._cut_probability:
                documents[int(random.integers(1, self._length + 1)) :] = -1
        return NumberedSample(number, self._corrupt(tokens, documents, noise))

    @property
    def description(self) -> str:
        """Nothing: the configuration names the corpora, and their manifests say the rest."""
        return ""

    @property
    def phases(self) -> Sequence[Phase]:
        """Those of the mixture, past and to come."""
        return self.mixture.phases

    def _noise(self, number: int) -> Noise:
        data_step, position = divmod(number, self._global_sequences)
        part, place = part_of(position, self._parts)
        size = self._parts[part]
        return Noise(self._seed, number, place, size, part=part, share=size / self._global_sequences, step=self.skips.step_of(data_step))

    def text(self, address: Address) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and document numbers of a window, before noise; zeros for the latter where documents are not masked from each other."""
        return self._corpora[address.source].read(address.window * self._length, self._span, documents=self._document_masks)

    def numbers(self, step: int) -> range:
        """The samples that optimizer step `step` sees, in the order of the global batch."""
        first = self.skips.data_step(step) * self._global_sequences
        return range(first, first + self._global_sequences)

    def addresses(self, step: int) -> list[Address]:
        """Which windows optimizer step `step` sees, in the order of the global batch."""
        return [self.mixture.address(number) for number in self.numbers(step)]

    def documents(self, step: int) -> list[tuple[Address, list[tuple[str, int, int]]]]:
        """For audits: each window of a step with (shard, first document, last document) for the shards that it touches."""
        return [self.documents_of(number) for number in self.numbers(step)]

    def documents_of(self, number: int) -> tuple[Address, list[tuple[str, int, int]]]:
        """The same for one sample."""
        address = self.mixture.address(number)
        return address, self._corpora[address.source].documents_of(address.window * self._length, self._span)

    def origin_of(self, number: int) -> str:
        """Source, shards and documents of a sample."""
        address, touched = self.documents_of(number)
        return f"{address.source}: " + ", ".join(f"{shard} documents {first} to {last}" for shard, first, last in touched)

    def fingerprint(self, step: int) -> str:
        """Hash of the addresses and tokens of a step, for the resume card: equal where a resumed run sees the same data."""
        digest = hashlib.blake2b(digest_size=8)
        for address in self.addresses(step):
            digest.update(repr(address).encode() + self.text(address)[0].tobytes())
        return digest.hexdigest()


class ValidationOrder:
    """Numbers of a validation: each of `items` things `draws` times, in each of `parts` ways of noising, one part after another.

    Each part is filled up with empty samples to whole micro-batches, so that no micro-batch mixes parts. t is stratified over the whole
    set by a keyed permutation, so that a sample's draw depends on neither batch size nor layout, and no part of the text is tied to a
    part of the time axis.
    """

    def __init__(self, items: int, *, draws: int, parts: int, micro_sequences: int, seed: int, key: str) -> None:
        self._draws, self._parts, self._seed = draws, parts, seed
        self._size = items * draws
        self._block = self._size if parts == 1 else -(-self._size // micro_sequences) * micro_sequences
        self._cells = Permutation(self._size, f"{seed}/{key}")

    def __len__(self) -> int:
        return self._block * self._parts

    def items(self, count: int) -> np.ndarray:
        """[count]: what each of the first `count` samples scores; -1 for one that only fills a batch."""
        inner = np.arange(count) % self._block
        return np.where((np.arange(count) < len(self)) & (inner < self._size), inner // self._draws, -1)

    def draw(self, number: int) -> tuple[int | None, Noise]:
        """Which thing sample `number` scores, and its noise; None for a sample that only fills a batch."""
        part, inner = divmod(number, self._block)
        share = 1 / self._parts
        if part >= self._parts or inner >= self._size:
            return None, Noise(self._seed, number, 0, 1, part=min(part, self._parts - 1), share=share)
        noise = Noise(self._seed, part * self._size + inner, self._cells(inner), self._size, part=part, share=share)
        return inner // self._draws, noise


class ValidationSamples:
    """Every window of every source, `draws` times in each of `parts` ways of noising; len() of them. The last window of a source is filled up
    with padding.

    Numbered by a ValidationOrder.

    UserError if there is nothing to score.
    """

    def __init__(
        self, config: DataConfig, corpora: Mapping[str, Corpus], batch: BatchSizes, *, corrupt: Corrupt, lookahead: int, draws: int, seed: int,
        parts: int = 1,
    ) -> None:  # fmt: skip
        self._corpora = list(corpora.values())
        self._corrupt = corrupt
        self._length, self._span = batch.length, batch.length + lookahead
        self._document_masks = config.document_masks
        windows = [-(-max(corpus.tokens - lookahead, 0) // batch.length) for corpus in self._corpora]
        for corpus, count in zip(self._corpora, windows, strict=True):
            if count == 0:
                raise UserError(f"validation source '{corpus.name}' ({corpus.folder}) has {corpus.tokens} token(s), nothing to score; add text to it")
        self._ends = list(accumulate(windows))
        self._order = ValidationOrder(
            self._ends[-1], draws=draws, parts=parts, micro_sequences=batch.micro_sequences, seed=seed, key="validation"
        )

    def __len__(self) -> int:
        return len(self._order)

    def sequences(self, count: int) -> np.ndarray:
        """[count]: the window that each of the first `count` samples scores; -1 for one that only fills a batch."""
        return self._order.items(count)

    def sample(self, number: int) -> NumberedSample:
        """Sample `number`; an empty one with count 0 and number -1 where there is none."""
        window, noise = self._order.draw(number)
        if window is None:
            tokens = np.full(self._span, self._corpora[0].manifest.tokenizer.eos_id, np.int64)
            return NumberedSample(-1, self._corrupt(tokens, np.full(self._span, -1, np.int32), noise))
        return NumberedSample(number, self._corrupt(*self._window(window), noise))

    def _window(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        source = next(i for i, end in enumerate(self._ends) if window < end)
        corpus = self._corpora[source]
        start = (window - (self._ends[source - 1] if source else 0)) * self._length
        tokens, documents = corpus.read(start, min(self._span, corpus.tokens - start), documents=self._document_masks)
        missing = self._span - tokens.size
        padding = np.full(missing, corpus.manifest.tokenizer.eos_id, np.int64)
        return np.concatenate([tokens, padding]), np.concatenate([documents, np.full(missing, -1, np.int32)])


def positions(step: int, *, global_sequences: int, micro_sequences: int, dp_rank: int, dp_size: int) -> Iterator[range]:
    """Sample numbers of each micro-batch of this data-parallel rank: rank r takes positions [(m dp_size + r) micro, ... + micro)."""
    stride = dp_size * micro_sequences
    if global_sequences % stride:
        raise ValueError(f"{global_sequences} sequences cannot be cut into micro-batches of {micro_sequences} for {dp_size} data-parallel ranks")
    first = step * global_sequences + dp_rank * micro_sequences
    for start in range(first, first + global_sequences, stride):
        yield range(start, start + micro_sequences)
