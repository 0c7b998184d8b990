"""What a job runs once per node, through srun: becomes torchrun, with the rendezvous on the job's first node."""

import argparse
import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[0] = str(REPOSITORY)  # not this folder, whose files would shadow packages

from pretrain.cluster.peers import Peers  # noqa: E402
from pretrain.command_line import run_command  # noqa: E402


def torchrun(words: argparse.Namespace, peers: Peers) -> list[str]:
    """The command of this node. Which node holds the store is said, not guessed from names; and each says by which address others reach it."""
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(peers)}", f"--nproc-per-node={words.ranks}",
        f"--max-restarts={words.max_restarts}", f"--rdzv-id={words.id}", "--rdzv-backend=c10d", f"--rdzv-endpoint={peers.head}:{words.port}",
        f"--rdzv-conf=is_host={str(peers.own == 0).lower()}", f"--local-addr={peers.addresses[peers.own]}", *words.command,
    ]  # fmt: skip


def main() -> int:
    """Read the words of the batch script, and hand over to torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", required=True, help="NAME=ADDRESS of every node, the first node first")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="processes on this node")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--id", required=True, help="of the rendezvous: job and restart")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    words = parser.parse_args()
    command = torchrun(words, Peers.of_task(words.peers))
    # The package of this checkout, also where an image has one installed; and no process between srun and torchrun, so that signals arrive.
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    # A store of its own for every attempt: in a shared one, ranks that are started again find the addresses of their dead predecessors.
    own = {"PYTHONPATH": os.pathsep.join(paths), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    os.execve(command[0], command, os.environ | own)


if __name__ == "__main__":
    sys.exit(run_command(main, when_memory_is_full="ask for more memory with cluster.mem"))
