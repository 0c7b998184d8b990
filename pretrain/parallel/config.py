"""How a run is laid over ranks. No torch here: configuration must load in milliseconds."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the model-parallel axes; data parallelism is what remains of the world.

    tensor            TP: ranks that share each matrix.
    pipeline          PP: stages.
    virtual_pipeline  chunks per stage for the interleaved schedule; 1 is plain 1F1B.
    sequence          SP: split activations along the sequence between tensor-parallel regions; needs tensor > 1.
    zero_stage        DeepSpeed ZeRO: 1 with any layout, 2 and 3 at pipeline=1.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    sequence: bool = False
    zero_stage: int = 1

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline
