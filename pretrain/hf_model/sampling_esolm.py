"""Sampling from Eso-LM (Sahoo et al. 2025, arXiv 2506.01928) with one exact key/value cache through diffusion and the sequential phase.

The order of generation is fixed beforehand (`sampling_esolm_orders`), and attention is causal in that order. So a turn asks about a window of
it: the tokens that the previous turn revealed, whose keys and values join the cache now that they are known, followed by the masks that
are to be revealed now. Those see the cache, the new tokens and the masks before them, as in training; their own keys and values are
forgotten. A diffusion turn asks about as many positions as two turns reveal, a sequential turn about two, and in exact arithmetic every
logit is that of the whole sequence so far without a cache.

Sequences of a batch reveal different numbers of tokens. The windows of a turn are as wide as the widest: what follows in a sequence's order
is masks, which nothing before them sees, and a window that would pass the end starts earlier, on positions that are computed again.

Shape suffixes: B sequences, R sequences that are not finished, L positions in the order of generation, Q positions of a window, N positions
drawn in a turn, D features, T turns of the longest sequence and one.
"""

import torch
from torch import Tensor

from .network_input import Attention, NetworkInput
from .sampling_esolm_orders import BlockOrder, GivenOrder, Reveals, ancestral_reveals, block_reveals, left_to_right_reveals, position_noise
from .sampling_network import CausalDenoiser, Request, after_end, blanks, draw_tokens


def sample_esolm(
    network: CausalDenoiser, ids_BL: Tensor, steps: int, request: Request, *, alpha_0: float = 1.0, given: GivenOrder = "natural"
) -> tuple[Tensor, Tensor]:
    """Fill every mask of ids_BL: an expected share alpha_0 of them in `steps` steps of diffusion, the others one by one from left to right.

    alpha_0 need not be that of training. Returns ids [B, L] and the network evaluations that each sequence took [B]. Raises ValueError for
    steps below 1, alpha_0 outside [0, 1], an order that does not exist, and a law without a mask id.
    """
    return _generate(network, ids_BL, ancestral_reveals(ids_BL, steps, request, alpha_0=alpha_0, given=given), request)


def sample_esolm_block(
    network: CausalDenoiser, ids_BL: Tensor, steps: int, request: Request, *, order: BlockOrder = "natural", given: GivenOrder = "natural"
) -> tuple[Tensor, Tensor]:
    """Fill every mask in `steps` turns that each reveal positions far apart: masks number s, s + steps, s + 2 steps, ... in turn s.

    Results as in `sample_esolm`.
    """
    return _generate(network, ids_BL, block_reveals(ids_BL, steps, request, order=order, given=given), request)


def sample_esolm_block_autoregressive(
    network: CausalDenoiser,
    ids_BL: Tensor,
    steps: int,
    request: Request,
    *,
    segments: int,
    order: BlockOrder = "natural",
    given: GivenOrder = "natural",
) -> tuple[Tensor, Tensor]:
    """`sample_esolm_block` on one of `segments` runs of masks after another, with the first step of each taken one mask at a time.

    Results as in `sample_esolm`.
    """
    reveals = block_reveals(ids_BL, steps, request, order=order, segments=segments, anchors=True, given=given)
    return _generate(network, ids_BL, reveals, request)


def sample_esolm_left_to_right(network: CausalDenoiser, ids_BL: Tensor, request: Request, *, given: GivenOrder = "natural") -> tuple[Tensor, Tensor]:
    """Fill every mask one by one from left to right, until the request's `end`. Results as in `sample_esolm`."""
    return _generate(network, ids_BL, left_to_right_reveals(ids_BL, request, given=given), request, end=request.end)


@torch.no_grad()
def _generate(network: CausalDenoiser, ids_BL: Tensor, reveals: Reveals, request: Request, *, end: int | None = None) -> tuple[Tensor, Tensor]:
    """Carry out a plan; with `end`, whose turns reveal one token each from left to right, until every sequence has drawn it."""
    (batch, length), device = ids_BL.shape, ids_BL.device
    # Those with more turns first: whoever is not finished is then at the head of the cache.
    turns_B, rank_B = reveals.turns_B.sort(descending=True, stable=True)
    known_BT, rank = reveals.known_BT[rank_B], rank_B.to(device)
    order_BL = reveals.order_BL[rank]
    tokens_BL = ids_BL[rank].gather(1, order_BL)
    uniform_BL = position_noise(ids_BL, request)[1][rank].gather(1, order_BL)
    cache = network.new_cache(batch, length)
    open_B, evaluations_B = torch.ones(batch, dtype=torch.bool, device=device), torch.zeros(batch, dtype=torch.long, device=device)
    for turn in range(int(turns_B.max())):
        running = int((turns_B > turn).sum())
        if end is not None and not bool(open_B[:running].any()):
            break
        evaluations_B[:running] += open_B[:running]
        index_RQ, drawn_RQ = _windows(known_BT[:running], turn, length)
        cache.rewind(index_RQ[:, 0])
        row_N, column_N = drawn_RQ.nonzero(as_tuple=True)
        place_N = index_RQ[row_N, column_N].to(device)
        row_N, column_N, index_RQ = row_N.to(device), column_N.to(device), index_RQ.to(device)
        inputs = NetworkInput(
            ids_BL=tokens_BL[:running].gather(1, index_RQ),
            positions_BL=order_BL[:running].gather(1, index_RQ),
            conditioning_B=torch.zeros(running, device=device),
            attention=Attention.CAUSAL,
        )
        features_ND = network.features(inputs, cache)[row_N, column_N]
        tokens_BL[row_N, place_N] = draw_tokens(network, features_ND, uniform_BL[row_N, place_N], request)
        request.progress(len(row_N))
        if end is not None:
            open_B[row_N] &= tokens_BL[row_N, place_N] != end
        if request.watch is not None:
            request.show(_in_place(tokens_BL, order_BL, rank))
    result_BL = _in_place(tokens_BL, order_BL, rank)
    if end is not None:
        result_BL = result_BL.masked_fill(after_end(result_BL, blanks(ids_BL, request.law), end), end)
    request.check(result_BL)
    return result_BL, evaluations_B[rank.argsort()]


def _in_place(tokens_BL: Tensor, order_BL: Tensor, rank_B: Tensor) -> Tensor:
    """Tokens in the order of generation, in rows sorted by `rank_B`, to where and in which sequence they belong."""
    result_BL = torch.empty_like(tokens_BL)
    result_BL[rank_B] = torch.empty_like(tokens_BL).scatter_(1, order_BL, tokens_BL)
    return result_BL


def _windows(known_RT: Tensor, turn: int, length: int) -> tuple[Tensor, Tensor]:
    """The places [R, Q] in the order of generation that a turn asks about, and which of them it draws [R, Q]; on the CPU.

    A window begins with what was not known a turn ago, all of what is given in turn 0, or earlier where it would pass the end.
    """
    known_R, after_R = known_RT[:, turn], known_RT[:, turn + 1]
    cached_R = known_RT[:, turn - 1] if turn else torch.zeros_like(known_R)
    width = int((after_R - cached_R).max())
    index_RQ = cached_R.clamp(max=length - width)[:, None] + torch.arange(width)
    return index_RQ, (index_RQ >= known_R[:, None]) & (index_RQ < after_R[:, None])
