"""The sequences that the export gate compares networks on: random ids, and real text.

Shape suffixes: N sequences, L positions.
"""

from pathlib import Path

import torch
from torch import Tensor

from pretrain.convert.plain_network import TrainedModel
from pretrain.data.corpus import open_corpora
from pretrain.data.problems import read_problem_file
from pretrain.data.sft_config import SFTConfig
from pretrain.errors import UserError

SEQUENCES = 8
"""Of each kind."""
LONGEST = 256
"""Tokens per sequence at most: the networks are compared on a CPU."""


def gate_length(trained: TrainedModel) -> int:
    """Tokens of each sequence."""
    return min(trained.run.batch.length, LONGEST)


def random_sequences(trained: TrainedModel) -> Tensor:
    """ids_NL over the tokenizer's ids but the mask's slot, where the tokenizer has one."""
    vocabulary, generator = trained.vocabulary, torch.Generator().manual_seed(1)
    ids_NL = torch.randint(vocabulary.tokenizer_size, (SEQUENCES, gate_length(trained)), generator=generator)
    return torch.where(ids_NL == (-1 if vocabulary.mask_id is None else vocabulary.mask_id), vocabulary.eos_id, ids_NL)


def real_sequences(trained: TrainedModel, text: str | None) -> Tensor:
    """ids_NL from the file `text`, or from the run's held-out text. Raises UserError where neither can be read."""
    length = gate_length(trained)
    ids = _of_file(trained, Path(text)) if text is not None else _held_out(trained, SEQUENCES * length)
    if not ids:
        raise UserError(f"text={text} holds no token; give a file with some text")
    while len(ids) < SEQUENCES * length:
        ids = ids + ids
    return torch.tensor(ids[: SEQUENCES * length]).view(SEQUENCES, length)


def _of_file(trained: TrainedModel, path: Path) -> list[int]:
    try:
        words = path.read_text(encoding="utf-8")[: 64 * SEQUENCES * LONGEST]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"text={path} cannot be read ({error}); give a file of UTF-8 text") from None
    return trained.tokenizer.encode([words])[0]


def _held_out(trained: TrainedModel, count: int) -> list[int]:
    if trained.run.sft is not None:
        return _of_problems(trained, trained.run.sft)
    sources = trained.run.data.validation
    try:
        if not sources:
            raise UserError("the run names no held-out text")
        corpus = next(iter(open_corpora(sources, trained.tokenizer).values()))
    except UserError as error:
        raise UserError(f"the gate needs real text, and {error}; give text=FILE with some in the model's language") from None
    return corpus.read(0, min(count, corpus.tokens))[0].tolist()


def _of_problems(trained: TrainedModel, sft: SFTConfig) -> list[int]:
    """Examples one after another, as a fine-tuning run reads them."""
    try:
        problems = read_problem_file(Path(sft.validation or sft.train))[: SEQUENCES * LONGEST]
    except UserError as error:
        raise UserError(f"the gate needs real text, and {error}; give text=FILE with some in the model's language") from None
    examples = (text for problem in problems for prompt, response in sft.format.segments(problem) for text in (*prompt, *response))
    return [token for ids in trained.tokenizer.encode(list(examples)) for token in ids]
