"""What a pretraining command takes besides the run itself: the assumptions of its plan. No torch here."""

from dataclasses import dataclass


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
