"""What the fork server imports once for all distributed tests."""

import os
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import deepspeed  # noqa: E402, F401
import megatron.core.pipeline_parallel  # noqa: E402, F401
import torch  # noqa: E402, F401

import pretrain.backbones.megatron  # noqa: E402, F401
import pretrain.engine.zero  # noqa: E402, F401
