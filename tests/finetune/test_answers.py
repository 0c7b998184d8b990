"""Extractors against a golden file whose values were written by hand, and numbers against the ways in which people format them."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.answers import EXTRACTORS, extract, score
from finetune.numerals import parse_quantity
from pretrain.data.problems import answer_value
from pretrain.errors import UserError

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_golden_file_is_large_and_without_repetitions() -> None:
    assert len(GOLDEN) == len({entry["text"] for entry in GOLDEN}) >= 150


@pytest.mark.parametrize("entry", GOLDEN, ids=[f"{number}-{entry['note']}" for number, entry in enumerate(GOLDEN)])
def test_golden_answers(entry: dict[str, str | None]) -> None:
    found = extract(str(entry["text"]))
    for extractor in EXTRACTORS:
        written = entry[extractor]
        assert found[extractor] == (None if written is None else Fraction(written)), extractor


@st.composite
def formatted(draw: st.DrawFn) -> tuple[Fraction, str]:
    """A decimal number of up to 12 digits, and one of the ways to write it."""
    digits, places = draw(st.integers(0, 10**12)), draw(st.integers(0, 4))
    value = Fraction(digits, 10**places)
    whole, rest = divmod(digits, 10**places)
    decimals = f"{rest:0{places}d}" if places else ""
    groups, point = draw(st.sampled_from([("", "."), (",", "."), ("'", "."), ("_", "."), ("\u202f", "."), ("\u00a0", ","), ("", ",")]))
    number = f"{whole:,}".replace(",", groups)
    if decimals or draw(st.booleans()):
        extra = "0" * draw(st.integers(0, 2))
        if decimals + extra and not (point == "," and len(decimals + extra) == 3):  # 1,234 is the English one
            number += point + decimals + extra
        elif decimals:
            number = f"{whole}.{decimals}"
    sign = draw(st.sampled_from(["", "-", "\u2212"]))
    before = draw(st.sampled_from(["", "$", "€", "**", "(", "= "]))
    after = draw(st.sampled_from(["", ".", "%", " dollars", " kg.", "**", ")"]))
    return (-value if sign else value), f"{before}{sign}{number}{after}"


@given(formatted())
def test_a_number_comes_back_from_every_way_to_write_it(case: tuple[Fraction, str]) -> None:
    value, text = case
    assert parse_quantity(text) == value
    assert extract(f"She has 3 apples and 4 pears.\n#### {text}").strict == value


@given(st.integers(0, 999), st.integers(1, 98), st.integers(2, 99), st.sampled_from(["{w} {n}/{d}", "{w} and {n}/{d}", r"{w}\frac{{{n}}}{{{d}}}"]))
def test_mixed_numbers(whole: int, numerator: int, denominator: int, form: str) -> None:
    text = form.format(w=whole, n=numerator, d=denominator)
    if numerator < denominator:
        assert parse_quantity(text) == whole + Fraction(numerator, denominator)
    else:
        assert parse_quantity(text) is None


@given(st.text(max_size=200))
def test_any_text_has_answers_or_none(text: str) -> None:
    found = extract(text)
    assert all(found[name] is None or isinstance(found[name], Fraction) for name in EXTRACTORS)
    assert found.strict is None or "####" in text


@given(st.from_regex(r"-?\$?[1-9][0-9]{0,2}(,[0-9]{3}){0,3}(\.[0-9]{1,3})?%?|-?[0-9]{1,5}/[1-9][0-9]{0,3}", fullmatch=True))
def test_data_sets_answers_mean_the_same_here(answer: str) -> None:
    assert parse_quantity(answer) == answer_value(answer) is not None


def test_scores_count_each_extractor_and_list_disagreements() -> None:
    scores = score(["#### 18", "so 9 * 2 = 18 a day", "#### 18 or 19", "no idea"], ["18", "18", "18", "$18.00"])
    assert {name: scores.accuracy[name].correct for name in EXTRACTORS} == {"strict": 1, "flexible": 3, "last": 2}
    assert [entry.number for entry in scores.disagreements] == [1, 2]
    assert scores.unanswered == {"strict": 3, "flexible": 1, "last": 1}
    with pytest.raises(UserError, match="expected answer 'many' of problem 0 is not a number"):
        score(["1"], ["many"])
