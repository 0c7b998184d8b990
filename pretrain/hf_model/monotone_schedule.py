"""A noise schedule that is learned: gamma(t) = gamma_0 + (gamma_1 - gamma_0) g(t), g strictly increasing from g(0) = 0 to g(1) = 1.

Variational Diffusion Models (Kingma et al. 2021) and Plaid, with Plaid's network for g. Everything is float64: gamma is exponentiated,
and its derivative is a difference of almost equal numbers when it is wrong. Torch only.

Shape suffixes: B sequences, H hidden units.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MonotoneNetwork(nn.Module):
    """G(t) = sum_h softplus(height_h) tanh(softplus(slope_h) (t - ½) + shift_h), and g = (G(t) - G(0)) / (G(1) - G(0)).

    Increasing because every slope and height is positive. With standard normal parameters g is almost the identity. Plaid multiplies G
    by 0.01, which cancels in g and in every gradient, and so is left out.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.slope, self.shift, self.height = (nn.Parameter(torch.zeros(hidden, dtype=torch.float64)) for _ in range(3))

    def forward(self, t_B: Tensor) -> tuple[Tensor, Tensor]:
        """g(t) and g'(t), the latter in closed form; both differentiable in the parameters."""
        ends = t_B.new_tensor([0.0, 1.0])
        slope_H, height_H = F.softplus(self.slope), F.softplus(self.height)
        curve_BH = torch.tanh(slope_H * (torch.cat((ends, t_B)).unsqueeze(-1) - 0.5) + self.shift)
        value_B = curve_BH @ height_H
        first, last = value_B[0], value_B[1]
        derivative_B = (1 - curve_BH[2:].square()) @ (slope_H * height_H)
        return (value_B[2:] - first) / (last - first), derivative_B / (last - first)


class LearnedSchedule(nn.Module):
    """The endpoints and the network between them."""

    def __init__(self, gamma_0: float, gamma_1: float, hidden: int) -> None:
        super().__init__()
        self.gamma_0 = nn.Parameter(torch.tensor(gamma_0, dtype=torch.float64))
        self.gamma_1 = nn.Parameter(torch.tensor(gamma_1, dtype=torch.float64))
        self.interior = MonotoneNetwork(hidden)

    def gamma(self, g_B: Tensor) -> Tensor:
        """gamma where the interior stands at g."""
        return self.gamma_0 + (self.gamma_1 - self.gamma_0) * g_B

    def gamma_slope(self, dg_B: Tensor) -> Tensor:
        """d gamma / dt where the interior's derivative is dg."""
        return (self.gamma_1 - self.gamma_0) * dg_B

    def forward(self, t_B: Tensor) -> tuple[Tensor, Tensor]:
        """gamma(t) and gamma'(t)."""
        g_B, dg_B = self.interior(t_B)
        return self.gamma(g_B), self.gamma_slope(dg_B)
