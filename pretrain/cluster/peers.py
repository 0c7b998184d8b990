"""The nodes of a job as one of its tasks sees them: the batch script hands them over, Slurm says which one this is. No torch here."""

import os
from dataclasses import dataclass

from pretrain.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Names and addresses of the nodes in Slurm's order, and the place of this one. The first node holds the store of a rendezvous."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    own: int

    def __len__(self) -> int:
        return len(self.names)

    @property
    def head(self) -> str:
        """Address of the first node."""
        return self.addresses[0]

    @staticmethod
    def of_task(text: str) -> "Peers":
        """From `NAME=ADDRESS,…` and SLURM_NODEID. Raises UserError where they do not describe a task of one job."""
        pairs = [pair.partition("=") for pair in text.split(",")]
        number = os.environ.get("SLURM_NODEID", "")
        if not all(name and address for name, _, address in pairs):
            raise UserError(f"--peers={text} must be NAME=ADDRESS of every node, with commas between")
        if not number.isdecimal() or int(number) >= len(pairs):
            raise UserError(f"SLURM_NODEID={number!r} must number one of the {len(pairs)} nodes of --peers: start this through srun, once per node")
        return Peers(names=tuple(name for name, _, _ in pairs), addresses=tuple(address for _, _, address in pairs), own=int(number))
