"""What RePlaid draws, how it splits the batch, what it remembers, and how it begins."""

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.objectives.base import Corrupted
from pretrain.objectives.config import ObjectiveConfig, RePlaidConfig
from pretrain.objectives.replaid import RePlaid
from pretrain.objectives.rules import OBJECTIVE_RANGES
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocabulary import Vocabulary
from tests.objectives.replaid_examples import WORDS, batch, small

GOLDEN = "04fe5955"
GOLDEN_PARAMETERS = "3628ed7e"
RECORDED_WITH_NUMPY = "2.4.6"


def replaid(vocabulary: Vocabulary = WORDS, **constants: object) -> RePlaid:
    return RePlaid(vocabulary, ObjectiveConfig(name="replaid", replaid=RePlaidConfig(**constants)))  # type: ignore[arg-type]


def sample(index: int, *, size: int = 64, length: int = 512, padding: int = 0, evaluation: bool = False, part: int = 0, **noise: float) -> Corrupted:
    documents_L = np.where(np.arange(length) < length - padding, 0, -1).astype(np.int32)
    drawn = Noise(seed=11, index=index, position=index % size, batch=size, part=part, step=index // size, **noise)  # type: ignore[arg-type]
    return REPLAID.corrupt(np.random.default_rng(index).integers(0, 9, length), documents_L, drawn, evaluation=evaluation)


REPLAID = replaid()


def stacked(samples: list[Corrupted]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    inputs, targets = [s.inputs for s in samples], [s.targets for s in samples]
    return tuple({key: torch.from_numpy(np.stack([a[key] for a in group])) for key in group[0]} for group in (inputs, targets))  # type: ignore[return-value]


# ---- noise --------------------------------------------------------------------------------------------------------------------------


def test_normals_are_normal_and_independent() -> None:
    normals = np.stack([sample(index).inputs["normals"] for index in range(64)])
    assert normals.dtype == np.float32 and normals.shape == (64, 512, 16)
    n = normals.size
    assert abs(normals.mean()) < 4 / np.sqrt(n) and abs((normals**2).mean() - 1) < 4 * np.sqrt(2 / n) and abs((normals**4).mean() - 3) < 0.05
    flat = normals.reshape(-1, 16)
    for other in (flat[:, [1, *range(2, 16), 0]], np.roll(flat, 1, 0), np.roll(normals, 1, 0).reshape(-1, 16)):
        assert abs((flat * other).mean()) < 4 / np.sqrt(n)


def test_one_u_and_one_offset_for_the_batch() -> None:
    steps = [[sample(step * 8 + place, size=8, length=4) for place in range(8)] for step in range(200)]
    shared = np.array([[(float(s.inputs["u"]), int(s.inputs["offset"])) for s in step] for step in steps])
    assert (shared == shared[:, :1]).all()
    u, offset = shared[:, 0].T
    assert len(set(u)) == 200 and abs(u.mean() - 0.5) < 4 / np.sqrt(12 * 200)
    assert (np.bincount(offset.astype(int), minlength=4) > 25).all() and offset.max() == 3


def test_noise_of_a_sample_does_not_depend_on_how_the_batch_is_split_or_on_its_text() -> None:
    forward, backward = [sample(i) for i in range(8)], [sample(i) for i in reversed(range(8))][::-1]
    for a, b in zip(forward, backward, strict=True):
        np.testing.assert_array_equal(a.inputs["normals"], b.inputs["normals"])
        assert a.inputs["u"] == b.inputs["u"]
    other = REPLAID.corrupt(np.zeros(512, np.int64), np.zeros(512, np.int32), Noise(11, 3, 3, 64), evaluation=False)
    np.testing.assert_array_equal(other.inputs["normals"], forward[3].inputs["normals"])


def test_golden_batch() -> None:
    digest = hashlib.blake2b(digest_size=4)
    for index in range(4):
        noisy = sample(index)
        digest.update(noisy.inputs["normals"].tobytes() + noisy.inputs["u"].tobytes() + noisy.inputs["offset"].tobytes())
    assert digest.hexdigest() == GOLDEN, f"recorded with numpy {RECORDED_WITH_NUMPY}, this is {np.__version__}"


def test_padding_is_never_noised_nor_counted() -> None:
    noisy = sample(3, padding=200)
    assert noisy.count == noisy.targets["count"] == 312 and (noisy.inputs["normals"][312:] == 0).all() and noisy.targets["text"].sum() == 312
    np.testing.assert_array_equal(noisy.inputs["normals"][:312], sample(3).inputs["normals"][:312])
    assert sample(0, padding=512).count == 0


# ---- times and the split ------------------------------------------------------------------------------------------------------------


def with_deviations(objective: RePlaid, reconstruction: float, diffusion: float) -> RePlaid:
    """A state in which the two terms have these standard deviations."""
    objective.running.mass.fill_(0.5)
    moments = [[7.0, 49.0 + reconstruction**2], [2.0, 4.0 + diffusion**2]]
    objective.running.moments.copy_(0.5 * torch.tensor(moments, dtype=torch.float64))
    return objective


@pytest.mark.parametrize(
    ("size", "deviations", "entries"),
    [(8, None, 4), (64, (1.0, 3.0), 16), (64, (3.0, 1.0), 48), (10, (1.0, 2.0), 3), (8, (0.0, 1.0), 1), (8, (1.0, 0.0), 7), (8, (0.0, 0.0), 4),
     (2, (1.0, 9.0), 1), (3, None, 2)],
)  # fmt: skip
def test_the_batch_is_split_by_standard_deviations(size: int, deviations: tuple[float, float] | None, entries: int) -> None:
    """round(B std_rec / (std_rec + std_diff)) in [1, B - 1]; half before there are statistics. Weights undo it; t is one draw per cell."""
    objective = replaid() if deviations is None else with_deviations(replaid(), *deviations)
    for step in range(5):
        inputs, targets = objective.prepare(*batch(objective, size, step=step), evaluation=False)
        reconstruct_B, t_B, weight_B = targets["reconstruct"], targets["t"], targets["weight"]
        assert reconstruct_B.tolist() == [place < entries for place in range(size)]
        assert (t_B[:entries] == 0).all()
        cell_B = t_B[entries:] * (size - entries)
        assert cell_B.floor().tolist() == list(range(size - entries))
        torch.testing.assert_close(cell_B % 1, inputs["u"][entries:], rtol=0, atol=1e-12)
        torch.testing.assert_close(weight_B, torch.where(reconstruct_B, size / entries, size / (size - entries)).double())


def test_micro_batches_see_their_places() -> None:
    """Any cut of the batch into micro-batches, in any order, gives the same times."""
    objective = with_deviations(replaid(), 1.0, 2.0)
    whole = objective.prepare(*batch(objective, 12), evaluation=False)[1]
    for rows in ([0, 1], [10, 11], [4, 3], list(range(12))):
        part = objective.prepare(*({k: v[rows] for k, v in group.items()} for group in batch(objective, 12)), evaluation=False)[1]
        for key in ("t", "weight", "reconstruct", "self_conditioned", "g", "dg"):
            torch.testing.assert_close(part[key], whole[key][rows], rtol=1e-12, atol=0)


def test_a_batch_of_one_tosses_a_coin() -> None:
    """Reconstruction or diffusion, each half the time with weight 2, and then t is uniform."""
    times, kinds = [], []
    for step in range(400):
        targets = REPLAID.prepare(*batch(REPLAID, 1, step=step), evaluation=False)[1]
        assert targets["weight"].item() == 2
        kinds.append(targets["reconstruct"].item())
        times.append(targets["t"].item())
    times = np.array(times)[~np.array(kinds)]
    assert abs(np.mean(kinds) - 0.5) < 0.1 and abs(times.mean() - 0.5) < 4 / np.sqrt(12 * len(times)) and times.min() >= 0 and times.max() < 1
    assert (np.histogram(times, 4, (0, 1))[0] > 30).all()


def test_evaluation_draws_either_part_of_every_sequence() -> None:
    """Part 0 reconstructs, part 1 is stratified over (0, 1]; weight 2 each, so that the mean of the draws is the sum of the parts."""
    for part in (0, 1):
        noisy = [sample(i, evaluation=True, part=part, share=0.5, length=4) for i in range(64)]
        inputs, targets = REPLAID.prepare(*stacked(noisy), evaluation=True)
        assert (targets["reconstruct"] == (part == 0)).all() and (targets["weight"] == 2).all() and not targets["g"].requires_grad
        if part == 0:
            assert (targets["t"] == 0).all() and (targets["g"] == 0).all()
        else:
            assert sorted(((1 - targets["t"]) * 64).floor().tolist()) == list(range(64)) and 0 < targets["t"].min() <= targets["t"].max() <= 1
        assert inputs["self_conditioned"].all()


def test_leaves() -> None:
    inputs, targets = REPLAID.prepare(*batch(REPLAID), evaluation=False)
    for name in ("g", "dg"):
        assert inputs[name] is targets[name] and inputs[name].is_leaf and inputs[name].requires_grad and inputs[name].dtype == torch.float64


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_self_conditioned_sequences_are_exactly_that_share(share: float) -> None:
    """At most one in 1/share consecutive places, whatever the cut into micro-batches; all in evaluation; none without self-conditioning."""
    objective, seen = replaid(self_conditioning=share), set()
    every = round(1 / share)
    for step in range(12):
        inputs, targets = batch(objective, 16, step=step)
        rows_B = objective.preliminary_rows(inputs, evaluation=False)
        assert rows_B is not None and (rows_B.reshape(-1, every).sum(1) == 1).all()
        assert (objective.prepare(inputs, targets, evaluation=False)[1]["self_conditioned"] == rows_B).all()
        seen.add(int(rows_B.int().argmax()))
        everyone_B = objective.preliminary_rows(inputs, evaluation=True)
        assert everyone_B is not None and everyone_B.all()
    assert seen == set(range(every))
    without = replaid(self_conditioning=0.0)
    inputs, targets = batch(without)
    assert without.preliminary_rows(inputs, evaluation=True) is None
    assert not without.prepare(inputs, targets, evaluation=True)[1]["self_conditioned"].any()


def test_a_share_of_one_is_out_of_range() -> None:
    """Nothing would be left for embeddings and schedule to learn from."""
    legal, rule = OBJECTIVE_RANGES["objective.replaid.self_conditioning"]
    assert all(legal(share) for share in (0.0, 0.5, 1 / 3, 0.25)) and not any(legal(share) for share in (1.0, 0.3, -0.5)) and "use 0.25" in rule


# ---- running state and beginnings ---------------------------------------------------------------------------------------------------


def test_statistics_and_moments_against_a_plain_loop() -> None:
    """Per-token losses without weights and prior; bias-corrected averages of decay 0.997; empty sequences do not count."""
    objective = small()
    history: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    random = np.random.default_rng(0)
    noise = 1 / (1 + np.exp(-6.0))
    prior = 0.5 * (3 * (noise - 1 - np.log(noise)) + 1 - noise)
    for step in range(5):
        targets = objective.prepare(*batch(objective, step=step), evaluation=False)[1]
        value_B, count_B = random.gamma(2.0, size=8), targets["count"].numpy()
        loss_B = torch.from_numpy((value_B * targets["weight"].numpy() + prior) * count_B)
        for kind in (0, 1):
            chosen = (targets["reconstruct"].numpy() == (kind == 0)) & (count_B > 0)
            history[kind].append((value_B[chosen].mean(), (value_B[chosen] ** 2).mean()))
        objective.advance(objective.statistics(targets, loss_B))
    deviation = []
    for kind in (0, 1):
        weight = 0.997 ** np.arange(4, -1, -1)
        first, second = (weight / weight.sum()) @ np.array(history[kind])
        deviation.append(np.sqrt(second - first**2))
    assert objective.running.reconstruction_share().item() == pytest.approx(deviation[0] / sum(deviation), rel=1e-6)
    assert objective.running.steps.item() == 6 + 5


def test_a_step_without_entries_of_a_kind_leaves_its_moments() -> None:
    objective = with_deviations(replaid(), 1.0, 3.0)
    objective.advance(torch.tensor([[0.0, 0.0, 0.0], [4.0, 8.0, 16.0 + 36.0]], dtype=torch.float64))
    assert objective.running.moments[0].tolist() == [3.5, 25.0] and objective.running.mass[0] == 0.5 != objective.running.mass[1]
    objective.advance(None)
    assert objective.running.steps == 2


def test_the_output_prior_grows_over_its_ramp() -> None:
    objective = replaid(prior_ramp_steps=4)
    shares = []
    for _ in range(6):
        shares.append(objective.running.ramp(4).item())
        objective.advance(None)
    assert shares == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0] and replaid().running.ramp(0) == 1


def test_checkpoints_keep_parameters_and_running_state() -> None:
    """All in `modules()`: a new objective that loads it continues alike."""
    objective, other = with_deviations(replaid(), 1.0, 3.0), replaid()
    objective.advance(None)
    assert set(objective.modules().state_dict()) == {
        "embedding.weight", "schedule.gamma_0", "schedule.gamma_1", "schedule.interior.slope", "schedule.interior.shift",
        "schedule.interior.height", "running.moments", "running.mass", "running.steps",
    }  # fmt: skip
    other.modules().load_state_dict(objective.modules().state_dict())
    assert other.running.reconstruction_share() == objective.running.reconstruction_share() == 0.25 and other.running.steps == 1


def parameters(objective: RePlaid) -> Iterator[tuple[str, Tensor]]:
    return iter(objective.modules().named_parameters())


def test_first_values_depend_on_names_alone() -> None:
    """Not on torch's generator, nor on how far the vocabulary is padded; rows of length 1; the values are those of the record."""
    torch.manual_seed(1)
    first = replaid()
    torch.manual_seed(2)
    wide = replaid(Vocabulary(tokenizer_size=9, model_size=10, padded_size=64, mask_id=9, eos_id=0))
    digest = hashlib.blake2b(digest_size=4)
    for (name, a), (_, b) in zip(parameters(first), parameters(wide), strict=True):
        torch.testing.assert_close(b[:12] if name == "embedding.weight" else b, a, rtol=0, atol=0)
        digest.update((a.detach() * 1000).round().to(torch.int64).numpy().tobytes())
    assert digest.hexdigest() == GOLDEN_PARAMETERS, f"recorded with numpy {RECORDED_WITH_NUMPY}, this is {np.__version__}"
    torch.testing.assert_close(first.embedding(0, 12).norm(dim=1), torch.ones(12), rtol=1e-6, atol=0)
    assert (first.schedule.gamma_0.item(), first.schedule.gamma_1.item()) == (-3, 6)


def test_what_the_optimizer_is_told() -> None:
    """One rate for all, decay for the endpoints only, and the embedding's gradient alone is a part of the tensor-parallel sum."""
    for name, parameter in parameters(replaid(learning_rate=0.02, endpoint_decay=0.3)):
        endpoint = name in ("schedule.gamma_0", "schedule.gamma_1")
        assert (parameter.learning_rate, parameter.weight_decay) == (0.02, 0.3 if endpoint else 0.0)  # type: ignore[attr-defined]
        assert parameter.partial_over_tensor == (name == "embedding.weight")  # type: ignore[attr-defined]
        assert parameter.dtype == (torch.float32 if name == "embedding.weight" else torch.float64)
