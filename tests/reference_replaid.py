"""RePlaid from the papers, for tests: exact posteriors by enumeration and quadrature (NumPy), and the loss in plain float64 autograd.

Nothing here comes from the product's code. A noisy state is z = alpha e + sigma n with alpha^2 = 1 / (1 + e^gamma), sigma^2 = 1 - alpha^2.

Shape suffixes: N sequences of a toy, M quadrature nodes, L positions, E width of an embedding, V vocabulary, B sequences of a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.reference_math import Toy


def unit_vectors(count: int, width: int) -> np.ndarray:
    """[V, E]: distinct vectors of length 1; the ends of an interval, or unequally spaced points on a circle."""
    if width == 1:
        assert count == 2
        return np.array([[1.0], [-1.0]])
    angle_V = 2 * np.pi * (np.arange(count) / count) ** 1.3
    return np.stack([np.cos(angle_V), np.sin(angle_V)], 1)


def normal_grid(dimensions: int, step: float, reach: float = 6.0) -> tuple[np.ndarray, np.ndarray]:
    """Nodes [M, dimensions] and weights [M] of the expectation under a standard normal: the trapezoid rule, exponentially exact."""
    line = np.arange(-reach, reach + step / 2, step)
    density = np.exp(-(line**2) / 2)
    nodes = np.stack(np.meshgrid(*[line] * dimensions, indexing="ij"), -1).reshape(-1, dimensions)
    weights = np.prod(np.stack(np.meshgrid(*[density] * dimensions, indexing="ij"), -1).reshape(-1, dimensions), 1)
    return nodes, weights / weights.sum()


def scales(gamma: float) -> tuple[float, float]:
    """alpha and sigma."""
    return (1 + np.exp(gamma)) ** -0.5, (1 + np.exp(-gamma)) ** -0.5


def log_joint(toy: Toy, table_VE: np.ndarray, z_MLE: np.ndarray, gamma: float) -> np.ndarray:
    """[M, N]: log q(x) + log q(z | x)."""
    a, s = scales(gamma)
    clean_NLE = table_VE[toy.sequences_NL]
    square_MN = ((z_MLE[:, None] - a * clean_NLE) ** 2).sum((2, 3))
    return np.log(toy.q_N) - square_MN / (2 * s**2) - z_MLE[0].size / 2 * np.log(2 * np.pi * s**2)


def log_marginals(toy: Toy, table_VE: np.ndarray, z_MLE: np.ndarray, gamma: float) -> np.ndarray:
    """[M, L, V]: log q(x^l = v | z), the Bayes-optimal denoiser."""
    joint_MN = log_joint(toy, table_VE, z_MLE, gamma)
    posterior_MN = np.exp(joint_MN - joint_MN.max(1, keepdims=True))
    posterior_MN /= posterior_MN.sum(1, keepdims=True)
    hot_NLV = np.eye(toy.vocabulary)[toy.sequences_NL]
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(np.einsum("mn,nlv->mlv", posterior_MN, hot_NLV)), -700.0)


def noisy(toy: Toy, table_VE: np.ndarray, nodes_MLE: np.ndarray, gamma: float) -> np.ndarray:
    """[N M, L, E]: every sequence with every noise."""
    a, s = scales(gamma)
    clean_NLE = table_VE[toy.sequences_NL]
    return (a * clean_NLE[:, None] + s * nodes_MLE).reshape(-1, *nodes_MLE.shape[1:])


def exact_bound(toy: Toy, table_VE: np.ndarray, nodes_MLE: np.ndarray, weights_M: np.ndarray, gamma_0: float, gamma_1: float) -> float:
    """E_q of the bound with the Bayes-optimal denoiser: H + total correlation of q(x | z_0) + KL(q(z_1) || N(0, I)).

    The diffusion term is I(x; z_0) - I(x; z_1) (I-MMSE), the prior term I(x; z_1) + KL(q(z_1) || N), and reconstruction sum_l H(x^l | z_0).
    """
    weight_B = (toy.q_N[:, None] * weights_M).reshape(-1)
    z_BLE = noisy(toy, table_VE, nodes_MLE, gamma_0)
    joint_BN = log_joint(toy, table_VE, z_BLE, gamma_0)
    own_B = joint_BN[np.arange(len(z_BLE)), np.repeat(np.arange(len(toy.q_N)), len(weights_M))]
    conditional_B = own_B - np.logaddexp.reduce(joint_BN, axis=1)
    ids_BL = np.repeat(toy.sequences_NL, len(weights_M), axis=0)
    separate_B = np.take_along_axis(log_marginals(toy, table_VE, z_BLE, gamma_0), ids_BL[..., None], 2).sum((1, 2))
    z_BLE = noisy(toy, table_VE, nodes_MLE, gamma_1)
    evidence_B = np.logaddexp.reduce(log_joint(toy, table_VE, z_BLE, gamma_1), axis=1)
    prior_B = -(z_BLE**2).sum((1, 2)) / 2 - z_BLE[0].size / 2 * np.log(2 * np.pi)
    return float(toy.entropy + weight_B @ (conditional_B - separate_B) + weight_B @ (evidence_B - prior_B))


def optimal_times(gamma: np.ndarray, moment: Callable[[float], float]) -> np.ndarray:
    """t(gamma) that minimises E[loss^2] on a fine grid of gamma: F(gamma) / F(gamma_1), F = ½∫ e^-u sqrt(moment(u)) du."""
    rate = np.array([0.5 * np.exp(-u) * np.sqrt(moment(u)) for u in gamma])
    total = np.concatenate(([0.0], np.cumsum((rate[1:] + rate[:-1]) / 2 * np.diff(gamma))))
    return total / total[-1]


# ---- The loss in plain autograd -----------------------------------------------------------------------------------------------------


@dataclass
class Parameters:
    """float64 leaves: embedding [V, E] (before normalisation), endpoints, and the three vectors of the monotone network."""

    embedding: Tensor
    gamma_0: Tensor
    gamma_1: Tensor
    slope: Tensor
    shift: Tensor
    height: Tensor

    def interior(self, t_B: Tensor) -> tuple[Tensor, Tensor]:
        """g and g': Plaid's network with its factor 0.01, and its derivative by autograd."""
        softplus = torch.nn.functional.softplus

        def raw(t: Tensor) -> Tensor:
            return (torch.tanh((t[:, None] - 0.5) * softplus(self.slope) + self.shift) * 0.01 * softplus(self.height)).sum(1)

        t_B = t_B.detach().clone().requires_grad_()
        ends = raw(torch.tensor([0.0, 1.0], dtype=torch.float64))
        g_B = (raw(t_B) - ends[0]) / (ends[1] - ends[0])
        return g_B, torch.autograd.grad(g_B.sum(), t_B, create_graph=True)[0]


@dataclass
class Entries:
    """One batch: ids and text [B, L], normals [B, L, E], and the rest [B]. `constant` marks self-conditioned entries."""

    ids: Tensor
    text: Tensor
    normals: Tensor
    reconstruct: Tensor
    constant: Tensor
    weight: Tensor


Network = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(scaled latents, estimate, gamma) -> logits over V."""


