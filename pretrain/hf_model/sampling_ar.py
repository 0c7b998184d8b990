"""Autoregressive sampling with a key/value cache.

Prompts of a batch may differ in length. The first evaluation reads all of them, as wide as the longest; then the cache of each sequence goes on
from its own prompt, and what was read beyond it is forgotten. Sequences with more to draw come first, so that those that are full leave the
cache at its end.

Shape suffixes: B sequences, R sequences that are not full, L positions, P positions of the prompt, Q positions of an evaluation, D features.
"""

import torch
from torch import Tensor

from .attention_patterns import KeyValueCache
from .network_input import Attention, NetworkInput
from .sampling_network import BLANK, CausalDenoiser, Request, after_end
from .sampling_noise import uniforms


def sample_ar(network: CausalDenoiser, prompt_BP: Tensor, length: int, request: Request) -> tuple[Tensor, Tensor]:
    """Continue each prompt by `length` tokens. Results as in `continue_texts`."""
    return continue_texts(network, torch.cat((prompt_BP, prompt_BP.new_full((len(prompt_BP), length), BLANK)), dim=1), request)


@torch.no_grad()
def continue_texts(network: CausalDenoiser, canvas_BL: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Fill the BLANKs of canvas_BL, which come last in each sequence, as many as there are.

    Returns ids [B, L] and the network evaluations that each sequence took [B]. Raises ValueError for an empty prompt and for blanks elsewhere.
    """
    (batch, length), device = canvas_BL.shape, canvas_BL.device
    blank_BL = canvas_BL == BLANK
    known_B = (length - blank_BL.sum(-1)).cpu()
    if bool((known_B == 0).any()):
        raise ValueError("autoregressive sampling needs at least one token to start from")
    if bool((blank_BL.long().diff(dim=-1) < 0).any()):
        raise ValueError("an autoregressive model continues a text: its blanks come last")
    known_B, rank_B = known_B.sort(stable=True)
    rank = rank_B.to(device)
    ids_BL = canvas_BL.masked_fill(blank_BL, 0)[rank]
    uniform_BL = uniforms(request.seed, request.sequences_B.to(device)[rank], 0, torch.arange(length, device=device))[0]
    evaluations_B = torch.zeros(batch, dtype=torch.long, device=device)
    open_B = torch.ones(batch, dtype=torch.bool, device=device)
    cache = network.new_cache(int((known_B < length).sum()), length)
    for turn in range(length - int(known_B[0])):
        running = int((known_B + turn < length).sum())
        drawing = running if request.end is None else int(open_B[:running].sum())  # asks a device only where that can change
        if not drawing:
            break
        place_R = (known_B[:running] + turn).to(device)
        features_RD = _last_features(network, cache, ids_BL, known_B[:running], turn)
        token_R = request.law.draw(network.logits(features_RD), uniform_BL[:running, turn])
        evaluations_B[:running] += open_B[:running]
        request.progress(drawing)
        ids_BL[torch.arange(running, device=device), place_R] = torch.where(open_B[:running], token_R, request.end or 0)
        if request.end is not None:
            open_B[:running] &= token_R != request.end
        if request.watch is not None:
            position_L = torch.arange(length, device=device)
            drawn_BL = (position_L <= (known_B.to(device) + turn)[:, None]).index_select(0, rank.argsort())
            request.show(torch.where(blank_BL & ~drawn_BL, BLANK, ids_BL[rank.argsort()]))
    back = rank.argsort()
    ids_BL, evaluations_B = ids_BL[back], evaluations_B[back]
    if request.end is not None:
        ids_BL = torch.where(after_end(ids_BL, blank_BL, request.end), request.end, ids_BL)
    request.check(ids_BL)
    return ids_BL, evaluations_B


def _last_features(network: CausalDenoiser, cache: KeyValueCache, ids_BL: Tensor, known_R: Tensor, turn: int) -> Tensor:
    """Features [R, D] of the newest known token of each sequence: of the prompt's last in turn 0, of the token drawn last after that."""
    device, running = ids_BL.device, len(known_R)
    if turn:
        cache.rewind(known_R + turn - 1)
        index_RQ = (known_R + turn - 1)[:, None].to(device)
    else:
        index_RQ = torch.arange(int(known_R.max()), device=device).expand(running, -1)
    inputs = NetworkInput(
        ids_BL=ids_BL[:running].gather(1, index_RQ),
        positions_BL=index_RQ,
        conditioning_B=torch.zeros(running, device=device),
        attention=Attention.CAUSAL,
    )
    features_RQD = network.features(inputs, cache)
    last_R = torch.zeros_like(known_R) if turn else known_R - 1
    return features_RQD[torch.arange(running, device=device), last_R.to(device)]
