"""The format that a model was fine-tuned with, and the token ids of what it is asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from finetune.gsm8k_config import FormatConfig
from pretrain.checkpoint.changes import read_config
from pretrain.convert.hub_folder import CONFIG, is_hub_folder
from pretrain.convert.sampled import read_json
from pretrain.data.problems import Problem
from pretrain.data.records import Malformed, typed_record
from pretrain.data.sft_format import SFTFormat
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.sampling.model import Codec

HUB_KEY = "prompt_format"
"""Where an exported folder's config.json has the format."""


@dataclass(frozen=True)
class PromptFormat:
    """A format and where it is from; fine_tuned: the model was trained with one."""

    format: SFTFormat
    origin: str
    fine_tuned: bool


def prompt_format(folder: Path, overrides: FormatConfig) -> PromptFormat:
    """The format of the model in `folder` (a checkpoint's folder, or an exported one), with what the user changes.

    Raises UserError for a format that is damaged or that the changes make illegal.
    """
    given = overrides.given()
    changed = f", with format.{', format.'.join(given)} as given" if given else ""
    found, place = _stored(folder)
    if found is None:
        origin = f"the default format{changed}: the model was not fine-tuned with one"
        return PromptFormat(SFTFormat(**given), origin, False)
    return PromptFormat(_checked({**found, **given}, place), f"the format of {place}{changed}", True)


def _stored(folder: Path) -> tuple[Mapping[str, Any] | None, str]:
    """The raw mapping, if there is one, and the file that has it."""
    if is_hub_folder(folder):
        place, found = folder / CONFIG, read_json(folder / CONFIG).get(HUB_KEY)
    else:
        place, sft = folder / "config.yaml", read_config(folder).get("sft")
        found = sft.get("format", {}) if isinstance(sft, Mapping) else sft
    if found is not None and not isinstance(found, Mapping):
        raise UserError(f"{place} says {found!r} where the prompt format must be a mapping; copy the model again")
    return found or (None if found is None else {}), str(place)


def _checked(mapping: Mapping[str, Any], place: str) -> SFTFormat:
    try:
        return typed_record(SFTFormat, dict(mapping))
    except Malformed as error:
        known = ", ".join(item.name for item in fields(SFTFormat))
        raise UserError(f"the prompt format in {place} {error}; its fields are {known}") from error


class PromptMaker:
    """Prompts as fine-tuning makes them: segments tokenised apart, worked examples before the question.

    shots  each is a whole training example: question, rationale, answer, and the EOS after it.
    """

    def __init__(self, format: SFTFormat, codec: Codec, eos_id: int, shots: Sequence[Problem]) -> None:
        """Raises UserError for segment_bos=true with a tokenizer that has no BOS."""
        self._format, self._codec = format, codec
        self._bos = _bos(codec) if format.segment_bos else []
        self._shot_questions = {shot.question for shot in shots}
        self._before: list[int] = []
        for shot in shots:
            prompt, response = format.segments(shot)[-1]  # of two examples, the one that has everything
            self._before += [*self.encoded([*prompt, *response]), eos_id]

    def ids(self, problem: Problem) -> list[int]:
        """What the model is asked. Raises UserError for a problem that is one of the shots."""
        if problem.question in self._shot_questions:
            raise UserError(f"problem {problem.id} is also one of the shots, which show its answer; give shots_data without the test problems")
        return [*self._before, *self.encoded([self._format.prompt(problem)])]

    def encoded(self, segments: list[str]) -> list[int]:
        """Ids of segments that are tokenised apart."""
        return [token for ids in self._codec.encode(segments) for token in (*self._bos, *ids)]


def _bos(codec: Codec) -> list[int]:
    special = codec.special_ids if isinstance(codec, Tokenizer) else {}
    if "bos" not in special:
        raise UserError("format.segment_bos=true needs a tokenizer with a BOS token, which this model's has not; set format.segment_bos=false")
    return [special["bos"]]
