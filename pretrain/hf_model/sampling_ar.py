"""Autoregressive sampling with a key/value cache.

Shape suffixes: B sequences, L positions, P positions of the prompt, D features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .network_input import Attention, NetworkInput
from .sampling_network import BLANK, CausalDenoiser, Request
from .sampling_noise import uniforms


@torch.no_grad()
def sample_ar(network: CausalDenoiser, prompt_BP: Tensor, length: int, request: Request) -> tuple[Tensor, Tensor]:
    """Continue each prompt by `length` tokens.

    Returns ids [B, P + length] and the network evaluations that each sequence took [B]. Raises ValueError for an empty prompt.
    """
    batch, prompt = prompt_BP.shape
    if prompt == 0:
        raise ValueError("autoregressive sampling needs at least one token to start from")
    device = prompt_BP.device
    uniform_BL, _ = uniforms(request.seed, request.sequences_B.to(device), 0, torch.arange(length, device=device))
    ids_BL = torch.cat((prompt_BP, prompt_BP.new_zeros(batch, length)), dim=1)
    cache = network.new_cache(batch, prompt + length)
    start = 0
    for end in range(prompt, prompt + length):
        inputs = NetworkInput(
            ids_BL=ids_BL[:, start:end],
            positions_BL=torch.arange(start, end, device=device).expand(batch, -1),
            conditioning_B=torch.zeros(batch, device=device),
            attention=Attention.CAUSAL,
        )
        features_BD = network.features(inputs, cache)[:, -1]
        ids_BL[:, end] = request.law.draw(network.logits(features_BD), uniform_BL[:, end - prompt])
        start = end
        request.progress(batch)
        if request.watch is not None:
            request.show(F.pad(ids_BL[:, : end + 1], (0, prompt + length - end - 1), value=BLANK))
    request.check(ids_BL)
    return ids_BL, torch.full((batch,), length, device=device)
