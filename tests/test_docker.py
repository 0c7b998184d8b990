"""The container's versions: those that the tests run with, on the CUDA that torch was built for. It is never built here."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()


def locked(name: str) -> dict[str, str]:
    """Package (normalised) -> version."""
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines() if line.strip() and not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    return {normal(package): version for package, version in pairs}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_shared_packages_have_the_versions_of_the_lock() -> None:
    cpu, gpu = locked("requirements.lock"), locked("docker/requirements-gpu.lock")
    shared = cpu.keys() & gpu.keys()
    assert len(shared) > 80 and {"torch", "megatron-core", "deepspeed", "transformers", "numpy"} <= shared
    assert {name: gpu[name] for name in shared} == {name: cpu[name] for name in shared}
    assert gpu["nvidia-dali-cuda130"] == cpu["nvidia-dali-cuda120"]


def test_every_dependency_of_the_package_is_in_the_container() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    gpu = locked("docker/requirements-gpu.lock") | {"nvidia-dali-cuda120": locked("docker/requirements-gpu.lock")["nvidia-dali-cuda130"]}
    for text in project["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(gpu[normal(requirement.name)]), text
    assert "3.12" in Requirement(f"python{project['requires-python']}").specifier


def test_the_base_image_has_the_cuda_of_torch() -> None:
    image = re.search(r"^FROM nvidia/cuda:(\d+\.\d+\.\d+)-cudnn-devel-ubuntu24\.04$", DOCKERFILE, re.MULTILINE)
    assert image is not None
    gpu = locked("docker/requirements-gpu.lock")
    assert gpu["cuda-toolkit"].startswith(image[1])
    assert {name for name in gpu if name.startswith("nvidia-") and name.endswith("-cu12")} == set(), "one CUDA, not two"


def test_transformer_engine_is_compiled_in_the_version_of_its_libraries() -> None:
    gpu = locked("docker/requirements-gpu.lock")
    compiled = re.search(r"transformer-engine-torch==(\S+)", DOCKERFILE)
    assert compiled is not None and compiled[1] == gpu["transformer-engine"] == gpu["transformer-engine-cu13"]


def test_nothing_runs_as_root_and_only_the_package_is_copied() -> None:
    lines = DOCKERFILE.splitlines()
    assert re.fullmatch(r"USER [1-9]\d*", next(line for line in reversed(lines) if line.startswith("USER")))
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied == {"docker/requirements-gpu.lock", "pyproject.toml", "README.md", "pretrain", "finetune", "data_prep", "launchers", "configs"}
    assert all((ROOT / path).exists() for path in copied)
    allowed = (ROOT / "docker/Dockerfile.dockerignore").read_text().split()
    assert {line[1:] for line in allowed if line.startswith("!")} == copied
    assert "HEALTHCHECK" in DOCKERFILE


def test_compose_gives_gpus_memory_and_no_secret() -> None:
    service = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["train"]
    assert service["ulimits"]["memlock"] == -1 and service["shm_size"] == "32gb"
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert "WANDB_API_KEY" in service["environment"], "the name alone: its value comes from the shell"
    assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == ROOT / "docker/Dockerfile"
