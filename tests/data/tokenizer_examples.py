"""Small tokenizers of every family that the cut rules know, and some that they do not, trained on the same words."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path

from sentencepiece import SentencePieceTrainer
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFace

from pretrain.data.cut_rules import PATTERNS
from tests.data.examples import text

CORPUS = [text(200, seed) for seed in range(5)] + ["aa aaaa  aaaaaaaa\n\n\tif x:\n        return 1e10  # Größe\n", "日本語 テキスト。\n中文 文本"]


def sentencepiece(folder: Path, name: str, **settings: object) -> Path:
    """A model trained as most are, but for the settings."""
    model = io.BytesIO()
    defaults = {"model_type": "bpe", "vocab_size": 420, "byte_fallback": True, "character_coverage": 1.0, "num_threads": 1, "minloglevel": 2}
    lines = (line for document in CORPUS for line in document.split("\n"))
    SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **(defaults | settings))
    path = folder / f"{name}.model"
    path.write_bytes(model.getvalue())
    return path


def hugging_face(folder: Path, name: str, normalizer: object, splitter: object, kind: str = "BPE", **settings: object) -> Path:
    """A tokenizer.json of its own folder."""
    byte_level = pre_tokenizers.ByteLevel.alphabet()
    if kind == "BPE":
        model, trainer = HuggingFace(models.BPE(**settings)), trainers.BpeTrainer  # type: ignore[arg-type]
        options = {"vocab_size": 400, "initial_alphabet": byte_level if "unk_token" not in settings else []}
    else:
        model, trainer = HuggingFace(models.WordPiece(unk_token="<unk>")), trainers.WordPieceTrainer
        options = {"vocab_size": 200}
    model.normalizer, model.pre_tokenizer, model.decoder = normalizer, splitter, decoders.ByteLevel()
    model.train_from_iterator(CORPUS, trainer(special_tokens=["<unk>", "</s>"], show_progress=False, **options))
    path = folder / name / "tokenizer.json"
    path.parent.mkdir()
    model.save(str(path))
    return path


def _byte_level(pattern: str | None = None) -> object:
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _llama2(folder: Path, name: str) -> Path:
    path = hugging_face(folder, name, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
                        pre_tokenizers.Metaspace(prepend_scheme="never"), unk_token="<unk>", fuse_unk=True)  # fmt: skip
    raw = json.loads(path.read_text())  # its merges never cross a space, and it splits no text before them
    raw["pre_tokenizer"] = None
    path.write_text(json.dumps(raw))
    return path


def tiktoken_ranks(folder: Path, name: str, pattern: str) -> Path:
    """Bytes, and merges of common words."""
    words = [b"th", b"the", b" the", b" k", b"ki", b"ing", b"in", b"sl", b" sl", b"an", b"and", b" and", b"\n\n", b"  ", b"    ", b"aa", b"aaaa"]
    tokens = [bytes([byte]) for byte in range(256)] + words
    path = folder / f"{name}.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens)))
    special = {"<|end|>": len(tokens), "<|reserved_0|>": len(tokens) + 1}
    Path(f"{path}.json").write_text(json.dumps({"pattern": pattern, "special_tokens": special, "eos_token": "<|end|>"}))
    return path


ODD_PATTERN = r"\w+ \w+|\s|."
Make = Callable[[Path, str], Path]
PROVEN: dict[str, Make] = {
    "sentencepiece bpe, plain": lambda folder, name: sentencepiece(
        folder, name, add_dummy_prefix=False, remove_extra_whitespaces=False, normalization_rule_name="identity", user_defined_symbols=["\n"]
    ),
    "sentencepiece bpe, plain, no bytes": lambda folder, name: sentencepiece(
        folder, name, add_dummy_prefix=False, remove_extra_whitespaces=False, normalization_rule_name="identity", byte_fallback=False, vocab_size=110
    ),
    "sentencepiece bpe, Llama 2": lambda folder, name: sentencepiece(
        folder, name, remove_extra_whitespaces=False, normalization_rule_name="identity", user_defined_symbols=["▁▁", "▁▁▁▁"]
    ),
    "sentencepiece bpe, NFKC and merged spaces": lambda folder, name: sentencepiece(folder, name),
    "sentencepiece bpe, NFKC and lower case": lambda folder, name: sentencepiece(folder, name, normalization_rule_name="nmt_nfkc_cf"),
    "byte-level": lambda folder, name: hugging_face(folder, name, None, _byte_level()),
    "byte-level, NFC": lambda folder, name: hugging_face(folder, name, normalizers.NFC(), _byte_level(PATTERNS["qwen2"])),
    "byte-level, NFKC": lambda folder, name: hugging_face(folder, name, normalizers.NFKC(), _byte_level(PATTERNS["llama3"])),
    "byte-level, o200k": lambda folder, name: hugging_face(folder, name, None, _byte_level(PATTERNS["o200k"])),
    "metaspace": lambda folder, name: hugging_face(folder, name, None, pre_tokenizers.Metaspace(), unk_token="<unk>"),
    "Llama 2": _llama2,
    "WordPiece": lambda folder, name: hugging_face(folder, name, normalizers.Lowercase(), pre_tokenizers.Whitespace(), "WordPiece"),
    **{f"tiktoken, {name}": (lambda pattern: lambda folder, name: tiktoken_ranks(folder, name, pattern))(name) for name in PATTERNS},
}
"""Name -> makes a tokenizer file of which a cut rule is known."""
UNPROVEN: dict[str, Make] = {
    "sentencepiece unigram": lambda folder, name: sentencepiece(folder, name, model_type="unigram", vocab_size=380, hard_vocab_limit=False),
    "sentencepiece bpe, spaces after words": lambda folder, name: sentencepiece(folder, name, treat_whitespace_as_suffix=True),
    "byte-level, odd pattern": lambda folder, name: hugging_face(folder, name, None, _byte_level(ODD_PATTERN)),
    "byte-level, stripped": lambda folder, name: hugging_face(folder, name, normalizers.Strip(), _byte_level()),
    "tiktoken, odd pattern": lambda folder, name: tiktoken_ranks(folder, name, ODD_PATTERN),
}
