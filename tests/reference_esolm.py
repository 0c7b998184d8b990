"""Eso-LM by enumeration, written from the paper in plain NumPy: which orders there are, what a mask sees in each, and the sums over them.

What a mask sees is a tuple of (position, id) pairs in the order of generation; its own pair, with the mask id, comes last. A denoiser
answers with the log probabilities of that position's token.

Shape suffixes: N sequences of the toy, M mask patterns, L positions, V vocabulary.
"""

from collections.abc import Callable
from itertools import permutations, product
from math import comb, factorial

import numpy as np

from tests.reference_math import Toy, all_masks, mask_probability, quadrature

Order = tuple[int, ...]
Seen = tuple[tuple[int, int], ...]
CausalDenoiser = Callable[[Seen], np.ndarray]
"""What a mask sees -> log probabilities [V] of its token."""


def bayes_causal(toy: Toy) -> CausalDenoiser:
    """q(token at the mask's position | the tokens it sees). Other masks, and the order, tell nothing."""

    def log_probabilities(seen: Seen) -> np.ndarray:
        agrees_N = np.ones(len(toy.q_N), dtype=bool)
        for position, token in seen:
            if token != toy.mask:
                agrees_N &= toy.sequences_NL[:, position] == token
        weight_N = np.where(agrees_N, toy.q_N, 0.0)
        here_N = toy.sequences_NL[:, seen[-1][0]]
        with np.errstate(divide="ignore"):
            return np.log(np.array([weight_N[here_N == v].sum() for v in range(toy.vocabulary)]) / weight_N.sum())

    return log_probabilities


def random_causal(toy: Toy, seed: int, scale: float = 2.0) -> CausalDenoiser:
    """Other normal logits for everything that can be seen: earlier masks and the order of tokens included, as a causal network may do."""

    def log_probabilities(seen: Seen) -> np.ndarray:
        logits_V = scale * np.random.default_rng((seed, *(number for pair in seen for number in pair))).normal(size=toy.vocabulary)
        return logits_V - np.log(np.exp(logits_V).sum())

    return log_probabilities


def diffusion_orders(mask_L: np.ndarray) -> list[Order]:
    """Clean tokens in any order, then masks in any order; all equally likely."""
    clean, masks = np.flatnonzero(~mask_L).tolist(), np.flatnonzero(mask_L).tolist()
    return [a + b for a, b in product(permutations(clean), permutations(masks))]


def sequential_orders(mask_L: np.ndarray) -> list[Order]:
    """Clean tokens in any order, all equally likely, then masks from left to right."""
    masks = tuple(np.flatnonzero(mask_L).tolist())
    return [a + masks for a in permutations(np.flatnonzero(~mask_L).tolist())]


def any_order_probabilities(length: int, alpha_0: float) -> dict[Order, float]:
    """Of each order of all tokens: n ~ Binomial(length, alpha_0) of them in random order, then the rest from left to right."""
    chances = {}
    for order in permutations(range(length)):
        chances[order] = sum(
            comb(length, n) * alpha_0**n * (1 - alpha_0) ** (length - n) * factorial(length - n) / factorial(length)
            for n in range(length + 1)
            if list(order[n:]) == sorted(order[n:])
        )
    return chances


def diffusion_term(toy: Toy, denoiser: CausalDenoiser, alpha_0: float, *, eps: float, t_min: float, weighted: bool = True) -> np.ndarray:
    """[N]: E_t E_{z_t} E_order of -alpha'_t / (1 - alpha_t) times the masks' cross-entropies; a mask sees everything before it."""
    masks_ML = all_masks(toy.length)
    nats_NM = np.zeros((len(toy.q_N), len(masks_ML)))
    for n, sequence_L in enumerate(toy.sequences_NL.tolist()):
        for m, mask_L in enumerate(masks_ML):
            orders = diffusion_orders(mask_L)
            for order in orders:
                z = tuple((i, toy.mask if mask_L[i] else sequence_L[i]) for i in order)
                nats_NM[n, m] -= sum(denoiser(z[: k + 1])[sequence_L[i]] for k, i in enumerate(order) if mask_L[i]) / len(orders)
    total_N = np.zeros(len(toy.q_N))
    for t, share in zip(*quadrature(t_min, 1.0), strict=True):
        alpha = alpha_0 * (1 - (1 - eps) * t)
        weight = alpha_0 * (1 - eps) / (1 - alpha) if weighted else 1.0
        total_N += share * weight * (nats_NM @ mask_probability(masks_ML, 1 - alpha))
    return total_N


def sequential_term(toy: Toy, denoiser: CausalDenoiser, alpha_0: float) -> np.ndarray:
    """[N]: E_{z_0} E_order of the masks' cross-entropies; a mask sees the tokens before it, those of earlier masks filled in."""
    masks_ML = all_masks(toy.length)
    total_N = np.zeros(len(toy.q_N))
    for mask_L, chance in zip(masks_ML, mask_probability(masks_ML, 1 - alpha_0), strict=True):
        orders = sequential_orders(mask_L)
        for order in orders:
            scored = [k for k, i in enumerate(order) if mask_L[i]]
            total_N += chance / len(orders) * order_nats(toy, denoiser, order)[:, scored].sum(1)
    return total_N


def order_nats(toy: Toy, denoiser: CausalDenoiser, order: Order) -> np.ndarray:
    """[N, L]: -log p of each token given those before it in the order."""
    nats_NL = np.zeros(toy.sequences_NL.shape)
    for n, sequence_L in enumerate(toy.sequences_NL.tolist()):
        for k, i in enumerate(order):
            seen = (*((j, sequence_L[j]) for j in order[:k]), (i, toy.mask))
            nats_NL[n, k] = -denoiser(seen)[sequence_L[i]]
    return nats_NL


def importance_bound(nats_ON: np.ndarray, chance_O: np.ndarray, draws: int) -> np.ndarray:
    """[N]: E over `draws` independent orders of -log of their mean likelihood, every combination counted."""
    total_N = np.zeros(nats_ON.shape[1])
    for drawn in product(range(len(chance_O)), repeat=draws):
        total_N -= np.prod(chance_O[list(drawn)]) * np.log(np.exp(-nats_ON[list(drawn)]).mean(0))
    return total_N
