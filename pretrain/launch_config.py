"""What a pretraining command takes besides the run itself: the assumptions of its plan, the terms of a verification. No torch here."""

from dataclasses import dataclass, field
from typing import Literal

from pretrain.errors import UserError
from pretrain.parallel.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Assumptions of a plan; nothing here changes a run.

    ranks       processes to plan for; None: those of this command.
    memory_gib  memory of one rank in GiB; None: this machine's, shared by its local ranks.
    vocabulary  classes of the model (tokenizer and mask), used while the tokenizer file is not there yet.
    mfu         model FLOPs utilisation to assume for the time estimate, as a fraction of the peak.
    """

    ranks: int | None = None
    memory_gib: float | None = None
    vocabulary: int | None = None
    mfu: float = 0.4


SELFTEST_STEPS = 200
"""Steps within which the loss of a self-test must have fallen; it ends when it has, in the tiny presets after 16 to 45 steps."""
FEWEST_SELFTEST_STEPS = 3
"""Zero-initialised heads and modulation: the head alone has a gradient in the first step, embeddings in the second, matrices in the third."""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """A proof that this run resumes, in its place.

    verify         what is proved: resume.
    verify_steps   [N, M]: steps before the checkpoint, and after it; the kill comes in the first of the M.
    verify_ranks   processes to start; None: two, or the fewest that the run's layout needs.
    verify_layout  the other layout, for as many ranks; None: the first legal one of a list.
    verify_keep    keep the runs that were made.
    """

    verify: Literal["resume"]
    verify_steps: list[int] = field(default_factory=lambda: [3, 3])
    verify_ranks: int | None = None
    verify_layout: ParallelConfig | None = None
    verify_keep: bool = False

    def __post_init__(self) -> None:
        if len(self.verify_steps) != 2 or min(self.verify_steps) < 1:
            raise UserError(f"verify_steps={self.verify_steps} must be [N,M], steps before and after the checkpoint, such as verify_steps=[3,3]")
        if self.verify_ranks is not None and self.verify_ranks < 1:
            raise UserError(f"verify_ranks={self.verify_ranks} must be at least 1; leave it out for two, or what the layout needs")


VERIFY_KEYS = ("verify", "verify_steps", "verify_ranks", "verify_layout", "verify_keep")
