"""The tokenizer of the data tests."""

from tests.data.conftest import model_file, tokenizer

__all__ = ["model_file", "tokenizer"]
