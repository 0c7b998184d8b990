"""One pass over the held-out set, and what its record says."""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from pretrain.data.loader import build_validation_loader
from pretrain.data.samples import HeldOutSamples
from pretrain.engine.zero import Engine
from pretrain.evaluation.likelihood import LikelihoodResult, estimate_likelihood
from pretrain.run_config import RunConfig


def validate(
    engine: Engine, held_out: HeldOutSamples, config: RunConfig, device: torch.device, go_on: Callable[[tuple[int, ...]], bool]
) -> LikelihoodResult | None:
    """The likelihood of the whole set. `go_on` is called on every rank before each batch, with its samples; None: it answered no."""
    nats, counts = [], []
    data = engine.groups.data
    with build_validation_loader(held_out, config.data, config.batch, dp_rank=data.rank, dp_size=data.size, device=device) as loader:
        for shard in loader:
            if not go_on(tuple(number for batch in shard.micro_batches for number in batch.sample_ids)):
                return None
            nats_N, count_N = engine.evaluate(shard)
            nats.append(nats_N.numpy())
            counts.append(count_N.numpy())
    objective = engine.objective
    ids = held_out.sequences(sum(map(len, nats)))
    result = estimate_likelihood(
        ids, np.concatenate(nats), np.concatenate(counts), label=objective.label(evaluation=True), importance=objective.importance
    )
    # A draw of a sequence is one record in each part.
    return dataclasses.replace(result, draws=result.draws // objective.evaluation_parts)


def validation_record(tokens: int, result: LikelihoodResult) -> dict[str, object]:
    """The figures of a validation after `tokens` input tokens of training."""
    record: dict[str, object] = {
        "tokens": tokens,
        "nelbo_nats_per_token": result.nats_per_token,
        "nats_per_sequence": result.nats_per_token * result.tokens / result.sequences,
        "ci95_nats_per_token": (result.ci_high - result.ci_low) / 2,
        "nelbo_label": result.label,
        "validation_tokens": result.tokens,
        "validation_sequences": result.sequences,
        "draws": result.draws,
        "summary": result.describe(),
    }
    return record | ({"perplexity": result.perplexity} if result.label != "not_a_likelihood" else {})
