"""Masked diffusion over digits by enumeration, in plain NumPy: every mask of every sequence's digits, integrated over t.

`digits_VJ` is any code: a table with a different string of digits for each id. Two sums over a state are written down: the NELBO that
the definition of the process gives (each masked digit from its marginal), and the one of the paper's equation 5 (each token, jointly).

Shape suffixes: N sequences of the toy, M masks (2^(L J)), L positions, J digits, V ids.
"""

from dataclasses import dataclass

import numpy as np

from tests.reference_math import Toy, all_masks, mask_probability, quadrature


@dataclass(frozen=True)
class States:
    """Every noisy state: sequence n with the digits masks_MLJ[m] masked."""

    toy: Toy
    digits_VJ: np.ndarray
    masks_MLJ: np.ndarray

    @property
    def own_NLJ(self) -> np.ndarray:
        """The digits of each sequence."""
        return self.digits_VJ[self.toy.sequences_NL]

    @property
    def possible_MNLV(self) -> np.ndarray:
        """Ids that agree with the visible digits of their position."""
        equal_NLVJ = self.own_NLJ[:, :, None] == self.digits_VJ
        return (equal_NLVJ | self.masks_MLJ[:, None, :, None]).all(-1)


def states(toy: Toy, digits_VJ: np.ndarray) -> States:
    """All of them."""
    digits = digits_VJ.shape[1]
    return States(toy, digits_VJ, all_masks(toy.length * digits).reshape(-1, toy.length, digits))


def bayes(given: States) -> np.ndarray:
    """[M, N, L, V]: q(x^l = v | visible digits), by summing over the sequences that agree with all of them."""
    toy = given.toy
    equal_NN = given.own_NLJ[:, None] == given.own_NLJ[None]
    weight_MNN = np.where((equal_NN | given.masks_MLJ[:, None, None]).all((-1, -2)), toy.q_N, 0.0)
    one_hot_NLV = (toy.sequences_NL[:, :, None] == np.arange(toy.vocabulary)).astype(float)
    return np.einsum("mnk,klv->mnlv", weight_MNN / weight_MNN.sum(-1, keepdims=True), one_hot_NLV)


def random_denoiser(given: States, seed: int, *, carry_over: bool, scale: float = 2.0) -> np.ndarray:
    """[M, N, L, V]: a table of normal logits for each noisy state (states that look alike must get the same), normalised."""
    generator = np.random.default_rng(seed)
    tables: dict[bytes, np.ndarray] = {}
    shape = (given.toy.length, given.toy.vocabulary)
    weights = np.empty((len(given.masks_MLJ), len(given.own_NLJ), *shape))
    for m, mask_LJ in enumerate(given.masks_MLJ):
        for n, own_LJ in enumerate(given.own_NLJ):
            seen = np.where(mask_LJ, -1, own_LJ).tobytes()
            if seen not in tables:
                tables[seen] = np.exp(scale * generator.normal(size=shape))
            weights[m, n] = tables[seen]
    weights = np.where(given.possible_MNLV, weights, 0.0) if carry_over else weights
    return weights / weights.sum(-1, keepdims=True)


def marginal_nats(given: States, p_MNLV: np.ndarray) -> np.ndarray:
    """[M, N]: sum over masked digits of -log of the probability that the ids with the true digit hold together."""
    equal_NLVJ = (given.own_NLJ[:, :, None] == given.digits_VJ).astype(float)
    held_MNLJ = np.einsum("mnlv,nlvj->mnlj", p_MNLV, equal_NLVJ)
    return -np.where(given.masks_MLJ[:, None], np.log(held_MNLJ), 0.0).sum((-1, -2))


def joint_nats(given: States, p_MNLV: np.ndarray) -> np.ndarray:
    """[M, N]: sum over tokens with a masked digit of -log of the token's probability."""
    true_MNL = np.take_along_axis(p_MNLV, given.toy.sequences_NL[None, :, :, None], -1)[..., 0]
    return -np.where(given.masks_MLJ.any(-1)[:, None], np.log(true_MNL), 0.0).sum(-1)


def integrate(given: States, nats_MN: np.ndarray, *, eps: float = 0.0, t_min: float = 0.0) -> np.ndarray:
    """[N]: the mean over t in [t_min, 1] of the expectation over masks of nats, weighted as the process' definition says."""
    flat_MK = given.masks_MLJ.reshape(len(given.masks_MLJ), -1)
    total_N = np.zeros(nats_MN.shape[1])
    for t, share in zip(*quadrature(t_min, 1.0), strict=True):
        noise = (1 - eps) * t
        total_N += share * (1 - eps) / noise * (mask_probability(flat_MK, noise) @ nats_MN)
    return total_N


def sparse_toy(vocabulary: int, length: int, q: dict[tuple[int, ...], float]) -> Toy:
    """A toy that only ever shows the given sequences."""
    return Toy(vocabulary, length, np.array(list(q)), np.array(list(q.values())))
