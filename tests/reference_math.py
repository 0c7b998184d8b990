"""What every likelihood must equal, by enumeration: written from the papers in plain NumPy, sharing nothing with the product's code.

A toy is a joint distribution q over all V^L sequences, so small that every sequence, mask and order can be summed over and time
integrated by Gauss-Legendre quadrature. With the Bayes-optimal denoiser a valid negative evidence lower bound equals the entropy H(q)
to quadrature error; with any other denoiser it defines a (sub-)probability: sum_x exp(-nelbo(x)) <= 1.

The pieces are independent: a toy, a quadrature, a process (which noisy states there are and how probable each is), a denoiser (a table
from noisy state to logits), and the sum that a paper prescribes. A further method adds its process and its sum.

Shape suffixes: N sequences of the toy (V^L), M mask patterns (2^L), L positions, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

Denoiser = Callable[[tuple[int, ...]], np.ndarray]
"""Noisy sequence (with the mask id V at masked positions) -> log probabilities [L, V]."""


@dataclass(frozen=True)
class Toy:
    """q_N over sequences_NL; the mask is id V."""

    vocabulary: int
    length: int
    sequences_NL: np.ndarray
    q_N: np.ndarray

    @property
    def mask(self) -> int:
        return self.vocabulary

    @property
    def entropy(self) -> float:
        """H(q) in nats per sequence."""
        return float(-(self.q_N * np.log(self.q_N)).sum())


def random_toy(vocabulary: int, length: int, seed: int) -> Toy:
    """A joint distribution without structure: Dirichlet(1/2) over all sequences."""
    sequences_NL = np.array(list(product(range(vocabulary), repeat=length)))
    q_N = np.random.default_rng(seed).dirichlet(np.full(len(sequences_NL), 0.5))
    return Toy(vocabulary, length, sequences_NL, q_N)


def quadrature(low: float, high: float, nodes: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the *mean* over [low, high]; exact for polynomials up to degree 2 nodes - 1."""
    x, weight = np.polynomial.legendre.leggauss(nodes)
    return (high - low) / 2 * x + (high + low) / 2, weight / 2


def all_masks(length: int) -> np.ndarray:
    """[M, L]: every mask pattern."""
    return np.array(list(product((False, True), repeat=length)))


# ---- Absorbing process (MDLM): each position is masked independently --------------------------------------------------------------


def mask_probability(masks_ML: np.ndarray, noise: float) -> np.ndarray:
    """[M]: the chance of each pattern when a position is masked with probability `noise` = 1 - alpha_t."""
    masked_M = masks_ML.sum(1)
    return noise**masked_M * (1 - noise) ** (masks_ML.shape[1] - masked_M)


def apply_mask(toy: Toy, sequence_L: np.ndarray, mask_L: np.ndarray) -> tuple[int, ...]:
    """The noisy sequence, with id V at masked positions."""
    return tuple(int(toy.mask if hidden else token) for token, hidden in zip(sequence_L, mask_L, strict=True))


def bayes_denoiser(toy: Toy) -> Denoiser:
    """q(x^l = v | the unmasked part of z), by summing over the sequences that agree with it."""

    def log_probabilities(z: tuple[int, ...]) -> np.ndarray:
        z_L = np.array(z)
        agrees_N = ((z_L == toy.mask) | (toy.sequences_NL == z_L)).all(1)
        weight_N = np.where(agrees_N, toy.q_N, 0.0)
        table_LV = np.array([[weight_N[column_N == v].sum() for v in range(toy.vocabulary)] for column_N in toy.sequences_NL.T])
        with np.errstate(divide="ignore"):
            return np.log(table_LV / weight_N.sum())

    return log_probabilities


def random_denoiser(toy: Toy, seed: int, scale: float = 2.0) -> Denoiser:
    """Another table of normal logits for each noisy sequence: a denoiser that knows nothing."""

    def log_probabilities(z: tuple[int, ...]) -> np.ndarray:
        logits_LV = scale * np.random.default_rng((seed, *z)).normal(size=(toy.length, toy.vocabulary))
        return logits_LV - np.log(np.exp(logits_LV).sum(1, keepdims=True))

    return log_probabilities


def masked_bound(toy: Toy, denoiser: Denoiser, *, eps: float, t_min: float, weighted: bool = True) -> np.ndarray:
    """[N]: E_t E_z sum over masked l of w(t) * -log p^l(x^l | z), t uniform on [t_min, 1], 1 - alpha_t = (1 - eps) t.

    w(t) = -alpha'_t / (1 - alpha_t) from the definition of the process; 1 with `weighted` off (the low-variance form, no likelihood).
    """
    masks_ML = all_masks(toy.length)
    nats_NM = np.zeros((len(toy.sequences_NL), len(masks_ML)))
    for n, sequence_L in enumerate(toy.sequences_NL):
        for m, mask_L in enumerate(masks_ML):
            logp_LV = denoiser(apply_mask(toy, sequence_L, mask_L))
            nats_NM[n, m] = -logp_LV[mask_L, sequence_L[mask_L]].sum()
    total_N = np.zeros(len(toy.sequences_NL))
    for t, share in zip(*quadrature(t_min, 1.0), strict=True):
        noise = (1 - eps) * t
        weight = (1 - eps) / noise if weighted else 1.0
        total_N += share * weight * (nats_NM @ mask_probability(masks_ML, noise))
    return total_N


# ---- Autoregression ---------------------------------------------------------------------------------------------------------------


def bayes_next_token(toy: Toy, prefix: tuple[int, ...]) -> np.ndarray:
    """[V]: log q(x_i = v | x_<i = prefix)."""
    agrees_N = (toy.sequences_NL[:, : len(prefix)] == np.array(prefix, dtype=int)).all(1)
    weight_N = np.where(agrees_N, toy.q_N, 0.0)
    table_V = np.array([weight_N[toy.sequences_NL[:, len(prefix)] == v].sum() for v in range(toy.vocabulary)])
    return np.log(table_V / weight_N.sum())
