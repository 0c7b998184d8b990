"""Exports load, score, sample, save and load again where nothing but torch, transformers and safetensors can be imported.

tests/clean_venv.sh does the same in real environments, of the oldest and the newest version of transformers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.convert.config import HubConfig
from pretrain.convert.hub_export import open_export, write_folder
from tests.convert.damages import OBJECTIVES
from tests.convert.trained import write_run

SCRIPT = Path(__file__).parents[1] / "clean_load.py"


@pytest.mark.slow
def test_with_three_packages_alone(tmp_path: Path) -> None:
    folders = []
    for name, objective in OBJECTIVES.items():
        llama = {"kind": "llama", "heads": 4, "kv_heads": 2, "cond_dim": 128} if name in ("ar", "mdm_prime") else {}
        run, _ = write_run(tmp_path / "runs" / name, objective, **llama)
        for kind in ("own", "stock") if name == "ar" else ("own",):
            folders.append(tmp_path / f"{name}_{kind}")
            export = open_export(HubConfig(checkpoint=str(run), output=str(folders[-1]), format=kind))  # type: ignore[arg-type]
            folders[-1].mkdir()
            write_folder(export, folders[-1])
    # Our package names a torch backend to make torchrun quiet; torch would import it.
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, folders)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [record["folder"] for record in found] == [folder.name for folder in folders]
    assert found[0]["made"] == found[1]["made"] and found[0]["logits"] == pytest.approx(found[1]["logits"], rel=1e-5)
