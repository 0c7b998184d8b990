"""Examples, their masks and their order against direct constructions."""

from dataclasses import dataclass

import numpy as np
import pytest

from finetune.sft_data import SFTExamples, SFTSamples, SFTValidationSamples
from pretrain.data.problems import Problem
from pretrain.data.samples import positions
from pretrain.data.sft_format import SFTFormat
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.objectives.base import Corrupted
from pretrain.parallel.noise import Noise

CONTEXT = 96


@dataclass(frozen=True)
class Batch:
    """Sizes of a global batch."""

    global_sequences: int = 8
    micro_sequences: int = 2
    length: int = CONTEXT


def problems(count: int) -> list[Problem]:
    rationales = [" ".join(["night"] * (number % 5)) for number in range(count)]
    return [Problem(id=f"p-{n}", source="p", question=f"the king {n} sleeps?", rationale=text, answer=str(n)) for n, text in enumerate(rationales)]


def corrupt(tokens: np.ndarray, documents: np.ndarray, noise: Noise, *, prompt: np.ndarray | None) -> Corrupted:
    """Masked diffusion with a prompt, in four lines."""
    assert prompt is not None
    scored = (documents >= 0) & ~prompt
    masked = (noise.stream("mask").random(tokens.size) < noise.stratified_time()) & scored
    inputs = {"ids": np.where(masked, -1, tokens), "documents": documents, "part": np.array(noise.part)}
    return Corrupted(inputs, {"ids": tokens, "masked": masked}, int(scored.sum()), noise.stratified_time())


@pytest.fixture
def examples(tokenizer: Tokenizer) -> SFTExamples:
    return SFTExamples(problems(21), tokenizer, SFTFormat(context=CONTEXT))


def samples(examples: SFTExamples, batch: Batch = Batch(), **options: object) -> SFTSamples:
    return SFTSamples(examples, batch, corrupt=corrupt, **({"lookahead": 0, "seed": 3} | options))  # type: ignore[arg-type]


def test_ids_are_the_segments_tokenised_apart(examples: SFTExamples, tokenizer: Tokenizer) -> None:
    for number, problem in enumerate(problems(21)):
        (prompt, response), *others = SFTFormat(context=CONTEXT).segments(problem)
        assert not others
        expected = [[token for text in texts for token in tokenizer.encode([text])[0]] for texts in (prompt, response)]
        found = examples.ids(number)
        assert [ids.tolist() for ids in found] == [expected[0], [*expected[1], tokenizer.eos_id]]
        assert found[0].tolist() == tokenizer.encode([SFTFormat(context=CONTEXT).prompt(problem)])[0]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("padding", ["scored", "unscored"])
def test_masks(tokenizer: Tokenizer, padding: str, lookahead: int) -> None:
    examples = SFTExamples(problems(3), tokenizer, SFTFormat(context=CONTEXT, padding=padding))  # type: ignore[arg-type]
    prompt, response = examples.ids(1)
    row, length = examples.row(1, lookahead), len(prompt) + len(response)
    assert row.tokens_L.tolist() == [*prompt, *response] + [tokenizer.eos_id] * (CONTEXT + lookahead - length)
    assert row.prompt_L.tolist() == [True] * len(prompt) + [False] * (CONTEXT + lookahead - len(prompt))
    text = CONTEXT if padding == "scored" else length
    assert row.documents_L.tolist() == [0] * text + [-1] * (CONTEXT + lookahead - text)
    assert [row.tokens_L.dtype, row.documents_L.dtype, row.prompt_L.dtype] == [np.int64, np.int32, np.bool_]


def test_a_prompt_can_be_scored_when_asked(tokenizer: Tokenizer) -> None:
    examples = SFTExamples(problems(3), tokenizer, SFTFormat(context=CONTEXT, score_prompt=True))
    assert not examples.row(0, 0).prompt_L.any()


def test_what_is_too_long_is_counted_and_dropped(tokenizer: Tokenizer) -> None:
    given = problems(4)
    given[1] = Problem(id="long", source="p", question="king " * 400, rationale="", answer="1")
    given[2] = Problem(id="deep", source="p", question="king?", rationale="night " * 400, answer="1")
    examples = SFTExamples(given, tokenizer, SFTFormat(context=CONTEXT))
    counts = examples.counts
    assert (counts.problems, counts.examples, counts.too_long, counts.prompt_too_long) == (4, 2, 2, 1)
    assert examples.problems_N.tolist() == [0, 3] and counts.longest > CONTEXT
    assert counts.sentence(CONTEXT).endswith(f"; dropped 2 longer than the context of {CONTEXT}, 1 of them by their prompt alone")
    with pytest.raises(UserError, match=r"the shortest example has \d+ tokens, more than context=96; set a larger context"):
        SFTExamples(given[1:3], tokenizer, SFTFormat(context=CONTEXT))
    with pytest.raises(UserError, match="there is no problem; give a file with problems"):
        SFTExamples([], tokenizer, SFTFormat(context=CONTEXT))


