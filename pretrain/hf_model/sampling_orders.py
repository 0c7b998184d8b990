"""Masked diffusion in an order of one's own: by the network's confidence, or from left to right. A fixed number of tokens per evaluation.

The order is settled before anything is drawn, from what the network says about each position, and never from the token drawn there. So with
one token per evaluation and the exact posterior every order samples the data distribution: the chain rule holds in any order, also in one
that depends on what is already known. Ranking positions by the probability of the token drawn (LLaDA, Nie et al. 2025) would favour lucky
draws and lower the entropy; at temperature 0 the two are the same.

Every evaluation reads the whole sequence, from left to right as well: what masked diffusion says of a position depends on how many masks
follow it, so a sequence must be sampled at the length that it is meant for.

Shape suffixes: B sequences, L positions, R sequences with masks left, N positions, D features, V model vocabulary.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from .sampling_draw import TokenLaw, rows_at_once
from .sampling_network import Denoiser, Request, after_end, blanks, draw_tokens, read_canvas
from .sampling_noise import uniforms

Order = Literal["confidence", "margin", "left_to_right"]

TIE = 1e-4
"""Positions whose certainty is this close to the highest are as good. Where everything is masked all positions are equal (attention sees
relative places only), and rounding, which differs between batches, must not choose among them."""


@torch.no_grad()
def sample_mdlm_in_order(
    network: Denoiser, ids_BL: Tensor, request: Request, *, order: Order, tokens: int = 1, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """Fill every mask of ids_BL, `tokens` per evaluation and sequence.

    order  confidence: where the most likely token is most likely (MaskGIT, Chang et al. 2022); margin: where it is furthest ahead of the
           second (Kim et al. 2025); left_to_right, the only one that ends with the request's `end`. Ties (within TIE) go to the left.
    block  fill one run of this many masks after another from left to right, each in `order` (semi-autoregressive: LLaDA, Nie et al. 2025);
           None: all masks at once.

    Likelihoods are compared at temperature 1 and without top-k or nucleus, which would make all positions look alike; these shape the draws.
    Returns ids [B, L] and the network evaluations of each sequence [B]: its masks over `tokens`, rounded up, block by block.
    Raises ValueError for tokens or block < 1 and for an order that does not exist.
    """
    if tokens < 1 or order not in get_args(Order):
        raise ValueError(f"needs at least one token per evaluation and one of the orders {', '.join(get_args(Order))}, got {tokens} and {order}")
    if block is not None and block < 1:
        raise ValueError(f"a block holds at least one token, got {block}")
    ids_BL, evaluations_B = ids_BL.clone(), torch.zeros(len(ids_BL), dtype=torch.long, device=ids_BL.device)
    positions_L = torch.arange(ids_BL.shape[1], device=ids_BL.device)
    # A position is drawn once, so one number each is enough.
    _, uniform_BL = uniforms(request.seed, request.sequences_B.to(ids_BL.device), 0, positions_L)
    masked_BL = blanks(ids_BL, request.law)
    blank_BL, block_BL = masked_BL, (masked_BL.cumsum(-1) - 1) // (block or ids_BL.shape[1])
    end = request.end if order == "left_to_right" else None
    while (masked_BL := blanks(ids_BL, request.law)).any():
        first_B1 = block_BL.masked_fill(~masked_BL, ids_BL.shape[1]).amin(-1, keepdim=True)
        masked_BL &= block_BL == first_B1
        active_B = masked_BL.any(-1)
        features_RLD, masked_RL = read_canvas(network, ids_BL[active_B]), masked_BL[active_B]
        score_RL = torch.full(masked_RL.shape, -torch.inf, dtype=torch.float64, device=ids_BL.device)
        if order == "left_to_right":
            score_RL[masked_RL] = -positions_L.double().expand_as(score_RL)[masked_RL]
        else:
            score_RL[masked_RL] = _certainty(network, features_RLD[masked_RL], request, margin=order == "margin")
        chosen_RL = _best(score_RL, tokens)
        chosen_BL = torch.zeros_like(masked_BL)
        chosen_BL[active_B] = chosen_RL
        ids_BL[chosen_BL] = draw_tokens(network, features_RLD[chosen_RL], uniform_BL[chosen_BL], request)
        evaluations_B += active_B
        over_BL = after_end(ids_BL, blank_BL, end) & blanks(ids_BL, request.law)
        ids_BL = ids_BL if end is None else ids_BL.masked_fill(over_BL, end)
        request.progress(int((chosen_BL | over_BL).sum()))
        request.show(ids_BL)
    if end is not None:
        ids_BL = ids_BL.masked_fill(after_end(ids_BL, blank_BL, end), end)  # several tokens of one evaluation may lie beyond it
    request.check(ids_BL)
    return ids_BL, evaluations_B


def _certainty(network: Denoiser, features_ND: Tensor, request: Request, *, margin: bool) -> Tensor:
    """[N], float64: the probability of the most likely token, less that of the second when the margin is asked for."""
    plain, certainties = TokenLaw(mask_id=request.law.mask_id), []
    for x_ND in features_ND.split(rows_at_once(request.vocab_size)):
        first_N, second_N = plain.probabilities(network.logits(x_ND)).topk(2).values.unbind(-1)
        certainties.append(first_N - second_N if margin else first_N)
    return torch.cat(certainties)


def _best(score_RL: Tensor, tokens: int) -> Tensor:
    """Where the highest scores of each sequence are, `tokens` of them or all that are finite; among nearly equal ones the leftmost first."""
    chosen_RL = torch.zeros_like(score_RL, dtype=torch.bool)
    for _ in range(min(tokens, score_RL.shape[1])):
        rest_RL = score_RL.masked_fill(chosen_RL, -torch.inf)
        best_RL = rest_RL.isfinite() & (rest_RL >= rest_RL.amax(-1, keepdim=True) - TIE)
        chosen_RL |= best_RL & (best_RL.cumsum(-1) == 1)
    return chosen_RL
