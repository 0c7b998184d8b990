"""Text for the runs of a drill, made on the spot: words in a random order, a tokenizer of their characters, and a prepared corpus."""

import json
import random
from pathlib import Path
from typing import Any

from data_prep.config import TokenizeConfig, TrainTokenizerConfig
from data_prep.prepare import prepare
from data_prep.train_tokenizer import train_tokenizer

WORDS = ("the", "queue", "is", "long", "and", "every", "node", "may", "fail", "at", "night", "but", "no", "step", "was", "lost", "before")
DOCUMENTS, DOCUMENT_WORDS, PIECES = 200, 300, 60


def drill_sources(folder: Path) -> dict[str, Any]:
    """Tokenizer and data of a configuration; what is in `folder` from an earlier drill is used again."""
    text, tokenizer, corpus = folder / "text.jsonl", folder / "tokenizer.model", folder / "corpus"
    if not text.exists():
        draw = random.Random(1)
        lines = (json.dumps({"text": " ".join(draw.choices(WORDS, k=DOCUMENT_WORDS))}) for _ in range(DOCUMENTS))
        folder.mkdir(parents=True, exist_ok=True)
        text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    train_tokenizer(TrainTokenizerConfig(input=str(text), output=str(tokenizer), vocab_size=PIECES, byte_fallback=False))
    prepare(TokenizeConfig(input=str(text), tokenizer=str(tokenizer), output=str(corpus), workers=1))
    return {"tokenizer": str(tokenizer), "data": {"train": {"text": {"path": str(corpus)}}, "validation": {}}}
