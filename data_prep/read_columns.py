"""Rows of Parquet files, and of Arrow files in either of Arrow's two formats (Hugging Face `datasets` writes streams).

Only the columns that are looked at are read, a few hundred rows at a time.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from data_prep.inputs import Piece
from data_prep.readers import Record, Wanted, record_of
from pretrain.errors import UserError

_ROWS = 256
T = TypeVar("T")


def row_group_sizes(path: Path) -> list[int]:
    """Bytes of each row group, compressed. UserError for a file that is no Parquet."""
    import pyarrow.parquet as parquet

    def sizes() -> list[int]:
        with parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        return [sum(group.column(column).total_compressed_size for column in range(group.num_columns)) for group in groups]

    return _guarded(path, "Parquet", sizes)


def parquet_records(piece: Piece, wanted: Wanted) -> Iterator[Record]:
    """A record per row."""
    import pyarrow.parquet as parquet

    path = Path(piece.path)
    file = _guarded(path, "Parquet", lambda: parquet.ParquetFile(path))
    with file:
        _require_columns(path, file.schema_arrow, wanted)
        groups = range(file.metadata.num_row_groups)[piece.start : piece.stop]
        before = sum(file.metadata.row_group(number).num_rows for number in range(piece.start))
        total = sum(file.metadata.row_group(number).num_rows for number in groups)
        batches = file.iter_batches(batch_size=_ROWS, row_groups=list(groups), columns=_columns(file.schema_arrow, wanted))
        yield from _rows(piece, "Parquet", batches, wanted, before, total)


def arrow_records(piece: Piece, wanted: Wanted) -> Iterator[Record]:
    """A record per row of an Arrow file (random access) or stream."""
    import pyarrow as arrow

    path = Path(piece.path)
    if piece.size == 0:
        raise UserError(f"{path} is damaged or not Arrow (it is empty); copy it again, or leave it out of the input")
    with _guarded(path, "Arrow", lambda: arrow.memory_map(str(path))) as mapped:
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        reader = _guarded(path, "Arrow", lambda: arrow.ipc.open_file(mapped) if is_file else arrow.ipc.open_stream(mapped))
        _require_columns(path, reader.schema, wanted)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else _stream(reader, mapped, path)
        names = _columns(reader.schema, wanted)
        small = (batch.select(names).slice(start, _ROWS) for batch in batches for start in range(0, batch.num_rows, _ROWS))
        yield from _rows(piece, "Arrow", small, wanted, 0, None, mapped.tell)


def _stream(reader: Any, mapped: Any, path: Path) -> Iterator[Any]:
    """The batches of a stream. UserError where its end mark is missing, which Arrow's reader takes for an end."""
    yield from reader
    mapped.seek(max(mapped.size() - 8, 0))
    if mapped.read(8) != b"\xff\xff\xff\xff\0\0\0\0":
        raise UserError(f"{path} is damaged or cut off (its stream has no end mark); copy it again, or leave it out of the input")


def _rows(
    piece: Piece, kind: str, batches: Iterator[Any], wanted: Wanted, row: int, total: int | None, place: Callable[[], int] | None = None
) -> Iterator[Record]:
    first, path = row, Path(piece.path)
    while (batch := _guarded(path, kind, lambda: next(batches, None))) is not None:
        rows = _guarded(path, kind, batch.to_pylist)
        for value in rows:
            row += 1
            position = min(place(), piece.size) if place else piece.size * (row - first) // max(total or 1, 1)
            yield record_of(value, wanted, row, position)


def _guarded(path: Path, kind: str, action: Callable[[], T]) -> T:
    import pyarrow as arrow

    try:
        return action()
    except UserError:
        raise
    except (arrow.ArrowException, UnicodeDecodeError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's own; a body that is cut off has none
            raise
        raise UserError(f"{path} is damaged or not {kind} ({' '.join(str(error).split())}); copy it again, or leave it out of the input") from error


def _columns(schema: Any, wanted: Wanted) -> list[str]:
    """Top-level columns that hold the keys."""
    return list(dict.fromkeys(_column(schema, key) or "" for key in (wanted.text_key, *wanted.filter.keys)))


def _column(schema: Any, key: str) -> str | None:
    parts = key.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in schema.names and _reaches(schema.field(name).type, key[len(name) + 1 :])), None)


def _reaches(kind: Any, rest: str) -> bool:
    """Whether a column of this type has the field at the dotted path `rest`."""
    import pyarrow as arrow

    if not rest:
        return True
    if not arrow.types.is_struct(kind):
        return False
    return any(
        _reaches(inner.type, rest[len(inner.name) + 1 :])
        for inner in (kind.field(number) for number in range(kind.num_fields))
        if rest == inner.name or rest.startswith(f"{inner.name}.")
    )


def _require_columns(path: Path, schema: Any, wanted: Wanted) -> None:
    for key in (wanted.text_key, *wanted.filter.keys):
        if _column(schema, key) is None:
            way = "set text_key to one of them" if key == wanted.text_key else "mend keep or drop"
            raise UserError(f"{path} has no column {key!r}; it has {', '.join(schema.names)}: {way}")
