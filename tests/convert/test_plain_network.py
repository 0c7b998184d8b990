"""From a run directory to the plain network."""

import shutil
from pathlib import Path

import pytest
import torch

from pretrain.convert.param_map import ParameterMap
from pretrain.convert.plain_network import open_trained
from pretrain.errors import UserError
from tests.convert.trained import ROWS, WORDS, write_run

CPU = torch.device("cpu")


@pytest.mark.parametrize(("kind", "objective"), [("dit", "mdlm"), ("llama", "ar")])
def test_weights_arrive_bitwise(tmp_path: Path, kind: str, objective: str) -> None:
    run, weights = write_run(tmp_path, objective, steps=(3, 7), kind=kind)
    trained = open_trained(run)
    assert trained.step == 7 and trained.run_directory == run and trained.run.batch.length == 12
    words = len(WORDS) + 2
    assert trained.vocabulary.model_size == words + (objective == "mdlm") and trained.vocabulary.padded_size == ROWS
    assert trained.vocabulary.mask_id == (words if objective == "mdlm" else None)
    network = trained.network(device=CPU, dtype=torch.float32)
    expected = ParameterMap(trained.run.backbone, trained.vocabulary.model_size).to_plain(weights)
    assert all(torch.equal(value, expected[name]) for name, value in network.state_dict().items())
    assert not network.training and next(network.parameters()).dtype == torch.float32
    assert next(trained.network(device=CPU, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16


def test_steps_and_folders(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path, "mdlm", steps=(3, 7))
    assert open_trained(run, 3).step == 3
    assert open_trained(run / "checkpoints" / "step_00000003").step == 3
    with pytest.raises(UserError, match="no checkpoint of step 5; it has step_00000003, step_00000007"):
        open_trained(run, 5)


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path, "mdlm")
    with pytest.raises(UserError, match="there is no checkpoint at"):
        open_trained(tmp_path / "other")
    bare = shutil.copytree(run, tmp_path / "bare")
    shutil.rmtree(bare / "checkpoints" / "step_00000007")
    with pytest.raises(UserError, match="no complete checkpoint"):
        open_trained(bare)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer .* cannot be read"):
        open_trained(run)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Words

    run, _ = write_run(tmp_path, "mdlm")
    words = Words.from_file(str(tmp_path / "tokenizer.json"))
    words.add_tokens([f"word{i}" for i in range(20)])
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="trained with 16 rows of vocabulary, but .* makes 32"):
        open_trained(run)
