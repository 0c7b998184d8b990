"""What `launchers/evaluate.py task=gsm8k` takes. Values are checked when one is made. No torch here: configuration must load in milliseconds."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pretrain.data.sft_format import TEMPLATES, with_line_breaks
from pretrain.errors import UserError
from pretrain.hf_model.sampling_settings import SAMPLERS
from pretrain.sampling.config import SamplerSettings, SamplingConfig, check_values

LEFT_TO_RIGHT = "left_to_right"
FORMAT_TEXTS = tuple(f"format.{name}" for name in TEMPLATES)
"""Keys whose values a command line takes as they stand."""
_RANGES = {
    "items": (1, 10**9, "leave it out for all"),
    "shots": (0, 1000, "use 0 for none"),
    "throughput_items": (0, 10**6, "use 0 for no measurement"),
    "batch": (1, 2**16, "use for example 16"),
}
_NOT_EMPTY = {
    "data": "give the test problems, for example test.jsonl",
    "shots_data": "give the problems that shots are taken from, for example train.jsonl",
    "train": "leave it out, or give the training problems",
    "output": "leave it out for a folder beside the model",
}


@dataclass(frozen=True, kw_only=True)
class FormatConfig:
    """The prompt format where it is not the one that the model was fine-tuned with; None: the model's. Meaning: SFTFormat.

    In the three templates the two characters \\n stand for a line break.
    """

    examples: Literal["one", "two"] | None = None
    question: str | None = None
    rationale: str | None = None
    answer: str | None = None
    annotations: Literal["keep", "drop", "plain"] | None = None
    segment_bos: bool | None = None
    context: int | None = None

    def given(self) -> dict[str, Any]:
        """What was said."""
        said = {name: value for name, value in vars(self).items() if value is not None}
        return with_line_breaks(said)


@dataclass(frozen=True, kw_only=True)
class GSM8KEvaluation(SamplerSettings):
    """How to score a model's answers to word problems.

    checkpoint        a run directory (runs/NAME): its newest complete checkpoint; one checkpoint's folder; or an exported Hugging Face folder.
    step              which checkpoint of the run directory; None: the newest complete one.
    data              test problems: GSM8K's own test.jsonl (or .parquet), Deng et al.'s .txt, or a file of prepare_data.py gsm8k or gsm_symbolic.
    items             how many, from the start of the file; None: all.
    train             training problems, whose most frequent answer is the baseline; None: that of the test problems.
    shots             worked examples before each question.
    shots_data        where they come from: its first problems; needed with shots.
    sampler           left_to_right: one token at a time, for every objective; or a sampler of the objective's own (sample.py --help).
    temperature       divides the logits; None: 0, the most likely token, from left to right, and 1, the model's own law, for the other samplers
                      and with top_k or top_p.
    top_k, top_p      as in sample.py.
    batch             problems at once; the outputs do not depend on it.
    throughput_items  so many problems are answered again, one at a time, to measure tokens per second; 0: none.
    confidence        of the intervals.
    seed              of the noise: the noise of a problem follows from seed and number of the problem alone.
    output            folder for samples, disagreements and card; None: gsm8k/SAMPLER-… beside the model.
    format            what differs from the format that the model was fine-tuned with.
    device, dtype     as in sample.py.
    """

    checkpoint: str
    data: str
    step: int | None = None
    items: int | None = None
    train: str | None = None
    shots: int = 0
    shots_data: str | None = None
    sampler: str = LEFT_TO_RIGHT
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    batch: int = 16
    throughput_items: int = 8
    confidence: float = 0.95
    seed: int = 1
    output: str | None = None
    format: FormatConfig = field(default_factory=FormatConfig)
    device: str = "auto"
    dtype: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        """Raises UserError for what no model could be scored with."""
        check_values(self, _RANGES, _NOT_EMPTY)
        if self.shots and self.shots_data is None:
            raise UserError(f"shots={self.shots} needs shots_data=FILE, whose first problems are shown with their answers; for example train.jsonl")
        if self.shots_data is not None and not self.shots:
            raise UserError(f"shots_data={self.shots_data} is read for shots only; add shots=N, or leave it out")
        if not 0.5 <= self.confidence < 1:
            raise UserError(f"confidence={self.confidence} must lie in [0.5, 1); use for example 0.95")
        self.sampling(self.sampler)

    def sampling(self, sampler: str) -> SamplingConfig:
        """These settings as sample.py takes them, for `sampler`; raises UserError where it would."""
        greedy = self.sampler == LEFT_TO_RIGHT and not self.top_k and self.top_p == 1
        temperature = self.temperature if self.temperature is not None else 0.0 if greedy else 1.0
        return SamplingConfig(
            checkpoint=self.checkpoint, step=self.step, sampler=sampler, batch=self.batch, temperature=temperature, top_k=self.top_k,
            top_p=self.top_p, seed=self.seed, device=self.device, dtype=self.dtype, **self.settings(),
        )  # fmt: skip

    def sampler_of(self, objective: str) -> str:
        """The name of the sampler: from left to right is what autoregression does by nature."""
        return "ar" if self.sampler == LEFT_TO_RIGHT and LEFT_TO_RIGHT not in SAMPLERS[objective] else self.sampler
