"""The mathematics of Gaussian diffusion over token embeddings (RePlaid) that objectives, evaluation and samplers share. Torch only.

Time enters through gamma, the log noise-to-signal ratio: z = alpha e + sigma n with n standard normal and

    alpha^2 = sigmoid(-gamma),    sigma^2 = sigmoid(gamma),    SNR = alpha^2 / sigma^2 = exp(-gamma)

(Kingma et al. 2021, "Variational Diffusion Models"; section 2 of "Continuous Diffusion Scales Competitively with Discrete Diffusion for
Language", Yang et al. 2026). Functions of gamma keep its precision: give it in float64, the results are cast where they meet a latent.

Shape suffixes: B sequences, L positions, E width of a latent vector, R rows of the embedding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def alpha(gamma: Tensor) -> Tensor:
    """Scale of the clean embedding."""
    return torch.sigmoid(-gamma).sqrt()


def sigma(gamma: Tensor) -> Tensor:
    """Standard deviation of the noise."""
    return torch.sigmoid(gamma).sqrt()


def snr(gamma: Tensor) -> Tensor:
    """Signal-to-noise ratio alpha^2 / sigma^2."""
    return torch.exp(-gamma)


def evidence_scale(gamma: Tensor) -> Tensor:
    """alpha / sigma^2: times z . e it is log N(z; alpha e, sigma^2), up to what all embeddings of equal length share."""
    return alpha(gamma) / torch.sigmoid(gamma)


def network_scale(gamma: Tensor, width: int) -> Tensor:
    """1 / sqrt(alpha^2 / width + sigma^2): it gives z = alpha e + sigma n, with e of length 1, a mean square of 1 per coordinate."""
    return (torch.sigmoid(-gamma) / width + torch.sigmoid(gamma)).rsqrt()


def prior_divergence(gamma_1: Tensor, width: int) -> Tensor:
    """KL(q(z_1 | e) || N(0, I)) of one position, in nats, for an embedding of length 1 (Appendix C there, "Prior loss").

    ½ [width (sigma^2 - 1 - log sigma^2) + alpha^2 |e|^2] at gamma_1; sigma^2 - 1 is taken as -alpha^2, which does not round to 0.
    """
    alpha_squared = torch.sigmoid(-gamma_1)
    return 0.5 * (width * (-alpha_squared - F.logsigmoid(gamma_1)) + alpha_squared)


def per_sequence(values_B: Tensor, like_BLE: Tensor) -> Tensor:
    """[B, 1, 1] in the type of the latents: a scalar of each sequence, ready to multiply them."""
    return values_B.to(like_BLE.dtype).view(-1, 1, 1)


def diffuse(clean_BLE: Tensor, normals_BLE: Tensor, gamma_B: Tensor) -> Tensor:
    """z_t = alpha e + sigma n, in the type of the clean embeddings."""
    return per_sequence(alpha(gamma_B), clean_BLE) * clean_BLE + per_sequence(sigma(gamma_B), clean_BLE) * normals_BLE.to(clean_BLE)


class UnitEmbedding(nn.Module):
    """A learned vector of length 1 for every token: stored freely, normalised whenever it is used."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width))

    def forward(self, start: int, end: int) -> Tensor:
        """[end - start, E]: rows [start, end), normalised as w / (|w| + 1e-8) like Plaid's."""
        weight_RE = self.weight[start:end]
        return weight_RE / (torch.linalg.vector_norm(weight_RE, dim=-1, keepdim=True) + 1e-8)
