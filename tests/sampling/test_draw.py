"""Noise and draws against published vectors and exact laws."""

import math

import pytest
import torch
from scipy.stats import chisquare, kstest

from pretrain.hf_model.sampling_draw import TokenLaw, inverse_cdf
from pretrain.hf_model.sampling_noise import philox, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    """The known-answer vectors that Random123 publishes for philox4x32-10."""
    a, b, c, d = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox((a, b, c, d), key)) == expected


def test_uniforms_are_uniform_independent_and_named_by_sequence() -> None:
    first, second = uniforms(5, torch.arange(40), 3, torch.arange(500))
    for draws in (first, second, (first + second) % 1):
        assert draws.dtype == torch.float64 and draws.min() >= 0 and draws.max() < 1
        assert kstest(draws.flatten().numpy(), "uniform").pvalue > 1e-4
    one, _ = uniforms(5, torch.tensor([17]), 3, torch.arange(100, 110))
    assert torch.equal(one[0], first[17, 100:110])
    for other in (uniforms(6, torch.arange(40), 3, torch.arange(500)), uniforms(5, torch.arange(40), 4, torch.arange(500))):
        assert not torch.isclose(other[0], first).any(dim=1).all()


def zipf_tail() -> torch.Tensor:
    """Log-probabilities of 50,257 columns: 57 share 0.8, and 50,200 share 0.2 in pieces of 4e-6 that fp32 Gumbel noise misjudges."""
    logits_V = torch.full((50257,), math.log(0.2 / 50200), dtype=torch.float64)
    logits_V[:57] = math.log(0.8 / 57)
    return logits_V


def test_every_column_of_a_large_vocabulary_has_its_exact_interval() -> None:
    logits_V = zipf_tail()
    edges = [0.0]
    for piece in logits_V.exp().tolist():
        edges.append(edges[-1] + piece)
    columns = [0, 56, 57, 58, 20000, 50255, 50256]
    for share in (1e-6, 0.5, 1 - 1e-6):
        uniform_N = torch.tensor([(edges[j] + share * (edges[j + 1] - edges[j])) / edges[-1] for j in columns], dtype=torch.float64)
        assert TokenLaw().draw(logits_V.expand(len(columns), -1), uniform_N).tolist() == columns


def test_tail_mass_of_draws_on_a_large_vocabulary() -> None:
    draws = 1500
    uniform_N = uniforms(1, torch.arange(draws), 0, torch.arange(1))[0].flatten()
    ids_N = TokenLaw().draw(zipf_tail().expand(draws, -1), uniform_N)
    edges = torch.tensor([57, 12607, 25157, 37707])
    observed = torch.bincount(torch.bucketize(ids_N, edges, right=True), minlength=5).tolist()
    assert chisquare(observed, [draws * 0.8] + [draws * 0.05] * 4).pvalue > 1e-4


def test_mask_and_impossible_columns_never_win() -> None:
    logits_NV = torch.randn(64, 9, generator=torch.Generator().manual_seed(0))
    logits_NV[:, 4] = 1e4
    logits_NV[:, 7] = -torch.inf
    for uniform in (0.0, 0.5, 1 - 2.0**-53):
        for law in (TokenLaw(mask_id=4), TokenLaw(mask_id=4, temperature=0), TokenLaw(mask_id=4, top_k=3), TokenLaw(mask_id=4, top_p=0.7)):
            ids_N = law.draw(logits_NV, torch.full((64,), uniform, dtype=torch.float64))
            assert not ((ids_N == 4) | (ids_N == 7)).any()


def test_quantile_edges() -> None:
    weight_NV = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64)
    for uniform, column in ((0.0, 1), (0.2999, 1), (0.3001, 3), (1 - 2.0**-53, 3)):
        assert inverse_cdf(weight_NV, torch.tensor([uniform], dtype=torch.float64)).tolist() == [column]


def test_temperature_top_k_and_nucleus() -> None:
    p = torch.tensor([[0.1, 0.4, 0.05, 0.25, 0.2]], dtype=torch.float64)

    def law(**fields: float) -> list[float]:
        return TokenLaw(**fields).probabilities(p.log())[0].tolist()

    assert law() == pytest.approx(p[0].tolist())
    squares = [x * x for x in p[0].tolist()]
    assert law(temperature=0.5) == pytest.approx([x / sum(squares) for x in squares])
    assert law(temperature=0) == [0, 1, 0, 0, 0]
    assert law(top_k=2) == pytest.approx([0, 0.4 / 0.65, 0, 0.25 / 0.65, 0])
    nucleus = law(top_p=0.8)
    assert nucleus == pytest.approx([0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85])
    assert [x > 0 for x in law(top_p=1e-9)] == [False, True, False, False, False]


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}])
def test_illegal_laws_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="nucleus lies in"):
        TokenLaw(**fields)
