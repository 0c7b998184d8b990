"""Duo from the papers, in plain NumPy: the uniform-state process by enumeration, its bound, its reverse step, and its Gaussian twin in full.

Nothing here is arranged for speed or for small numbers; float64 and moderate alphas are enough.

Shape suffixes: N sequences of a toy, M noisy states (K^L), L positions, K all ids (the toy's, then the mask), S draws.
"""

from itertools import pairwise, product

import numpy as np
from scipy import integrate, special

from tests.reference_math import Toy, quadrature


def nats(p_K: np.ndarray, i: int, m: int, alpha: float, slope: float) -> float:
    """The Rao-Blackwellised integrand of one token, i = z_t, m = x, term by term as the authors' code has it (slope = alpha'_t < 0)."""
    classes, noise = len(p_K), 1 - alpha
    xbar_K = classes * alpha * p_K + noise
    kappa, same = noise / (classes * alpha + noise), i == m
    log_ratios = (np.log(xbar_K[i]) - np.log(xbar_K)).sum()
    bracket = classes / (noise + classes * alpha * same) - classes / xbar_K[i] - (kappa if same else 1) * log_ratios
    if not same:
        bracket -= classes * alpha / noise * np.log(xbar_K[i] / xbar_K[m])
    bracket -= ((classes - 1) * kappa if same else -1 / kappa) * np.log(kappa)
    return slope / (classes * alpha) * bracket


def kernel(classes: int, kept: float) -> np.ndarray:
    """[K, K]: row-stochastic chance of going from one id to another when a token is kept with this probability."""
    return kept * np.eye(classes) + (1 - kept) / classes


def reverse_step(p_K: np.ndarray, z: int, alpha_t: float, alpha_s: float) -> np.ndarray:
    """[K]: Bayes' rule for z_s, with prior p and both forward kernels."""
    weight_K = (p_K @ kernel(len(p_K), alpha_s)) * kernel(len(p_K), alpha_t / alpha_s)[:, z]
    return weight_K / weight_K.sum()


def nats_from_reverse_steps(p_K: np.ndarray, i: int, m: int, alpha: float, slope: float, dt: float = 1e-5) -> float:
    """KL(q(z_s | z_t, x) || q(z_s | z_t, p)) per unit of time for s = t - dt: what the integrand is the limit of."""
    q_K, r_K = (reverse_step(law_K, i, alpha, alpha - slope * dt) for law_K in (np.eye(len(p_K))[m], p_K))
    return float((q_K * np.log(q_K / r_K)).sum() / dt)


# ---- The process on a toy ---------------------------------------------------------------------------------------------------------


def states(toy: Toy) -> np.ndarray:
    """[M, L]: every noisy state; the mask is an id like any other."""
    return np.array(list(product(range(toy.vocabulary + 1), repeat=toy.length)))


def state_probability(toy: Toy, states_ML: np.ndarray, alpha: float) -> np.ndarray:
    """[N, M]: q(z_t | x)."""
    return kernel(toy.vocabulary + 1, alpha)[toy.sequences_NL[:, None], states_ML[None]].prod(-1)


def leave_one_out(toy: Toy, states_ML: np.ndarray, alpha: float) -> np.ndarray:
    """[M, L, K]: log q(x^l | z_t at the other positions). With it the reverse step is exact; q(x^l | z_t) would count z_t^l twice."""
    each_NML = kernel(toy.vocabulary + 1, alpha)[toy.sequences_NL[:, None], states_ML[None]]
    table_MLK = np.zeros((*states_ML.shape, toy.vocabulary + 1))
    for position in range(toy.length):
        weight_NM = toy.q_N[:, None] * np.delete(each_NML, position, axis=2).prod(-1)
        for token in range(toy.vocabulary):
            table_MLK[:, position, token] = weight_NM[toy.sequences_NL[:, position] == token].sum(0)
    with np.errstate(divide="ignore"):
        return np.log(table_MLK / table_MLK.sum(-1, keepdims=True))


def random_table(toy: Toy, states_ML: np.ndarray, seed: int) -> np.ndarray:
    """[M, L, K]: log probabilities that know nothing, another row for each state; the mask has none."""
    logits_MLK = 2 * np.random.default_rng(seed).normal(size=(*states_ML.shape, toy.vocabulary + 1))
    logits_MLK[..., -1] = -np.inf
    return logits_MLK - np.log(np.exp(logits_MLK).sum(-1, keepdims=True))


def smooth_quadrature(low: float, high: float, nodes: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the integral over [low, high] where the integrand has logarithms at the ends: u -> u^3 (10 - 15 u + 6 u^2)."""
    u, weight = quadrature(0.0, 1.0, nodes)
    return low + (high - low) * u**3 * (10 - 15 * u + 6 * u**2), (high - low) * weight * 30 * u**2 * (1 - u) ** 2


# ---- The Gaussian twin ------------------------------------------------------------------------------------------------------------


def duality(classes: int, gamma: float) -> tuple[float, float]:
    """T(gamma) and dT / d gamma, by adaptive quadrature of the two integrals as they are defined."""
    mu = np.exp(-gamma / 2)

    def win(u: float) -> float:
        return float(np.exp(-((u - mu) ** 2) / 2 + (classes - 1) * special.log_ndtr(u)) / np.sqrt(2 * np.pi))

    def integral(power: int) -> float:
        edges = np.linspace(mu - 12, mu + 12, 25)
        parts = [integrate.quad(lambda u: (u - mu) ** power * win(u), a, b, epsabs=1e-15, epsrel=1e-13)[0] for a, b in pairwise(edges)]
        return float(np.sum(parts))

    share = classes / (classes - 1)
    return share * (integral(0) - 1 / classes), -share * integral(1) * mu / 2


def dense_draw(classes: int, token: int, gamma: float, draws: int, seed: int) -> np.ndarray:
    """w [S, K]: signal on the token, noise on every id."""
    w_SK = np.sqrt(special.expit(gamma)) * np.random.default_rng(seed).normal(size=(draws, classes))
    w_SK[:, token] += np.sqrt(special.expit(-gamma))
    return w_SK
