"""Loss and gradient by diffusion time: a spike that comes from rare small t looks different from one that comes from every t."""

import numpy as np

BINS = 10


class TimeBins:
    """Sums over samples, by t in `bins` equal parts of [0, 1].

    `sums` is a float64 table [bins, 5] of samples, tokens, loss, NELBO and squared logit-gradient norm. It is additive: micro-batches,
    steps and data-parallel ranks are added (an all-reduce of one small array).
    """

    def __init__(self, bins: int = BINS) -> None:
        self.sums = np.zeros((bins, 5))

    def records(self) -> list[dict[str, float]]:
        """One record per bin that saw a sample: bounds, samples, loss and NELBO in nats per token, root mean square of the logit-gradient norm."""
        bins = len(self.sums)
        return [
            {
                "low": i / bins,
                "high": (i + 1) / bins,
                "samples": int(samples),
                "loss": float(loss / tokens) if tokens else 0.0,
                "nelbo": float(nelbo / tokens) if tokens else 0.0,
                "logit_gradient_norm": float(np.sqrt(squared / samples)),
            }
            for i, (samples, tokens, loss, nelbo, squared) in enumerate(self.sums)
            if samples
        ]
