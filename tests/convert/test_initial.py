"""init_from: runs that start from the weights of another run, of an imported checkpoint, of a model folder, in any layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pretrain.backbones.config import BackboneConfig
from pretrain.checkpoint.consolidate import consolidate
from pretrain.convert.config import HubConfig, ImportConfig
from pretrain.convert.hub_export import open_export, write_folder
from pretrain.convert.hub_import import import_from_hub
from pretrain.convert.origin import require_origin
from pretrain.engine.config import ScheduleConfig
from pretrain.errors import UserError
from pretrain.objectives.config import ObjectiveConfig, RePlaidConfig
from pretrain.parallel.config import ParallelConfig
from pretrain.run_config import DurationConfig, RunConfig
from tests.distributed import run_distributed
from tests.small_run import small_config, train

CLASSES = 321
"""The small tokenizer's ids and the mask."""
STILL = ScheduleConfig(kind="constant", peak=1e-12, warmup_steps=0)
REPLAID = ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=4, schedule_hidden=8, prior_ramp_steps=4, learning_rate=1e-12))


def newest(config: RunConfig) -> Path:
    return sorted((config.directory / "checkpoints").iterdir())[-1]


def hub_of(config: RunConfig, folder: Path) -> Path:
    """An export without its gate."""
    export = open_export(HubConfig(checkpoint=str(config.directory), output=str(folder)))
    folder.mkdir()
    write_folder(export, folder)
    return folder


def still(config: RunConfig, name: str, **changes: object) -> RunConfig:
    """One step that moves nothing, from another run's weights."""
    return replace(config, name=name, schedule=STILL, duration=DurationConfig(steps=1), **changes)  # type: ignore[arg-type]


def same_weights(first: RunConfig, second: RunConfig) -> bool:
    """Rows that no class has are padding, which an export leaves out: not compared."""
    one, two = consolidate(newest(first)), consolidate(newest(second))
    classes = {name: CLASSES for name in one if name.startswith(("head.", "embedding.weight"))}
    return one.keys() == two.keys() and all(
        torch.allclose(one[name][: classes.get(name)], two[name][: classes.get(name)], rtol=0, atol=1e-9) for name in one
    )


@pytest.mark.slow
def test_weights_arrive_from_everywhere_in_any_layout(tmp_path: Path) -> None:
    first = small_config(tmp_path, "mdlm", name="first", duration=DurationConfig(steps=3))
    run_distributed(train, 1, first)
    hub = hub_of(first, tmp_path / "hub")
    import_from_hub(ImportConfig(source=str(hub), output=str(tmp_path / "runs" / "brought")))
    origins = {
        "run": (first.directory, ParallelConfig(tensor=2), 2),
        "checkpoint": (newest(first), ParallelConfig(pipeline=2), 2),
        "imported": (tmp_path / "runs" / "brought", ParallelConfig(zero_stage=3), 2),
        "hub": (hub, ParallelConfig(), 1),
    }
    for name, (origin, parallel, ranks) in origins.items():
        second = still(first, f"from-{name}", init_from=str(origin), parallel=parallel)
        require_origin(second)
        run_distributed(train, ranks, second)
        assert same_weights(first, second), name
    # A run's own checkpoints come first: going on needs no origin.
    longer = replace(still(first, "from-run", init_from=str(tmp_path / "gone")), duration=DurationConfig(steps=2))
    require_origin(longer)
    assert len(run_distributed(train, 1, longer)[0]["losses"]) == 1
    with pytest.raises(AssertionError, match="is an imported model, from which runs start"):
        run_distributed(train, 1, still(first, "brought"))


@pytest.mark.slow
def test_moments_and_what_an_objective_learned(tmp_path: Path) -> None:
    first = small_config(tmp_path, REPLAID, name="first", duration=DurationConfig(steps=2), schedule=STILL)
    before = run_distributed(train, 1, first)[0]
    hub = hub_of(first, tmp_path / "hub")
    for name, origin, moments in (("plain", first.directory, False), ("moments", first.directory, True), ("hub", hub, False)):
        second = still(first, name, init_from=str(origin), init_moments=moments)
        after = run_distributed(train, 1, second)[0]
        assert same_weights(first, second)
        learned = 8 * 3 + 2  # schedule and endpoints; the embedding's padding rows are drawn anew from a model folder
        assert torch.allclose(after["objective"][-learned - 7 : -7], before["objective"][-learned - 7 : -7], atol=1e-9)
        old, new = before["moments"].abs().sum(), after["moments"].abs().sum()
        assert (new > 1.2 * old) == moments  # a third step adds to the moments of two, one step alone has less


def test_another_network_is_refused_with_the_value_that_fits(tmp_path: Path) -> None:
    first = small_config(tmp_path, "mdlm", name="first", duration=DurationConfig(steps=1), schedule=STILL)
    run_distributed(train, 1, first)
    base = replace(first, name="second", init_from=str(first.directory))

    def refused(said: str, **changes: object) -> None:
        with pytest.raises(UserError, match=said):
            require_origin(replace(base, **changes))  # type: ignore[arg-type]

    require_origin(base)
    require_origin(replace(base, objective=ObjectiveConfig(name="duo")))  # the same network
    wider = BackboneConfig(kind="dit", hidden=64, layers=4, heads=4, cond_dim=16)
    refused(r"has backbone\.hidden=32, and this run backbone\.hidden=64: .*; set backbone\.hidden=32, or another init_from", backbone=wider)
    refused(r"set backbone\.rope_base=10000", backbone=replace(first.backbone, rope_base=500.0))
    refused("was trained with objective=mdlm, whose network reads tokens", objective=ObjectiveConfig(name="replaid"))
    refused("is no run, checkpoint or model folder", init_from=str(tmp_path))
    refused("init_moments=true takes moments from where the run starts", init_from=None, init_moments=True)
    hub = hub_of(first, tmp_path / "hub")
    refused("is a model without moments", init_from=str(hub), init_moments=True)
    other_rows = replace(first.backbone, vocab_multiple=64)
    autoregressive = replace(small_config(tmp_path, "ar"), name="ar", init_from=str(first.directory), backbone=other_rows)
    with pytest.raises(AssertionError, match=r"has 384 rows of vocabulary, and this run's .* make 320"):
        run_distributed(train, 1, autoregressive)
