"""Which files an `input` means, and how a preparation recognises them again."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.data.files import sampled_hash
from pretrain.data.manifest import InputRecord
from pretrain.errors import UserError

SUFFIXES = (".txt", ".md", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


@dataclass(frozen=True)
class InputFile:
    """A file to read; `name` is its path from the input that it was found under, the same wherever the input lies."""

    path: Path
    name: str
    size: int

    def fingerprint(self) -> InputRecord:
        """Name, size, and hash of three blocks: does not change when the file is copied. UserError where it cannot be read."""
        try:
            return InputRecord(name=self.name, bytes=self.size, sample=sampled_hash(self.path))
        except OSError as error:
            raise _unreadable(self.path, error) from error


def find_inputs(given: str | list[str], output: Path) -> list[InputFile]:
    """All files below `given`, in a fixed order. UserError for what is missing, of another kind, empty, given twice, or holds `output`."""
    found: dict[Path, InputFile] = {}
    for text in [given] if isinstance(given, str) else given:
        root = Path(text)
        try:
            for path in _files(root, output):
                if path.resolve() in found:
                    raise UserError(f"input {path} is given twice; name every file or folder once")
                name = path.relative_to(root.parent).as_posix()
                found[path.resolve()] = InputFile(path, name, path.stat().st_size)
        except OSError as error:
            raise _unreadable(root, error) from error
    return list(found.values())


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"input {path} cannot be read ({error.strerror or error}); give files and folders that you may read")


def _files(root: Path, output: Path) -> list[Path]:
    if root.is_file():
        if not root.name.endswith(SUFFIXES):
            raise UserError(f"input {root} is of no known kind; known are {', '.join(SUFFIXES)}")
        return [root]
    if not root.is_dir():
        raise UserError(f"input {root} does not exist (looked from {Path.cwd()}); give a file or folder that does")
    if output.resolve().is_relative_to(root.resolve()):
        raise UserError(f"output {output} lies inside the input folder {root} and would be read by the next run; choose a folder outside it")
    hidden = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name.endswith(SUFFIXES)]
    files = [path for path in hidden if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    if not files:
        raise UserError(f"input folder {root} holds none of {', '.join(SUFFIXES)}; give the folder that holds the text")
    return files
