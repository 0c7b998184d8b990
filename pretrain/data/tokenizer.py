"""One face for three kinds of tokenizer file: a sentencepiece .model, a Hugging Face tokenizer.json, and tiktoken ranks.

Text never becomes a special token here: "</s>" in a document is encoded as the characters that it is. Neither BOS nor EOS is added;
whoever writes documents appends `eos_id`.
"""

import hashlib
import json
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from pretrain.data.cut_rules import CutRule, hugging_face_rule, sentencepiece_rule
from pretrain.data.tiktoken_file import TiktokenRanks, looks_like_ranks
from pretrain.data.tokenizer_files import Unusable, messages
from pretrain.errors import UserError
from pretrain.parallel.vocabulary import Vocabulary

_EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[SEP]", "<|im_end|>")
_PARTS = {1, 2, 3}
"""Fields of a sentencepiece model that every trained one has, in this order: pieces, trainer's settings, normaliser's settings."""
_DEDICATED = re.compile(r"mask|reserved|unused|<SPECIAL_\d+>", re.IGNORECASE)


class _Backend(Protocol):
    size: int
    eos_id: int | None
    special_ids: dict[str, int]

    def encode(self, texts: list[str]) -> list[list[int]]: ...

    def decode(self, ids: list[list[int]]) -> list[str]: ...

    def piece(self, token: int) -> str: ...

    def emits(self, token: int) -> bool: ...

    def cut_rule(self) -> CutRule | None: ...


