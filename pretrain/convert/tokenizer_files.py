"""A run's tokenizer as the files that AutoTokenizer reads, with equal ids.

A sentencepiece model becomes a tokenizer.json, by the converter of `transformers`; the .model itself goes along, for whoever trains on.
Text never becomes a special token, and nothing is added to it, as in training.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError

SENTENCEPIECE = "tokenizer.model"
JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json (and the .model). Raises UserError for a sentencepiece model that cannot be converted."""
    if tokenizer.path.suffix == ".model":
        shutil.copyfile(tokenizer.path, folder / SENTENCEPIECE)
        _fast(tokenizer).save(str(folder / JSON))
    else:
        shutil.copyfile(tokenizer.path, folder / JSON)
    pieces = {role: tokenizer.piece(token) for role, token in tokenizer.special_ids.items()}
    eos = tokenizer.piece(tokenizer.eos_id)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "pad_token": pieces.get("pad", eos),
        "model_max_length": length,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    config |= {f"{role}_token": pieces[role] for role in ("bos", "unk") if role in pieces}
    (folder / CONFIG).write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def tokenizer_file(folder: Path) -> Path:
    """The file of an exported folder that training reads: the sentencepiece model where there is one. Raises UserError without any."""
    for name in (SENTENCEPIECE, JSON):
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder} has neither {SENTENCEPIECE} nor {JSON}; put the model's tokenizer there")


def _fast(tokenizer: Tokenizer) -> Any:
    """tokenizers.Tokenizer with the same pieces and rules."""
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import SpmConverter, import_protobuf

    build = getattr(SpmConverter, "build_tokenizer_from_spm_proto", None)
    if build is None:
        raise UserError("this version of transformers cannot convert a sentencepiece model by itself; install the one in requirements.lock")
    proto = import_protobuf().ModelProto()
    proto.ParseFromString(tokenizer.path.read_bytes())
    unigram = proto.trainer_spec.model_type == 1
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    vocabulary: Any = pieces if unigram else {piece: number for number, (piece, _) in enumerate(pieces)}
    fast = build(proto, vocabulary)
    control = [piece.piece for piece in proto.pieces if piece.type in (2, 3)]
    fast.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in control])
    return fast
