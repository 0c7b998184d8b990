"""Peak memory of conversion, checkpoint to Hugging Face folder and back, in sizes of the largest tensor.

    python tests/benchmarks/convert_memory.py [--words 130000] [--hidden 256]

A checkpoint with a large vocabulary is made first; each conversion then runs in a process of its own, which samples its anonymous memory
(mapped files, which the system may drop, do not count). The gate is left out: it holds the network twice, by design.
"""

import argparse
import multiprocessing as mp
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from pretrain.convert.config import HubConfig, ImportConfig  # noqa: E402
from tests.convert.trained import write_run  # noqa: E402

MIB = 2**20


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


def export(run: str, out: str) -> None:
    from pretrain.convert.hub_export import open_export, write_folder

    opened = open_export(HubConfig(checkpoint=run, output=out))
    Path(out).mkdir()
    write_folder(opened, Path(out))


def bring_back(source: str, out: str) -> None:
    from pretrain.convert.hub_import import import_from_hub

    import_from_hub(ImportConfig(source=source, output=out))


def measured(action: Callable[[str, str], None], one: str, two: str, results: "mp.Queue[tuple[int, float]]") -> None:
    import transformers.convert_slow_tokenizer  # noqa: F401

    import pretrain.convert.hub_export
    import pretrain.convert.hub_import  # noqa: F401

    before, peak, running = anonymous(), [0], [True]

    def watch() -> None:
        while running[0]:
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    action(one, two)
    seconds = time.monotonic() - started
    running[0] = False
    watcher.join()
    results.put((peak[0] - before, seconds))


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
        context = mp.get_context("spawn")
        ways = (("checkpoint -> folder", export, run, folder / "hub"), ("folder -> checkpoint", bring_back, folder / "hub", folder / "imported"))
        for name, action, one, two in ways:
            results: mp.Queue[tuple[int, float]] = context.Queue()
            process = context.Process(target=measured, args=(action, str(one), str(two), results))
            process.start()
            peak, seconds = results.get(timeout=600)
            process.join()
            print(f"{name}: peak {peak / MIB:,.0f} MiB = {peak / largest:.2f} x the largest tensor, {seconds:.1f} s")


if __name__ == "__main__":
    main()
