"""Denoisers that are tables over every noisy state of a tiny world, and the comparison of samples with a computed law.

Shape suffixes: M noisy states, L positions, K all ids (the last one is the mask), B sequences.
"""

from collections.abc import Callable
from itertools import product
from math import exp

import numpy as np
import torch
from scipy.stats import chisquare
from torch import Tensor

from pretrain.hf_model.attention_patterns import KeyValueCache
from pretrain.hf_model.configuration_network import NetworkConfig
from pretrain.hf_model.modeling_network import build_network
from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.hf_model.sampling_draw import TokenLaw
from pretrain.hf_model.sampling_network import Request, Watch

Table = Callable[[float], np.ndarray]
"""alpha -> log p [M, L, K], with the states in the order of `itertools.product`."""


class TableDenoiser:
    """Looks every state up in the table of the alpha that it is told; remembers what it was asked."""

    def __init__(self, table: Table, classes: int, length: int) -> None:
        self.classes, self.length = classes, length
        self.sequences_read, self.rows_of_logits = 0, [0]
        self.seen: list[NetworkInput] = []
        self._table, self._known = table, dict[float, Tensor]()

    def features(self, inputs: NetworkInput, cache: KeyValueCache | None = None) -> Tensor:
        assert inputs.ids_BL is not None and inputs.ids_BL.shape[1] == self.length and inputs.attention is Attention.FULL
        self.seen.append(inputs)
        self.sequences_read += len(inputs.ids_BL)
        place = torch.tensor([self.classes**i for i in reversed(range(self.length))])
        state_B, sigma_B = (inputs.ids_BL * place).sum(-1), inputs.conditioning_B
        features_BLK = torch.empty(*inputs.ids_BL.shape, self.classes, dtype=torch.float64)
        for sigma in sigma_B.unique().tolist():
            if sigma not in self._known:
                self._known[sigma] = torch.from_numpy(self._table(exp(-sigma)))
            features_BLK[sigma_B == sigma] = self._known[sigma][state_B[sigma_B == sigma]]
        return features_BLK

    def logits(self, features: Tensor) -> Tensor:
        self.rows_of_logits.append(len(features))
        return features


def random_logits(classes: int, length: int, seed: int, scale: float = 1.5) -> np.ndarray:
    """[M, L, K]: a denoiser without sense, another row for each state; the mask gets a large logit that samplers must ignore."""
    logits_MLK = scale * np.random.default_rng(seed).normal(size=(classes**length, length, classes))
    logits_MLK[..., -1] = 9.0
    return logits_MLK


def probabilities(logits_K: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """[K], without the mask."""
    weight_K = np.exp((logits_K[:-1] - logits_K[:-1].max()) / temperature)
    return np.append(weight_K / weight_K.sum(), 0.0)


def index(state: tuple[int, ...], classes: int) -> int:
    """Where a state stands in the order of `itertools.product`."""
    number = 0
    for token in state:
        number = number * classes + token
    return number


def p_value(ids_BL: Tensor, law: np.ndarray, classes: int) -> float:
    """Chi-square of samples against the probability of every state [M]; 0 when a state of probability 0 occurs."""
    counts_M = np.bincount([index(tuple(row), classes) for row in ids_BL.tolist()], minlength=len(law))
    possible_M = law > 1e-12
    if counts_M[~possible_M].any():
        return 0.0
    if possible_M.sum() == 1:
        return 1.0
    return float(chisquare(counts_M[possible_M], len(ids_BL) * law[possible_M] / law[possible_M].sum()).pvalue)


def all_states(classes: int, length: int) -> list[tuple[int, ...]]:
    """Every state, in order."""
    return list(product(range(classes), repeat=length))


def request(
    names: Tensor | int,
    classes: int,
    *,
    seed: int = 1,
    progress: Callable[[int], object] = lambda tokens: None,
    watch: Watch | None = None,
    **law: float,
) -> Request:
    sequences_B = torch.arange(names) if isinstance(names, int) else names
    shape = TokenLaw(mask_id=classes - 1, **law)  # type: ignore[arg-type]
    return Request(law=shape, vocab_size=classes, seed=seed, sequences_B=sequences_B, progress=progress, watch=watch)


def real_network(kind: str, vocab_size: int = 11) -> torch.nn.Module:
    """A small network whose every weight matters; its time and its head's bias do not drown its input."""
    network = build_network(NetworkConfig(kind=kind, vocab_size=vocab_size, hidden=16, layers=2, heads=2, kv_heads=2, ffn=32, cond_dim=8))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            small = "final_modulation" in name or name == "lm_head.bias"
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.06 if small else 0.4))
    return network
