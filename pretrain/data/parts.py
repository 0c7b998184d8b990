"""How a global batch is shared out among the parts of an objective that are noised in different ways. No torch here."""

from collections.abc import Sequence


def part_sizes(shares: Sequence[float], global_sequences: int) -> list[int]:
    """Sequences of each part, in order; they add up to the global batch."""
    ends = [round(sum(shares[: i + 1]) * global_sequences) for i in range(len(shares))]
    ends[-1] = global_sequences
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def part_of(position: int, sizes: Sequence[int]) -> tuple[int, int]:
    """(part, place within it) of a position in the global batch."""
    for part, size in enumerate(sizes):
        if position < size:
            return part, position
        position -= size
    raise ValueError(f"position lies {position + 1} beyond the global batch of {sum(sizes)}")
