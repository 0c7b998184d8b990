"""Peak memory and speed of convert.py universal, zero and weights on a synthetic checkpoint.

    python tests/benchmarks/convert.py [--hidden 512] [--layers 10] [--rows 32768]

A checkpoint of masters, moments and an average is made first (16 bytes per parameter: 1 GB by default), as ZeRO files of two pipeline
stages. Each task then runs in a process of its own. Memory is what no file backs (RssAnon of /proc/self/status, sampled every 2 ms, less what
it was before the task): pages of mapped files are the system's cache and may be dropped at any time. The alternative is the whole
checkpoint in memory, as DeepSpeed's own zero_to_fp32 and ds_to_universal hold whole files of it.
"""

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch  # noqa: E402
import yaml  # noqa: E402

from pretrain.backbones.config import BackboneConfig  # noqa: E402
from pretrain.backbones.parameters import parameter_table  # noqa: E402
from pretrain.checkpoint.layout import Layout, TrainState  # noqa: E402
from pretrain.checkpoint.manager import CheckpointManager  # noqa: E402
from pretrain.checkpoint.reshape import LOGICAL, write_index, write_tensor  # noqa: E402
from pretrain.checkpoint.resume import MEANT  # noqa: E402
from pretrain.convert.config import UniversalConfig, WeightsConfig, ZeroConfig  # noqa: E402
from pretrain.convert.relayout import to_universal, to_weights, to_zero  # noqa: E402
from pretrain.data.config import DataConfig, SourceConfig  # noqa: E402
from pretrain.objectives.config import ObjectiveConfig  # noqa: E402
from pretrain.parallel.config import ParallelConfig  # noqa: E402
from pretrain.run_config import BatchConfig, DurationConfig, RunConfig  # noqa: E402
from tests.benchmarks.peak_memory import measured  # noqa: E402

MIB = 2**20
KEYS = ["fp32", "exp_avg", "exp_avg_sq", "ema"]


def make(folder: Path, backbone: BackboneConfig, rows: int) -> tuple[int, int]:
    """A run with one universal checkpoint; elements of the largest tensor and of all."""
    run = RunConfig(
        name="made", root=str(folder), tokenizer="none.model", objective=ObjectiveConfig(name="mdlm"), backbone=backbone,
        data=DataConfig(train={"text": SourceConfig(path="none")}),
        batch=BatchConfig(global_sequences=8, micro_sequences=2, length=128), duration=DurationConfig(steps=9),
    )  # fmt: skip
    state = TrainState(
        step=5, tokens=5120, samples=40, lr=1e-4, next_batch="", seed=1, backbone=dataclasses.asdict(backbone), rows=rows,
        layout=Layout(tensor=1, pipeline=1, virtual_pipeline=1, data=1, zero_stage=1), extras={MEANT: {"precision.compute": "float32"}},
    )  # fmt: skip
    table = parameter_table(backbone, rows)

    def write(target: Path) -> None:
        for name, spec in table.items():
            for key in KEYS:
                write_tensor(target / LOGICAL, name, key, torch.randn(spec.shape))
        write_index(target / LOGICAL, table, KEYS, 5, list(table))

    CheckpointManager(run.directory, keep=0).save(5, write, state, yaml.safe_dump(dataclasses.asdict(run)))
    sizes = [spec.size for spec in table.values()]
    return max(sizes), sum(sizes)


def universal(source: str, out: str) -> Path:
    return to_universal(UniversalConfig(checkpoint=source, output=out))


def zero(source: str, out: str) -> Path:
    return to_zero(ZeroConfig(source=source, output=out, data_ranks=2, parallel=ParallelConfig(tensor=2)))


def zero3(source: str, out: str) -> Path:
    return to_zero(ZeroConfig(source=source, output=out, data_ranks=4, parallel=ParallelConfig(zero_stage=3)))


def weights(source: str, out: str) -> Path:
    return to_weights(WeightsConfig(checkpoint=source, output=out, weights="raw"))


def main() -> None:
    """Make a checkpoint, convert it, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rows", type=int, default=32_768)
    given = parser.parse_args()
    backbone = BackboneConfig(kind="dit", hidden=given.hidden, layers=given.layers, heads=8, cond_dim=128)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        largest, total = make(folder, backbone, given.rows)
        staged = to_zero(ZeroConfig(source=str(folder / "made"), output=str(folder / "staged"), parallel=ParallelConfig(pipeline=2)))
        size = sum(path.stat().st_size for path in staged.rglob("*") if path.is_file())
        print(f"{total:,} parameters, checkpoint of {size / 1e6:,.0f} MB, largest tensor {4 * largest / MIB:,.0f} MiB")
        for name, action, source in (("universal", universal, "staged"), ("zero TP2 DP2", zero, "made"), ("zero ZeRO-3 DP4", zero3, "made"),
                                     ("weights", weights, "staged")):  # fmt: skip
            peak, seconds = measured(action, str(folder / source), str(folder / name.replace(" ", "_")))
            print(
                f"{name}: peak {peak / MIB:,.0f} MiB = {peak / (4 * largest):.2f} x the largest tensor = {peak / size:.2f} x the checkpoint, "
                f"{size / 1e6 / seconds:,.0f} MB of it a second"
            )


if __name__ == "__main__":
    main()
