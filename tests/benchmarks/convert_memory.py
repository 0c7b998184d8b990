"""Peak memory of conversion, checkpoint to Hugging Face folder and back, in sizes of the largest tensor.

    python tests/benchmarks/convert_memory.py [--words 130000] [--hidden 256]

A checkpoint with a large vocabulary is made first; each conversion then runs in a process of its own, which samples its anonymous memory
(mapped files, which the system may drop, do not count). The gate is left out: it holds the network twice, by design.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from pretrain.convert.config import HubConfig, ImportConfig  # noqa: E402
from tests.benchmarks.peak_memory import measured  # noqa: E402
from tests.convert.trained import write_run  # noqa: E402

MIB = 2**20


def export(run: str, out: str) -> None:
    from pretrain.convert.hub_export import open_export, write_folder

    opened = open_export(HubConfig(checkpoint=run, output=out))
    Path(out).mkdir()
    write_folder(opened, Path(out))


def bring_back(source: str, out: str) -> None:
    from pretrain.convert.hub_import import import_from_hub

    import_from_hub(ImportConfig(source=source, output=out))


def imports() -> None:
    import transformers.convert_slow_tokenizer  # noqa: F401

    import pretrain.convert.hub_export
    import pretrain.convert.hub_import  # noqa: F401


def main() -> None:
    """Make a checkpoint, convert it there and back, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=130_000, help="ids of the tokenizer")
    parser.add_argument("--hidden", type=int, default=256, help="width")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run, weights = write_run(folder, "mdlm", words=[f"w{i}" for i in range(given.words)], hidden=given.hidden)
        largest, total = (f(4 * value.numel() for value in weights.values()) for f in (max, sum))
        del weights
        print(f"{total / MIB:,.0f} MiB of fp32 weights, the largest tensor {largest / MIB:,.0f} MiB")
        ways = (("checkpoint -> folder", export, run, folder / "hub"), ("folder -> checkpoint", bring_back, folder / "hub", folder / "imported"))
        for name, action, one, two in ways:
            peak, seconds = measured(action, str(one), str(two), warm_up=imports)
            print(f"{name}: peak {peak / MIB:,.0f} MiB = {peak / largest:.2f} x the largest tensor, {seconds:.1f} s")


if __name__ == "__main__":
    main()
