"""Pretraining of billion-parameter language models: autoregressive and diffusion objectives over Megatron-core and DeepSpeed."""
