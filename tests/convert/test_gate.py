"""The export gate passes what was trained and refuses every damage, in words that name it."""

import re
from pathlib import Path

import pytest

from tests.convert.damages import CASES, OBJECTIVES, gate_answers
from tests.convert.trained import write_run
from tests.distributed import run_distributed


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_gate(tmp_path: Path, name: str) -> None:
    llama = {"kind": "llama", "heads": 4, "kv_heads": 2, "qk_norm": True, "cond_dim": 128}
    run, _ = write_run(tmp_path / "run", OBJECTIVES[name], **(llama if name in ("ar", "mdm_prime") else {}))
    answers = run_distributed(gate_answers, 1, str(run), str(tmp_path / "out"), name, {})[0]
    assert answers["nothing"] == ""
    for case, (_, said) in CASES[name].items():
        assert re.search(said, answers[case]), f"{case}: {answers[case]}"
        assert answers[case].startswith("nothing was published: ")


def test_half_precision_and_stock_classes(tmp_path: Path) -> None:
    llama = {"kind": "llama", "heads": 4, "kv_heads": 2, "cond_dim": 128}
    for number, (qk_norm, config) in enumerate(((True, {"format": "stock"}), (False, {"format": "stock", "dtype": "bf16"}))):
        run, _ = write_run(tmp_path / str(number), "ar", qk_norm=qk_norm, **llama)
        assert run_distributed(gate_answers, 1, str(run), str(tmp_path / f"out{number}"), "", config) == [{"nothing": ""}]
