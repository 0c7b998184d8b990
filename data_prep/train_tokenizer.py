"""A new sentencepiece model from the same inputs that `tokenize` takes. The same text and settings give the same bytes.

Text is kept as it is: no normalisation, spaces neither merged nor added, digits apart, and the line break a piece of its own
(sentencepiece learns line by line and would otherwise never see it).
"""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import chain, islice
from pathlib import Path

from data_prep.config import SPECIAL_PIECES, TrainTokenizerConfig
from data_prep.inputs import InputFile, find_inputs
from data_prep.progress import say
from data_prep.readers import Wanted, read_records, whole
from pretrain.data.files import atomic_writer, file_hash
from pretrain.data.manifest import InputRecord
from pretrain.data.records import Malformed, read_record
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError, counted
from pretrain.outputs import require_writable

UNK_ID, BOS_ID, EOS_ID, PAD_ID = range(4)
_MAX_LINE = 1 << 16
"""Longer lines are learnt from in pieces: sentencepiece drops them."""
_LOOKED_AT = 100
"""Records of each file that are looked at before training."""


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """What a model was trained from, in NAME.model.json: decides whether a re-run has anything to do."""

    text_key: str
    vocab_size: int
    kind: str
    byte_fallback: bool
    max_bytes: int
    inputs: tuple[InputRecord, ...]


def train_tokenizer(config: TrainTokenizerConfig) -> Path:
    """Train `config.output`; running it again is quick and changes nothing. UserError for what the user can mend."""
    output = Path(config.output)
    if output.suffix != ".model":
        raise UserError(f"output {output} must end in .model, for example {output.parent / 'tokenizer.model'}")
    require_writable(output)
    files = find_inputs(config.input, output)
    settings = {key: value for key, value in asdict(config).items() if key not in ("input", "output")}
    wanted = TrainingRecord(**settings, inputs=tuple(file.fingerprint() for file in files))
    record = output.with_name(output.name + ".json")
    if output.exists():
        _require_finished(output, record, wanted)
        say(f"{output} is already trained; nothing to do")
        return output
    _require_readable(config, files)
    model = _train(config, files)
    with atomic_writer(record) as stream:
        stream.write(json.dumps(asdict(wanted), indent=1).encode())
    with atomic_writer(output) as stream:
        stream.write(model)
    say(f"{output}: {config.vocab_size} pieces, hash {file_hash(output)[:12]}")
    return output


def _require_readable(config: TrainTokenizerConfig, files: list[InputFile]) -> None:
    """UserError for a file whose first records are all unreadable: its text would be missing without a word. `tokenize` reports single ones."""
    for file in files:
        first = list(islice(read_records(whole(file.path), Wanted(config.text_key)), _LOOKED_AT))
        if first and all(record.text is None for record in first):
            which = "first record" if len(first) == 1 else f"first {len(first)} records"
            raise UserError(
                f"the {which} of {file.path} cannot be read ({first[0].reason}); "
                "set text_key to the key of its text, or leave it out of the input"
            )


def _require_finished(output: Path, record: Path, wanted: TrainingRecord) -> None:
    try:
        found = read_record(TrainingRecord, record)
    except FileNotFoundError:
        raise UserError(f"{output} exists, and no {record.name} says what it was trained from; choose another output, or remove it") from None
    except Malformed as error:
        raise UserError(f"{record} {error}, so nobody knows what {output} was trained from; choose another output, or remove {output}") from error
    different = [field.name for field in fields(TrainingRecord) if getattr(found, field.name) != getattr(wanted, field.name)]
    if different:
        raise UserError(f"{output} exists and was trained with other {', '.join(different)}; choose another output, or remove it")
    try:
        size = Tokenizer(output).size
    except UserError as error:
        raise UserError(f"{output} is no longer the tokenizer that was trained; remove it, and run the same command to train it again") from error
    if size != wanted.vocab_size:
        raise UserError(f"{output} has {size} pieces and was trained with {wanted.vocab_size}: it changed since; remove it to train it again")


def _train(config: TrainTokenizerConfig, files: list[InputFile]) -> bytes:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_require_text(config, files),
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.vocab_size,
            byte_fallback=config.byte_fallback,
            character_coverage=0.9995 if config.byte_fallback else 1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            split_digits=True,
            user_defined_symbols=["\n"],
            max_sentence_length=4 * _MAX_LINE,
            shuffle_input_sentence=False,
            num_threads=1,  # the order of sums, and so of pieces, must not depend on the machine
            minloglevel=2,
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_id=PAD_ID,
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(
            f"no tokenizer of {config.vocab_size} pieces can be trained on this text: {_explanation(config, files, str(error))}"
        ) from error
    return model.getvalue()


def _explanation(config: TrainTokenizerConfig, files: list[InputFile], complaint: str) -> str:
    """sentencepiece's complaint as reason and advice."""
    if needed := re.search(r"required_chars\. \d+ vs (\d+)", complaint):
        characters: set[str] = set()
        for line in _Lines(config, files):
            characters.update(line)
        without_bytes = f", or byte_fallback=false vocab_size={SPECIAL_PIECES + len(characters)}" if config.byte_fallback else ""
        return f"its characters alone need {needed[1]}; set vocab_size={needed[1]}{without_bytes} or above"
    if possible := re.search(r"<= (\d+)\.?\s*$", complaint):
        return f"it has no more than {possible[1]} different pieces; choose vocab_size={possible[1]}, or give more text"
    return f"{' '.join(complaint.split())}; give other text, or another kind"


def _require_text(config: TrainTokenizerConfig, files: list[InputFile]) -> Iterator[str]:
    """The lines to learn from. UserError where none has a visible character."""
    lines = _Lines(config, files)
    start: list[str] = []
    stream = iter(lines)
    for line in stream:
        start.append(line)
        if not line.isspace():
            return chain(start, stream)
    reason = f" (the first because of: {lines.first_reason})" if lines.bad else ""
    raise UserError(f"the input holds no text: {lines.documents} empty and {counted(lines.bad, 'unreadable document')}{reason}; give files with text")


class _Lines:
    """Lines of the documents, files taking turns, until max_bytes. Records that cannot be read are counted, and left to `tokenize` to report."""

    def __init__(self, config: TrainTokenizerConfig, files: list[InputFile]) -> None:
        self._left = config.max_bytes
        self._files = [read_records(whole(file.path), Wanted(config.text_key)) for file in files]
        self.documents = self.bad = 0
        self.first_reason = ""

    def __iter__(self) -> Iterator[str]:
        for text in self._texts():
            for line in text.split("\n"):  # not splitlines: form feeds and the like are characters to learn
                for start in range(0, len(line), _MAX_LINE):
                    if self._left <= 0:
                        return
                    piece = line[start : start + _MAX_LINE]
                    self._left -= len(piece.encode())
                    yield piece

    def _texts(self) -> Iterator[str]:
        while self._files:
            for records in list(self._files):
                record = next(records, None)
                if record is None:
                    self._files.remove(records)
                elif record.text is None:
                    self.first_reason = self.first_reason or record.reason
                    self.bad += 1
                else:
                    self.documents += 1
                    yield record.text
