"""One face over sentencepiece and Hugging Face, and the rules for mask ids."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFace

from pretrain.data.tokenizer import Tokenizer, vocabulary_for
from pretrain.errors import UserError
from tests.data.examples import text

TEXTS = [text(30, 1), "", "a </s> <s> b", "two  spaces\n\nand\ttab", "mask <|endoftext|>", "日本語 \N{SLIGHTLY SMILING FACE}"]


@pytest.fixture(scope="module")
def json_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with a dedicated mask, saved with truncation and padding switched on, as happens."""
    model = HuggingFace(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|pad|>", "<|mask|>", "<|video|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator([text(200, 1)], trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet))
    model.add_tokens([AddedToken("Ophelia")])
    model.enable_truncation(4)
    model.enable_padding(length=4)
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    model.save(str(path))
    path.with_name("tokenizer_config.json").write_text(json.dumps({"pad_token": {"content": "<|pad|>"}, "eos_token": "<|endoftext|>"}))
    return path


def test_sentencepiece_equals_the_library(model_file: Path, tokenizer: Tokenizer) -> None:
    library = SentencePieceProcessor(model_file=str(model_file))
    assert tokenizer.encode(TEXTS) == library.encode(TEXTS)
    assert tokenizer.size == library.vocab_size()
    assert tokenizer.special_ids == {"unk": 0, "bos": 1, "eos": 2, "pad": 3}


def test_text_comes_back_and_never_makes_special_tokens(tokenizer: Tokenizer, json_file: Path) -> None:
    for either in (tokenizer, Tokenizer(json_file)):
        ids = either.encode(TEXTS)
        assert either.decode(ids) == TEXTS
        assert not {token for row in ids for token in row} & set(either.special_ids.values())
        assert max(token for row in ids for token in row) < either.size


def test_hugging_face_counts_added_tokens_and_ignores_saved_truncation(json_file: Path) -> None:
    tokenizer = Tokenizer(json_file)
    library = HuggingFace.from_file(str(json_file))
    assert tokenizer.size == library.get_vocab_size(with_added_tokens=True)
    assert tokenizer.encode(["Ophelia"]) == [[tokenizer.size - 1]]
    assert len(tokenizer.encode([text(30, 2)])[0]) > 4
    assert tokenizer.eos_id == library.token_to_id("<|endoftext|>")
    assert tokenizer.special_ids["pad"] == library.token_to_id("<|pad|>")


def test_hash_is_that_of_the_bytes(model_file: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.hash == hashlib.blake2b(model_file.read_bytes(), digest_size=32).hexdigest()
    assert tokenizer.name == "small.model"


def test_no_end_of_document_token(tmp_path: Path) -> None:
    HuggingFace(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="no end-of-document token"):
        Tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "content"), [("x.model", b"nonsense"), ("x.json", b"{}"), ("x.json", b"\xff"), ("x.txt", b"a"), ("missing.model", None)]
)
def test_files_that_are_no_tokenizers(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        Tokenizer(tmp_path / name)


def test_a_sentencepiece_model_cut_anywhere_is_refused(model_file: Path, tmp_path: Path) -> None:
    content = model_file.read_bytes()
    cut = tmp_path / "cut.model"
    whole = SentencePieceProcessor(model_file=str(model_file))
    between_pieces = []
    for length in (*range(0, 400, 7), *range(len(content) - 200, len(content))):
        cut.write_bytes(content[:length])
        with pytest.raises(UserError, match=rf"^tokenizer {cut} \({length} bytes\) cannot be loaded \(it is .*cut off.*\); copy it again$") as caught:
            Tokenizer(cut)
        assert "ParseFromArray" not in str(caught.value)
        between_pieces += ["pieces" in str(caught.value)]
    assert any(between_pieces), "the library itself takes a model that ends between two pieces"
    cut.write_bytes(content)
    assert Tokenizer(cut).size == whole.vocab_size()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("[]", r"tokenizer_config.json holds \[\], where an object"),
        ("null", "tokenizer_config.json holds None"),
        ("{", "tokenizer_config.json cannot be read .*; mend or remove it$"),
        ('{"eos_token": "nowhere"}', 'no end-of-document token; put a tokenizer_config.json with "eos_token", a token that it has, next to it'),
    ],
)
def test_settings_beside_a_tokenizer_that_do_not_serve(json_file: Path, tmp_path: Path, config: str, sentence: str) -> None:
    shutil.copy(json_file, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(UserError, match=sentence):
        Tokenizer(tmp_path / "tokenizer.json")


def test_a_tokenizer_without_tokens(tmp_path: Path) -> None:
    HuggingFace(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="it has 0 ids"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_the_mask_is_the_id_after_the_last(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_for(tokenizer, True, 128)
    assert (vocabulary.tokenizer_size, vocabulary.model_size, vocabulary.padded_size) == (320, 321, 384)
    assert (vocabulary.mask_id, vocabulary.eos_id) == (320, 2)
    plain = vocabulary_for(tokenizer, False, 64)
    assert (plain.model_size, plain.padded_size, plain.mask_id) == (320, 320, None)


def test_a_dedicated_slot_may_be_the_mask(json_file: Path) -> None:
    tokenizer = Tokenizer(json_file)
    vocabulary = vocabulary_for(tokenizer, True, 128, mask_id=2)
    assert (vocabulary.mask_id, vocabulary.model_size) == (2, tokenizer.size)


@pytest.mark.parametrize(
    ("mask", "reason"), [(0, "eos token"), (1, "pad token"), (3, "video"), (50, "text may use"), (9999, "outside"), (-1, "outside")]
)
def test_collisions_of_the_mask_are_refused(json_file: Path, mask: int, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        vocabulary_for(Tokenizer(json_file), True, 128, mask_id=mask)


@pytest.mark.parametrize("mask", [0, 1, 2, 3, 10, 300])
def test_collisions_of_the_mask_in_sentencepiece(tokenizer: Tokenizer, mask: int) -> None:
    with pytest.raises(UserError, match=f"mask id {mask}"):
        vocabulary_for(tokenizer, True, 128, mask_id=mask)


def test_an_objective_without_mask_takes_no_mask_id(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="no mask token"):
        vocabulary_for(tokenizer, False, 128, mask_id=320)
