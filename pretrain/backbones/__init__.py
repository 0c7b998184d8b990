"""Networks for training. Importing this package also keeps quiet what megatron-core says on import about optional libraries."""

import warnings

# "Transformer Engine and Apex are not installed", once per module of megatron-core: true, and of no use to whoever starts a run.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
