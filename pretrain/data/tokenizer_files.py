"""What the readers of tokenizer files share: a file that does not serve, and the fields of a protobuf message."""

from collections.abc import Iterator


class Unusable(Exception):
    """Why the content of a tokenizer file does not serve."""


def messages(content: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, content) of every field of a protobuf message that has a stated length; other fields are skipped, and a broken end ends it."""
    for number, value in fields(content):
        if isinstance(value, bytes):
            yield number, value


def fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of every field of a protobuf message: whole numbers, and bytes for everything else. A broken end ends it."""
    position = 0
    try:
        while position < len(content):
            key, position = _varint(content, position)
            kind = key & 7
            if kind == 0:
                value, position = _varint(content, position)
                yield key >> 3, value
                continue
            if kind == 2:
                size, position = _varint(content, position)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            else:
                return
            yield key >> 3, content[position : position + size]
            position += size
    except IndexError:
        return


def _varint(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        value, shift, position = value | (byte & 0x7F) << shift, shift + 7, position + 1
        if byte < 0x80:
            return value, position
