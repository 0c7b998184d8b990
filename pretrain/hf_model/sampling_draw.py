"""From logits to tokens: temperature, top-k, nucleus, and an exact categorical draw.

Everything from the logits on is float64: Gumbel noise or softmax in fp32 truncates the tail, which lowers the entropy of samples and
flatters generative perplexity (Zheng et al. 2024). One uniform number per token goes through the inverse distribution function.

Shape suffixes: N independent rows, V model vocabulary, J vocabulary in order of falling probability.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_ELEMENTS = 1 << 23
"""Logits turned to float64 at once (64 MiB)."""


def rows_at_once(classes: int) -> int:
    """Rows of logits over `classes` that a sampler handles at once."""
    return max(1, MAX_ELEMENTS // classes)


@dataclass(frozen=True, kw_only=True)
class TokenLaw:
    """How a token is drawn from logits.

    temperature  divides the logits; 0 takes the most likely token.
    top_k        only the k most likely tokens (more when tied with the last); 0: all.
    top_p        only the fewest most likely tokens that hold at least this probability; 1: all.
    mask_id      the absorbing state, which is never drawn; None where the model has none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    mask_id: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature and top-k are at least 0 and nucleus lies in (0, 1], got {self.temperature}, {self.top_k} and {self.top_p}"
            )

    def probabilities(self, logits_NV: Tensor) -> Tensor:
        """[N, V] in float64; each row sums to 1."""
        scores_NV = logits_NV.double()
        if self.mask_id is not None:
            scores_NV = scores_NV.index_fill(-1, torch.tensor([self.mask_id], device=logits_NV.device), -torch.inf)
        if self.temperature == 0:
            return torch.zeros_like(scores_NV).scatter_(-1, scores_NV.argmax(-1, keepdim=True), 1.0)
        scores_NV = scores_NV / self.temperature
        if 0 < self.top_k < scores_NV.shape[-1]:
            threshold_N1 = scores_NV.topk(self.top_k).values[..., -1:]
            scores_NV = scores_NV.masked_fill(scores_NV < threshold_N1, -torch.inf)
        p_NV = scores_NV.softmax(-1)
        return _nucleus(p_NV, self.top_p) if self.top_p < 1 else p_NV

    def draw(self, logits_NV: Tensor, uniform_N: Tensor) -> Tensor:
        """[N] ids: the quantile of each row's law at its uniform number, in slices of bounded memory."""
        rows = rows_at_once(logits_NV.shape[-1])
        ids = [inverse_cdf(self.probabilities(x), u) for x, u in zip(logits_NV.split(rows), uniform_N.split(rows), strict=True)]
        return torch.cat(ids) if ids else uniform_N.long()


def inverse_cdf(weight_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """[N]: the first column whose cumulative weight exceeds uniform * total; float64, weights need not be normalised."""
    cumulative_NV = weight_NV.cumsum(-1)
    total_N1 = cumulative_NV[:, -1:]
    # uniform * total may round up to total, which no column exceeds.
    target_N1 = torch.minimum(uniform_N[:, None] * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    column_N1 = torch.searchsorted(cumulative_NV, target_N1, right=True).clamp_(max=weight_NV.shape[-1] - 1)
    # A parallel scan may round two equal sums apart and so give a column of weight zero a sliver.
    possible_N1 = weight_NV.gather(-1, column_N1) > 0
    return torch.where(possible_N1, column_N1, weight_NV.argmax(-1, keepdim=True))[:, 0]


def _nucleus(p_NV: Tensor, mass: float) -> Tensor:
    p_NJ, order_NJ = p_NV.sort(-1, descending=True)
    before_NJ = p_NJ.cumsum(-1) - p_NJ
    kept_NJ = p_NJ.masked_fill(before_NJ >= mass, 0.0)
    return torch.zeros_like(p_NV).scatter_(-1, order_NJ, kept_NJ / kept_NJ.sum(-1, keepdim=True))
