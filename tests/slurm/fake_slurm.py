"""What stands in for Slurm where it cannot be had: commands that run the batch script for real, on this machine."""

import os
import subprocess
import sys
from pathlib import Path

COMMANDS = Path(__file__).parent / "fake"


class FakeSlurm:
    """The commands of tests/slurm/fake first on PATH. environment: what a command needs to find them."""

    kind = "fake"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        path = f"{COMMANDS}:{Path(sys.executable).parent}:{os.environ['PATH']}"  # their interpreter is this one, which has psutil
        self.environment = os.environ | {"FAKE_SLURM": str(folder), "PATH": path}

    def command(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """A command of Slurm."""
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)

    def stop(self) -> None:
        """Cancel what is left; the supervisors end by themselves."""
        for path in (Path(self.environment["FAKE_SLURM"]) / "jobs").glob("*.json"):
            self.command("scancel", path.stem)
