"""Random ids in the place of a corpus: what a self-test and a speed measurement train on where no text is prepared."""

from collections.abc import Sequence

import numpy as np

from pretrain.data.parts import part_of, part_sizes
from pretrain.data.samples import BatchSizes, Corrupt, NumberedSample
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocabulary import Vocabulary


class RandomText:
    """Samples of ids drawn uniformly, the mask left out, one document each; their noise is that of the training stream."""

    def __init__(
        self, batch: BatchSizes, vocabulary: Vocabulary, *, corrupt: Corrupt, lookahead: int, seed: int, parts: Sequence[float] = (1.0,)
    ) -> None:
        self._size, self._span = batch.global_sequences, batch.length + lookahead
        self._parts, self._corrupt, self._seed = part_sizes(parts, batch.global_sequences), corrupt, seed
        ids = np.arange(vocabulary.tokenizer_size)
        self._ids = ids[ids != vocabulary.mask_id]

    def sample(self, number: int) -> NumberedSample:
        """Sample `number`, counted from the start of the run: a pure function of it and the seed."""
        step, position = divmod(number, self._size)
        part, place = part_of(position, self._parts)
        size = self._parts[part]
        noise = Noise(self._seed, number, place, size, part=part, share=size / self._size, step=step)
        tokens = self._ids[noise.stream("text").integers(len(self._ids), size=self._span)]
        return NumberedSample(number, self._corrupt(tokens, np.zeros(self._span, np.int32), noise))