class Tokenizer:
    """Text to ids and back.

    size         number of ids, added tokens included (largest id + 1).
    eos_id       the document separator.
    special_ids  role ("eos", "bos", "pad", "unk") -> id, where the tokenizer has one.
    hash         BLAKE2b-256 of the file (for tiktoken also of its settings), in hex; the manifest of a corpus names it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise UserError(
                f"tokenizer {self.path} cannot be read ({error.strerror}); give a sentencepiece .model, a tokenizer.json or a .tiktoken file, "
                "or train one with: "
                "python launchers/prepare_data.py train_tokenizer input=TEXT output=NAME.model"
            ) from error
        self.name = self.path.name
        self._backend = _open(self.path, content)
        self.hash = hashlib.blake2b(content + getattr(self._backend, "settings", b""), digest_size=32).hexdigest()
        self.size = self._backend.size
        self.special_ids = self._backend.special_ids
        if self._backend.eos_id is None:
            way_out = ' put a tokenizer_config.json with "eos_token", a token that it has, next to it, or' if self.path.suffix == ".json" else ""
            raise UserError(
                f"{self.path} has no end-of-document token;{way_out} train a tokenizer with: "
                "python launchers/prepare_data.py train_tokenizer input=TEXT output=NAME.model"
            )
        self.eos_id: int = self._backend.eos_id

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without BOS or EOS."""
        return self._backend.encode(texts)

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Text of each list of ids; special tokens vanish."""
        return self._backend.decode(ids)

    @cached_property
    def cut_rule(self) -> CutRule | None:
        """Where any text may be cut without changing its ids; None where nothing is proven of this tokenizer."""
        return self._backend.cut_rule()

    def piece(self, token: int) -> str:
        """How the tokenizer writes this id."""
        return self._backend.piece(token)

    def emits(self, token: int) -> bool:
        """Whether some text is encoded to this id."""
        return self._backend.emits(token)


def vocabulary_for(tokenizer: Tokenizer, needs_mask: bool, vocab_multiple: int, mask_id: int | None = None) -> Vocabulary:
    """The three vocabulary sizes of a run.

    mask_id  None: the id after the tokenizer's last (no text can ever use it). Otherwise a slot that the tokenizer keeps free for it.

    UserError when the mask id is a token that text is encoded to, a special token with another role, or outside the vocabulary.
    """
    size, eos = tokenizer.size, tokenizer.eos_id
    if not needs_mask:
        if mask_id is not None:
            raise UserError(f"mask id {mask_id} is set, but this objective has no mask token; remove it")
        return Vocabulary(tokenizer_size=size, model_size=size, padded_size=Vocabulary.padded(size, vocab_multiple), mask_id=None, eos_id=eos)
    mask = size if mask_id is None else mask_id
    _require_free(tokenizer, mask)
    model_size = max(size, mask + 1)
    return Vocabulary(tokenizer_size=size, model_size=model_size, padded_size=Vocabulary.padded(model_size, vocab_multiple), mask_id=mask, eos_id=eos)


def _require_free(tokenizer: Tokenizer, mask: int) -> None:
    size = tokenizer.size
    if not 0 <= mask <= size:
        raise UserError(f"mask id {mask} lies outside [0, {size}]; use {size}, the first id after the tokenizer's")
    if mask == size:
        return
    for role, token in tokenizer.special_ids.items():
        if token == mask:
            raise UserError(f"mask id {mask} is the {role} token of {tokenizer.name}; use {size}, the first id after the tokenizer's")
    piece = tokenizer.piece(mask)
    if tokenizer.emits(mask) or not _DEDICATED.search(piece):
        raise UserError(f"mask id {mask} is the token {piece!r} of {tokenizer.name}, which text may use; use {size}, the first free id")


class _SentencePiece:
    def __init__(self, content: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self._model = SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except RuntimeError as error:  # its message is a line of its C++ source
            raise Unusable("it is not a sentencepiece model, or cut off") from error
        self._content = content
        if _PARTS - {field for field, _ in messages(content)}:  # the library takes what is there when the end falls between two pieces
            raise Unusable(f"it is cut off after {self._model.vocab_size()} pieces")
        self.size: int = self._model.vocab_size()
        roles = {"eos": self._model.eos_id(), "bos": self._model.bos_id(), "pad": self._model.pad_id(), "unk": self._model.unk_id()}
        self.special_ids = {role: token for role, token in roles.items() if token >= 0}
        self.eos_id = self.special_ids.get("eos")

    def encode(self, texts: list[str]) -> list[list[int]]:
        # one thread: whole files are already spread over processes
        return self._model.encode(texts, out_type=int, add_bos=False, add_eos=False, num_threads=1)

    def decode(self, ids: list[list[int]]) -> list[str]:
        return [self._model.decode(row) for row in ids]

    def piece(self, token: int) -> str:
        return self._model.id_to_piece(token)

    def emits(self, token: int) -> bool:
        return not (self._model.is_control(token) or self._model.is_unused(token))

    def cut_rule(self) -> CutRule | None:
        return sentencepiece_rule(self._content, [self._model.id_to_piece(token) for token in range(self.size)], self._model)


class _HuggingFace:
    def __init__(self, path: Path, content: bytes) -> None:
        from tokenizers import Tokenizer as Model

        try:
            self._model = Model.from_str(content.decode("utf-8"))
        except Exception as error:  # that is what the library raises
            raise Unusable(f"it is not a Hugging Face tokenizer.json: {' '.join(str(error).split())}") from error
        # both are stored in the file by whoever used it last, and would cut or pad documents
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        self.size: int = max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.size < 2**31:
            raise Unusable(f"it has {self.size} ids, and a corpus holds between 1 and 2^31")
        self._special = {token for token, added in self._model.get_added_tokens_decoder().items() if added.special}
        self.special_ids = self._roles(path)
        self.eos_id = self.special_ids.get("eos")

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._model.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[list[int]]) -> list[str]:
        return self._model.decode_batch(ids, skip_special_tokens=True)

    def piece(self, token: int) -> str:
        return self._model.id_to_token(token) or ""

    def emits(self, token: int) -> bool:
        return token not in self._special

    def cut_rule(self) -> CutRule | None:
        return hugging_face_rule(json.loads(self._model.to_str()))

    def _roles(self, path: Path) -> dict[str, int]:
        names = _token_names(path.with_name("tokenizer_config.json"))
        if "eos" not in names:
            known = [name for name in _EOS_NAMES if self._model.token_to_id(name) is not None]
            if known:
                names["eos"] = known[0]
        found = {role: self._model.token_to_id(name) for role, name in names.items()}
        return {role: token for role, token in found.items() if token is not None}


def _token_names(path: Path) -> dict[str, str]:
    """Role -> token text from a Hugging Face tokenizer_config.json, where there is one."""
    if not path.exists():
        return {}
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); mend or remove it") from error
    if not isinstance(config, dict):
        raise UserError(f'{path} holds {config!r:.40}, where an object such as {{"eos_token": "</s>"}} is needed; mend or remove it')
    tokens = {role: config.get(f"{role}_token") for role in ("eos", "bos", "pad", "unk")}
    texts = {role: token.get("content") if isinstance(token, dict) else token for role, token in tokens.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _open(path: Path, content: bytes) -> _Backend:
    kinds: dict[str, Callable[[], _Backend]] = {
        ".model": lambda: TiktokenRanks(path, content) if looks_like_ranks(content) else _SentencePiece(content),  # Llama 3's ranks are named so
        ".json": lambda: _HuggingFace(path, content),
        ".tiktoken": lambda: TiktokenRanks(path, content),
    }
    if path.suffix not in kinds:
        raise UserError(f"tokenizer {path} is neither a sentencepiece .model, a Hugging Face tokenizer.json nor a .tiktoken file; convert it to one")
    try:
        return kinds[path.suffix]()
    except Unusable as error:
        raise UserError(f"tokenizer {path} ({len(content)} bytes) cannot be loaded ({error}); copy it again") from error
