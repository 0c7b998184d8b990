"""Joining the groups leaves no warnings about names that torch changed and our libraries have not."""

import warnings

import torch
import torch.distributed as dist

from pretrain.parallel import groups as parallel_groups
from pretrain.parallel.config import ParallelConfig
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary
from tests.distributed import run_distributed


def warned(initialize: bool) -> list[str]:
    """What collectives under old names, and ours, warn of; `initialize` joins the groups as a run does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if initialize:
            parallel_groups.initialize(ParallelConfig(), seed=1)
        part, whole = torch.ones(2), torch.empty(4)
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        vocabulary = Vocabulary(tokenizer_size=4, model_size=4, padded_size=4, mask_id=None, eos_id=0)
        VocabShard(vocabulary, start=0, end=2, group=dist.group.WORLD)._gather(part)
        warnings.warn("something else", FutureWarning, stacklevel=1)
    return [str(warning.message) for warning in caught if issubclass(warning.category, FutureWarning)]


def test_the_renamed_collectives_are_silent_and_nothing_else_is() -> None:
    assert run_distributed(warned, 2, True) == [["something else"]] * 2
    assert len(run_distributed(warned, 2, False)[0]) in (1, 3), "newer libraries warn of two names: ours is not among them"
