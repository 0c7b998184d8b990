"""A new sentencepiece model from the same inputs that `tokenize` takes. The same text and settings give the same bytes.

Text is kept as it is: no normalisation, spaces neither merged nor added, digits apart, and the line break a piece of its own
(sentencepiece learns line by line and would otherwise never see it).
"""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.config import TrainTokenizerConfig
from data_prep.inputs import InputFile, find_inputs
from data_prep.progress import say
from data_prep.readers import read_records
from pretrain.data.files import atomic_writer, file_hash
from pretrain.errors import UserError

UNK_ID, BOS_ID, EOS_ID, PAD_ID = range(4)
_MAX_LINE = 1 << 16
"""Longer lines are learnt from in pieces: sentencepiece drops them."""


def train_tokenizer(config: TrainTokenizerConfig) -> Path:
    """Train `config.output`; running it again is quick and changes nothing. UserError for what the user can mend."""
    output = Path(config.output)
    if output.suffix != ".model":
        raise UserError(f"output {output} must end in .model, for example {output.with_suffix('.model')}")
    files = find_inputs(config.input, output)
    request = _request(config, files)
    record = output.with_name(output.name + ".json")
    if output.exists():
        _require_finished(output, record, request)
        say(f"{output} is already trained; nothing to do")
        return output
    model = _train(config, files)
    with atomic_writer(record) as stream:
        stream.write(json.dumps(request, indent=1).encode())
    with atomic_writer(output) as stream:
        stream.write(model)
    say(f"{output}: {config.vocab_size} pieces, hash {file_hash(output)[:12]}")
    return output


def _request(config: TrainTokenizerConfig, files: list[InputFile]) -> dict[str, Any]:
    settings = {key: value for key, value in asdict(config).items() if key not in ("input", "output")}
    return settings | {"inputs": [file.fingerprint() for file in files]}


def _require_finished(output: Path, record: Path, request: dict[str, Any]) -> None:
    found = json.loads(record.read_text(encoding="utf-8")) if record.exists() else None
    if found != request:
        raise UserError(f"{output} exists and was trained from other text or settings; choose another output, or remove it")


def _train(config: TrainTokenizerConfig, files: list[InputFile]) -> bytes:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_lines(config, files),
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
    except (RuntimeError, OSError) as error:
        raise UserError(f"no tokenizer of {config.vocab_size} pieces can be trained on this text: {_explanation(str(error))}") from error
    return model.getvalue()


def _explanation(complaint: str) -> str:
    """sentencepiece's complaint as reason and advice."""
    if needed := re.search(r"required_chars\. \d+ vs (\d+)", complaint):
        return f"its characters alone need {needed[1]}; set vocab_size above that, or byte_fallback=false"
    if possible := re.search(r"<= (\d+)\.?\s*$", complaint):
        return f"it has no more than {possible[1]} different pieces; choose vocab_size={possible[1]}, or give more text"
    return " ".join(complaint.split())


def _lines(config: TrainTokenizerConfig, files: list[InputFile]) -> Iterator[str]:
    """Lines of the documents, files taking turns, until max_bytes. Records that cannot be read are left to `tokenize` to report."""
    left = config.max_bytes
    open_files = [read_records(file.path, config.text_key) for file in files]
    while open_files:
        for records in list(open_files):
            record = next(records, None)
            if record is None:
                open_files.remove(records)
                continue
            for line in (record.text or "").splitlines():
                for start in range(0, len(line), _MAX_LINE):
                    if left <= 0:
                        return
                    piece = line[start : start + _MAX_LINE]
                    left -= len(piece.encode())
                    yield piece