def test_an_example_as_long_as_the_context_is_kept(tokenizer: Tokenizer) -> None:
    length = SFTExamples(problems(1), tokenizer, SFTFormat(context=CONTEXT)).counts.longest
    assert SFTExamples(problems(1), tokenizer, SFTFormat(context=length)).counts.too_long == 0
    with pytest.raises(UserError, match="set a larger context"):
        SFTExamples(problems(1), tokenizer, SFTFormat(context=length - 1))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 21])
def test_an_epoch_is_every_example_once(tokenizer: Tokenizer, count: int) -> None:
    made = samples(SFTExamples(problems(count), tokenizer, SFTFormat(context=CONTEXT)))
    assert made.steps_per_epoch == -(-count // 8) and made.steps(5) == 5 * made.steps_per_epoch
    orders = []
    for epoch in range(3):
        numbers = range(8 * made.steps(epoch), 8 * made.steps(epoch + 1))
        orders.append([made.example(number) for number in numbers])
        assert sorted(n for n in orders[-1] if n >= 0) == list(range(count))
        assert {made.epoch(number // 8) for number in numbers} == {epoch}
        assert all(-1 not in orders[-1][start : start + 8] for start in range(0, 8 * (count // 8), 8))
    if count > 6:
        assert orders[0] != orders[1] != orders[2]


def test_fillers_count_nothing_and_hold_no_text(examples: SFTExamples) -> None:
    made = samples(examples)
    last = [made.sample(number) for number in range(16, 24)]
    assert sum(sample.number >= 0 for sample in last) == 21 - 16
    for sample in last:
        if sample.number < 0:
            assert sample.corrupted.count == 0 and (sample.corrupted.inputs["documents"] == -1).all() and not sample.corrupted.targets["masked"].any()


def test_a_last_batch_spreads_over_the_parts(examples: SFTExamples) -> None:
    made = samples(examples, parts=(0.5, 0.5))
    parts = [made.sample(number).corrupted.inputs["part"].item() for number in range(16, 24) if made.example(number) >= 0]
    assert sorted(parts) in ([0, 0, 1, 1, 1], [0, 0, 0, 1, 1])


def test_no_prompt_is_ever_noised_or_counted(examples: SFTExamples) -> None:
    made = samples(examples)
    for number in range(48):
        example, sample = made.example(number), made.sample(number).corrupted
        if example >= 0:
            prompt, _ = examples.ids(example)
            assert (sample.inputs["ids"][: len(prompt)] == prompt).all() and sample.count == CONTEXT - len(prompt)


def test_a_sample_depends_on_seed_and_number_alone(examples: SFTExamples) -> None:
    """Any layout asks for the same samples: those of 4 ranks with one sequence each are those of one rank with 8."""
    whole = [samples(examples).sample(number) for number in range(16)]
    fresh = samples(examples, Batch(micro_sequences=1))
    for rank in range(4):
        for numbers in positions(1, global_sequences=8, micro_sequences=1, dp_rank=rank, dp_size=4):
            for number in numbers:
                one, other = fresh.sample(number).corrupted, whole[number].corrupted
                assert (one.inputs["ids"] == other.inputs["ids"]).all() and one.t == other.t
    assert samples(examples).fingerprint(2) == fresh.fingerprint(2) != samples(examples, seed=4).fingerprint(2)


@pytest.mark.parametrize("parts", [1, 2])
def test_validation_reads_each_example_in_every_draw(examples: SFTExamples, parts: int) -> None:
    made = SFTValidationSamples(examples, Batch(), corrupt=corrupt, lookahead=0, draws=3, seed=1, parts=parts)
    assert len(made) == {1: 63, 2: 2 * 64}[parts], "parts are filled up to whole micro-batches, so that none mixes two"
    found = [made.sample(number) for number in range(len(made))]
    assert sum(sample.number >= 0 for sample in found) == parts * 63
    sequences = made.sequences(len(made))
    for number, sample in enumerate(found):
        expected = examples.row(int(sequences[number]), 0).tokens_L if sample.number >= 0 else examples.empty_row(0).tokens_L
        assert (sample.corrupted.targets["ids"] == expected).all() and (sample.number == number or sequences[number] == -1)
    times = sorted(float(sample.corrupted.t) for sample in found if sample.number >= 0 and sample.corrupted.inputs["part"] == 0)  # type: ignore[arg-type]
    assert all(cell <= 63 * time < cell + 1 for cell, time in enumerate(times))


def test_mistakes(examples: SFTExamples, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="batch.length=64 must equal the examples' context=96"):
        samples(examples, Batch(length=64))
    if "bos" in tokenizer.special_ids:
        with_bos = SFTExamples(problems(1), tokenizer, SFTFormat(context=CONTEXT, segment_bos=True))
        bos = tokenizer.special_ids["bos"]
        assert with_bos.ids(0)[0][0] == bos and with_bos.ids(0)[1][0] == bos
