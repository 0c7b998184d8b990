"""What a job runs once per node before it trains, through srun: are the nodes fit for it? 0 if so, 1 with what is wrong."""

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, whose files would shadow packages

from pretrain.cluster.peers import Peers  # noqa: E402
from pretrain.cluster.preflight import preflight  # noqa: E402
from pretrain.command_line import run_command  # noqa: E402


def main() -> int:
    """Read the words of the batch script, and look."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", required=True, help="NAME=ADDRESS of every node, the first node first")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that every node must have")
    parser.add_argument("--free-bytes", type=int, default=0)
    words = parser.parse_args()
    peers = Peers.of_task(words.peers)
    sound = preflight(peers, port=words.port, run_directory=words.run_directory, gpus=words.gpus, free_bytes=words.free_bytes)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(run_command(main, when_memory_is_full="ask for more memory with cluster.mem"))
