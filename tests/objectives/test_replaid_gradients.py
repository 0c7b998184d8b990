"""Who learns what: every gradient of a training pass against plain float64 autograd, and what the schedule's gradient leads to.

Shape suffixes: B sequences, L positions, E width of an embedding, V vocabulary that can win, P padded vocabulary.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pretrain.objectives.replaid import RePlaid
from tests import reference_replaid
from tests.objectives.replaid_examples import VOCAB, P, SmallNetwork, V, batch, small, training_pass
from tests.reference_replaid import Entries, Parameters

SCALE = 0.037


def gradients(objective: RePlaid, network: SmallNetwork) -> dict[str, Tensor]:
    named = dict(objective.modules().named_parameters()) | {f"network {i}": p for i, p in enumerate(network.parameters())}
    assert all(p.grad is not None for p in named.values())
    return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}


def plain_gradients(objective: RePlaid, prepared: dict[str, Tensor], estimate_BLE: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The same from the formulas: the network of g minimises the squares, all else the sum. Also the loss of each entry."""
    schedule = objective.schedule
    leaves = [objective.embedding.weight[:V], schedule.gamma_0, schedule.gamma_1, *schedule.interior.parameters()]
    p = Parameters(*(x.detach().clone().requires_grad_() for x in leaves))
    network = SmallNetwork.random()
    entries = Entries(**{key: prepared[key] for key in ("ids", "text", "normals", "reconstruct", "weight")}, constant=prepared["self_conditioned"])
    entries.ids = entries.ids.clamp(max=V - 1)
    count_B = entries.text.sum(1)

    def terms(g_B: Tensor, dg_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return reference_replaid.plain_terms(p, g_B, dg_B, entries, estimate_BLE, lambda *a: network(*a)[..., :V], ramp=0.6)

    g_B, dg_B = p.interior(prepared["t"])
    prior_B, own_B, _ = terms(g_B.detach(), dg_B.detach())
    loss_B = prior_B + entries.weight * own_B
    others = {"embedding.weight": p.embedding, "schedule.gamma_0": p.gamma_0, "schedule.gamma_1": p.gamma_1}
    others |= {f"network {i}": x for i, x in enumerate(network.parameters())}
    found = dict(zip(others, torch.autograd.grad(SCALE * loss_B.sum(), list(others.values())), strict=True))
    _, own_B, _ = terms(g_B, dg_B)
    squares = (entries.weight * own_B.square() / count_B.clamp(min=1))[~entries.reconstruct].sum()
    found |= zip(
        [f"schedule.interior.{name}" for name in ("slope", "shift", "height")],
        torch.autograd.grad(SCALE * squares, [p.slope, p.shift, p.height]),
        strict=True,
    )
    embedding = torch.zeros(P, found["embedding.weight"].shape[1], dtype=torch.float64)
    embedding[:V] = found["embedding.weight"]
    return found | {"embedding.weight": embedding}, loss_B.detach()


def test_a_training_pass_against_plain_autograd() -> None:
    """Schedule network: E[loss^2]; endpoints, embeddings and network: E[loss]; self-conditioned entries: the network alone."""
    objective, network = small(), SmallNetwork.random()
    prepared = objective.prepare(*batch(objective), evaluation=False)
    targets = prepared[1]
    assert (targets["self_conditioned"] & ~targets["reconstruct"]).any() and (targets["self_conditioned"] & targets["reconstruct"]).any()
    loss_B, estimate_BLE = training_pass(objective, network, prepared, scale=SCALE)
    expected, expected_loss_B = plain_gradients(objective, targets, estimate_BLE)
    torch.testing.assert_close(loss_B, expected_loss_B, rtol=1e-12, atol=1e-13)
    for name, gradient in gradients(objective, network).items():
        assert expected[name].norm() > 0, name
        assert (gradient - expected[name]).norm() < 1e-12 * expected[name].norm(), name


def test_the_estimate_is_the_mean_embedding_of_the_first_pass() -> None:
    objective, network = small(), SmallNetwork.random()
    prepared = objective.prepare(*batch(objective), evaluation=False)
    targets = prepared[1]
    _, estimate_BLE = training_pass(objective, network, prepared, scale=SCALE)
    rows_B = targets["self_conditioned"]
    assert rows_B.sum() == 2 and (estimate_BLE[~rows_B] == 0).all()
    schedule = objective.schedule
    p = Parameters(*(x.detach() for x in (objective.embedding.weight[:V], schedule.gamma_0, schedule.gamma_1, *schedule.interior.parameters())))
    entries = Entries(**{key: targets[key] for key in ("ids", "text", "normals", "reconstruct", "weight")}, constant=rows_B)
    entries.ids = entries.ids.clamp(max=V - 1)
    zeros = torch.zeros_like(estimate_BLE)
    first = reference_replaid.plain_terms(p, targets["g"], targets["dg"], entries, zeros, lambda *a: network(*a)[..., :V], ramp=0.6)[2]
    checked_BL = entries.text & rows_B.unsqueeze(-1)  # padding ids were changed above
    torch.testing.assert_close(estimate_BLE[checked_BL], first[checked_BL], rtol=1e-12, atol=1e-13)


def test_only_the_network_learns_from_self_conditioned_entries() -> None:
    objective, network = small(self_conditioning=0.5), SmallNetwork.random()
    inputs, targets = batch(objective)
    kept_B = objective.preliminary_rows(inputs, evaluation=False)
    assert kept_B is not None and kept_B.sum() == 4
    prepared = objective.prepare({k: v[kept_B] for k, v in inputs.items()}, {k: v[kept_B] for k, v in targets.items()}, evaluation=False)
    training_pass(objective, network, prepared, scale=SCALE)
    assert all(p.grad is None or (p.grad == 0).all() for p in objective.modules().parameters())
    assert all(p.grad is not None and p.grad.norm() > 0 for p in network.parameters())


def test_the_pieces_of_a_batch_add_up() -> None:
    """Micro-batches of two, each with its own leaves, give the gradients and statistics of the whole."""
    whole, network = small(), SmallNetwork.random()
    prepared = whole.prepare(*batch(whole), evaluation=False)
    loss_B, _ = training_pass(whole, network, prepared, scale=SCALE)
    parts, part_network = small(), SmallNetwork.random()
    statistics = []
    for start in range(0, 8, 2):
        inputs, targets = ({key: value[start : start + 2] for key, value in group.items()} for group in batch(parts))
        piece = parts.prepare(inputs, targets, evaluation=False)
        if piece[1]["self_conditioned"].any():
            piece_loss_B, _ = training_pass(parts, part_network, piece, scale=SCALE)
        else:
            piece_loss_B = parts.token_loss(part_network.forward(parts.network_input(piece[0], VOCAB)), piece[1], VOCAB).loss_B
            (piece_loss_B.sum() * SCALE).backward()
            parts.finish(piece[1], piece_loss_B.detach())
        statistics.append(parts.statistics(piece[1], piece_loss_B.detach()))
        torch.testing.assert_close(piece_loss_B.detach(), loss_B[start : start + 2], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(sum(statistics), whole.statistics(prepared[1], loss_B), rtol=1e-12, atol=1e-13)
    for (name, a), b in zip(gradients(whole, network).items(), gradients(parts, part_network).values(), strict=True):
        assert (a - b).norm() < 1e-12 * a.norm(), name


def test_the_schedule_learns_to_make_the_root_mean_square_loss_even() -> None:
    """Two independent tokens, exact denoiser: training by `finish` reaches t(gamma) = F(gamma) / F(gamma_1) with the root of E[error^2], the
    error being that of the sequence. The form with E[error] (the paper's Proposition 1, which long sequences approach) is another curve, and
    so is the form with the error of a token."""
    length, nodes, updates = 2, 12, 150
    q, noises, weights_M = np.array([0.8, 0.2]), *reference_replaid.normal_grid(length, 0.9, reach=4.4)
    objective = small(latent=1, schedule_hidden=64, gamma_0=-1.5, gamma_1=1.5, prior_ramp_steps=0, self_conditioning=0.0)
    objective.embedding.weight.data[:2] = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    sequences_NL = np.stack(np.meshgrid(*[np.arange(2)] * length, indexing="ij"), -1).reshape(-1, length)
    times = (np.arange(nodes) + 0.5) / nodes
    which_B, noise_B, time_B = (
        x.reshape(-1) for x in np.meshgrid(np.arange(len(sequences_NL)), np.arange(len(noises)), np.arange(nodes), indexing="ij")
    )
    size, ids_BL = len(which_B), torch.from_numpy(sequences_NL[which_B])
    share_B = torch.from_numpy(q[sequences_NL].prod(1)[which_B] * weights_M[noise_B] / nodes)
    targets = {
        "ids": ids_BL, "normals": torch.from_numpy(noises[noise_B])[..., None], "t": torch.from_numpy(times[time_B]),
        "text": torch.ones_like(ids_BL, dtype=torch.bool), "count": torch.full((size,), length), "weight": torch.ones(size).double(),
        "reconstruct": torch.zeros(size, dtype=torch.bool), "self_conditioned": torch.zeros(size, dtype=torch.bool),
    }  # fmt: skip
    logits_BLP = torch.full((size, length, P), -700.0, dtype=torch.float64)  # frequencies: the evidence of z makes them the posterior
    logits_BLP[..., :2] = torch.from_numpy(np.log(q))
    optimizer = torch.optim.Adam(objective.schedule.interior.parameters())
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - update / updates)
        with torch.no_grad():
            g_B, dg_B = objective.schedule.interior(targets["t"])
        drawn = targets | {"g": g_B.requires_grad_(), "dg": dg_B.requires_grad_()}
        loss_B = objective.token_loss(logits_BLP, drawn, VOCAB).loss_B
        (loss_B * share_B).sum().backward()
        objective.finish(drawn, loss_B.detach())
        optimizer.step()
        optimizer.zero_grad()

    line, density = reference_replaid.normal_grid(1, 0.2)

    def token_error(gamma: float, power: int) -> float:
        """E[|e_theta - e|^(2 power)] of one token: e_theta = tanh(alpha z / sigma^2 + ½ log q_0 / q_1)."""
        a, s = reference_replaid.scales(gamma)
        e_21 = np.array([[1.0], [-1.0]])
        mean_2M = np.tanh(a / s**2 * (a * e_21 + s * line[:, 0]) + np.log(q[0] / q[1]) / 2)
        return float(q @ ((mean_2M - e_21) ** (2 * power) @ density))

    gammas = np.linspace(-1.5, 1.5, 300)
    with torch.no_grad():
        learned, _ = objective.schedule(torch.from_numpy(times))

    def distance(moment: Callable[[float], float]) -> float:
        return float(np.abs(np.interp(learned.numpy(), gammas, reference_replaid.optimal_times(gammas, moment)) - times).max())

    def squared_error(u: float) -> float:
        return length * token_error(u, 2) + length * (length - 1) * token_error(u, 1) ** 2

    assert distance(squared_error) < 0.008
    assert distance(lambda u: token_error(u, 1) ** 2) > 0.1 and distance(lambda u: token_error(u, 2)) > 0.012
