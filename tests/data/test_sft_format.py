"""Segments of examples against what the formats say, written out."""

import pytest

from pretrain.data.problems import Problem
from pretrain.data.sft_format import SFTFormat
from pretrain.errors import UserError

PROBLEM = Problem(id="a-1", source="a", question="How many?", rationale="48/2 = <<48/2=24>>24", answer="24")
SMDM = SFTFormat(examples="two", question="Question: {question}", rationale="Answer: {rationale}", answer="####{answer}")


def test_one_example() -> None:
    assert SFTFormat().segments(PROBLEM) == [(["Question: How many?\n"], ["Answer: 48/2 = <<48/2=24>>24\n", "#### 24"])]
    assert SFTFormat().prompt(PROBLEM) == "Question: How many?\n"


def test_two_examples_as_smdm() -> None:
    question, rationale = "Question: How many?", "Answer: 48/2 = <<48/2=24>>24"
    assert SMDM.segments(PROBLEM) == [([question], [rationale]), ([question, rationale], ["####24"])]


@pytest.mark.parametrize(("annotations", "rationale"), [("keep", "48/2 = <<48/2=24>>24"), ("drop", "48/2 = 24"), ("plain", "48/2 = 48/2=2424")])
def test_annotations(annotations: str, rationale: str) -> None:
    format = SFTFormat(annotations=annotations)  # type: ignore[arg-type]
    assert format.segments(PROBLEM)[0][1][0] == f"Answer: {rationale}\n"


def test_no_rationale_is_one_example_in_either_format() -> None:
    bare = Problem(id="a-2", source="a", question="How many {rationale}?", rationale="", answer="3")
    assert SMDM.segments(bare) == [(["Question: How many {rationale}?"], ["####3"])]


def test_mistakes() -> None:
    with pytest.raises(UserError, match=r"answer='####' must hold \{answer\} once"):
        SFTFormat(answer="####")
    with pytest.raises(UserError, match="context=4 must be at least 8 tokens"):
        SFTFormat(context=4)
    only = Problem(id="a-3", source="a", question="?", rationale="<<1+1=2>> <<2+2=4>>", answer="4")
    with pytest.raises(UserError, match=r"leaves nothing of the rationale of problem a-3 \('<<1\+1=2>> <<2\+2=4>>'\); use plain"):
        SFTFormat(annotations="drop").segments(only)
    assert SFTFormat(annotations="plain").segments(only)[0][1][0] == "Answer: 1+1=2 2+2=4\n"
