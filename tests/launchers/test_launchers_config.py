"""launchers/pretrain.py and plan.py as a user starts them: subprocesses, from another directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.presets import LADDER_OBJECTIVES

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def launch(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an empty folder, without the repository on the module path."""
    hidden = ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    return subprocess.run(command, cwd=folder, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)


def test_cfg_prints_the_composed_configuration_and_leaves_nothing(tmp_path: Path) -> None:
    result = launch(tmp_path, sys.executable, str(ROOT / "launchers/pretrain.py"), "+model=mdlm_231M", "--cfg", "job")
    assert result.returncode == 0, result.stderr
    assert "name: mdlm_231M" in result.stdout and "hidden: 896" in result.stdout and "flops: 6" in result.stdout
    assert result.stderr == "" and list(tmp_path.iterdir()) == []


def test_help_lists_every_preset(tmp_path: Path) -> None:
    result = launch(tmp_path, sys.executable, str(ROOT / "launchers/pretrain.py"), "--help")
    assert result.returncode == 0
    for name in ("nemotron_phase2", "+model=PRESET", "mdlm_231M", "2121M"):
        assert name in result.stdout
    files = {path.stem for path in (ROOT / "configs/model").glob("*.yaml")}
    lines = [line.strip() for line in result.stdout.splitlines()]
    pairs = [line.partition(": ")[::2] for line in lines]
    presets = {objective: names.split(", ") for objective, names in pairs if objective in (*LADDER_OBJECTIVES, "others")}
    assert {name for names in presets.values() for name in names} == files and presets["mdm_prime"] == ["mdm_prime_v2_1p1b", "mdm_prime_tiny"]
    assert max(map(len, lines)) <= 150 and not any(line.startswith(("convert:", "prepare_data:", "cluster:")) for line in lines)


def test_help_lists_the_presets_of_another_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("mdlm_mine", "experiment"):
        (tmp_path / "model" / f"{name}.yaml").write_text("# @package _global_\nname: mine\n")
    result = launch(tmp_path, sys.executable, str(ROOT / "launchers/pretrain.py"), "--config-dir", str(tmp_path), "--help")
    assert "  others: experiment\n" in result.stdout and "mdlm_1p7b, mdlm_mine" in result.stdout, result.stderr


def test_a_mistake_is_one_sentence_and_exit_code_64(tmp_path: Path) -> None:
    result = launch(tmp_path, sys.executable, str(ROOT / "launchers/pretrain.py"), "+model=mdlm_tiny", "backbone.hiden=3")
    assert result.returncode == 64
    assert result.stderr == "error: unknown key backbone.hiden; did you mean backbone.hidden or backbone.kind or backbone.heads?\n"


def test_plan_of_a_model_for_other_machines(tmp_path: Path) -> None:
    result = launch(tmp_path, sys.executable, str(ROOT / "launchers/plan.py"), "+model=mdlm_1p7b", "plan.ranks=64", "plan.memory_gib=80")
    assert result.returncode == 0, result.stderr
    assert "2,209,706,112" in result.stdout and "4,005,432" in result.stdout and "fits" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_torchrun_adds_nothing_to_the_sentence(tmp_path: Path) -> None:
    # 17 heads over two ranks. Needs the package installed (`pip install -e .`), whose entry point quietens torchrun.
    torchrun = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2")
    result = launch(tmp_path, *torchrun, str(ROOT / "launchers/pretrain.py"), "+model=mdlm_1p7b", "parallel.tensor=2")
    assert result.returncode != 0
    errors = [line for line in result.stderr.splitlines() if "OMP_NUM_THREADS" not in line and line.strip("* ")]
    assert len(errors) == 1, result.stderr
    assert errors[0].startswith("error: backbone.heads=17 cannot be split over parallel.tensor=2")
