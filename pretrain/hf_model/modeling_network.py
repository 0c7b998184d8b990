"""One constructor for both networks."""

from .configuration_network import NetworkConfig
from .modeling_dit import DiT
from .modeling_llama import Llama


def build_network(config: NetworkConfig) -> DiT | Llama:
    """The network of `config`, with fresh weights."""
    return DiT(config) if config.kind == "dit" else Llama(config)