def plain_terms(
    p: Parameters, g_B: Tensor, dg_B: Tensor, entries: Entries, estimate_BLE: Tensor, network: Network, ramp: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Per entry, summed over text: prior, own term (reconstruction or diffusion), and e_theta [B, L, E] of the pass."""

    def learning(x: Tensor) -> Tensor:
        mask = entries.constant.reshape(-1, *[1] * (x.dim() - 1))
        return torch.where(mask, x.detach(), x)

    width = p.embedding.shape[1]
    table_VE = p.embedding / (p.embedding.norm(dim=1, keepdim=True) + 1e-8)
    tables_BVE = learning(table_VE.expand(len(g_B), *table_VE.shape))
    clean_BLE = torch.stack([table[ids] for table, ids in zip(tables_BVE, entries.ids, strict=True)])
    gamma_B = learning(p.gamma_0 + (p.gamma_1 - p.gamma_0) * g_B)
    slope_B = learning((p.gamma_1 - p.gamma_0) * dg_B)
    alpha2, sigma2 = (1 / (1 + gamma_B.exp()))[:, None, None], (1 / (1 + (-gamma_B).exp()))[:, None, None]
    z_BLE = alpha2.sqrt() * clean_BLE + sigma2.sqrt() * entries.normals
    logits_BLV = network(z_BLE / (alpha2 / width + sigma2).sqrt(), estimate_BLE * width**0.5, gamma_B)
    logits_BLV = logits_BLV + ramp * alpha2.sqrt() / sigma2 * z_BLE @ tables_BVE.transpose(1, 2)
    logp_BLV = logits_BLV.log_softmax(-1)
    mean_BLE = logp_BLV.exp() @ tables_BVE
    cross_BL = -torch.gather(logp_BLV, 2, entries.ids[..., None])[..., 0]
    error_BL = 0.5 * ((-gamma_B).exp() * slope_B)[:, None] * ((mean_BLE - clean_BLE) ** 2).sum(-1)
    own_B = (torch.where(entries.reconstruct[:, None], cross_BL, error_BL) * entries.text).sum(1)
    gamma_1_B = learning(p.gamma_1.expand(len(g_B)))
    a1 = 1 / (1 + gamma_1_B.exp())
    prior_B = 0.5 * (width * ((1 - a1) - 1 - torch.log(1 - a1)) + a1) * entries.text.sum(1)
    return prior_B, own_B, mean_BLE
