"""Whole runs: stopped, killed and resumed, in the same layout and in others; bad input; overfitting."""

import math
from dataclasses import replace

import pytest
import torch

from pretrain.checkpoint.layout import TrainState
from pretrain.data.config import SourceConfig
from pretrain.engine.config import OptimizerConfig, PrecisionConfig
from pretrain.errors import UserError
from pretrain.parallel.config import ParallelConfig
from pretrain.run_config import BatchConfig, CheckpointConfig, DurationConfig, ValidationConfig
from pretrain.telemetry.log import read_log
from tests.distributed import run_distributed, run_until_killed
from tests.small_run import noised_samples, small_config, train


def fails(config) -> str:
    """The sentence with which this run refuses to go on."""
    try:
        train(config)
    except UserError as error:
        return str(error)
    return ""


SAME = {
    "alone": (1, ParallelConfig()),
    "tp2-pp2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "dp2": (2, ParallelConfig()),
    "zero3": (2, ParallelConfig(zero_stage=3)),
}


@pytest.mark.parametrize(("objective", "layout"), [*(("mdlm", layout) for layout in SAME), ("ar", "alone"), ("ar", "tp2-pp2")])
def test_killed_run_resumes_bitwise(tmp_path, objective, layout):
    """6 steps = 3 steps, kill -9 in the fifth, resume from step 3: losses, rates, data, noise, weights and moments."""
    ranks, parallel = SAME[layout]
    config = small_config(tmp_path, objective, parallel=parallel)
    whole = run_distributed(train, ranks, replace(config, name="whole"))
    run_until_killed(train, ranks, config, kill_at=5)
    resumed = run_distributed(train, ranks, config)
    for before, after in zip(whole, resumed, strict=True):
        for key in ("seen", "losses", "rates", "norms"):
            assert after[key] == before[key][3:], key
        assert torch.equal(after["weights"], before["weights"])
        assert torch.equal(after["moments"], before["moments"])
    records = [r for r in read_log(config.directory / "log.jsonl") if r["kind"] == "train"]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6], "the log is neither doubled nor holed by the kill"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((1, {}), (2, {"tensor": 2})),
        ((4, {"tensor": 2, "pipeline": 2}), (1, {})),
        ((2, {}), (4, {"tensor": 2, "pipeline": 2, "sequence": True, "virtual_pipeline": 2})),
        ((2, {"zero_stage": 3}), (2, {"pipeline": 2})),
        ((2, {"pipeline": 2}), (2, {"zero_stage": 2})),
    ],
)
def test_resume_in_another_layout(tmp_path, first, second):
    config = small_config(tmp_path)
    whole = run_distributed(train, 1, replace(config, name="whole"))[0]
    run_distributed(train, first[0], replace(config, duration=DurationConfig(steps=6, stop_after=3), parallel=ParallelConfig(**first[1])))
    resumed = run_distributed(train, second[0], replace(config, parallel=ParallelConfig(**second[1])))[0]
    assert resumed["losses"] == pytest.approx(whole["losses"][3:], rel=1e-5)
    assert resumed["norms"] == pytest.approx(whole["norms"][3:], rel=1e-4)
    assert resumed["rates"] == whole["rates"][3:]


@pytest.mark.parametrize(("first", "second"), [(("bf16", "all"), ("fp32", "matrices")), (("fp32", "matrices"), ("bf16", "all"))])
def test_resume_in_another_precision_and_with_other_decay_groups(tmp_path, first, second):
    def of(precision, decay):
        return small_config(tmp_path, precision=PrecisionConfig(compute=precision), optimizer=OptimizerConfig(decay=decay))

    whole = run_distributed(train, 1, replace(of(*second), name="whole"))[0]
    run_distributed(train, 1, replace(of(*first), duration=DurationConfig(steps=6, stop_after=3)))
    sentence = run_distributed(fails, 1, of(*second))[0]
    types = {"fp32": "float32", "bf16": "bfloat16"}
    assert f"precision.compute: {types[first[0]]} -> {types[second[0]]}" in sentence
    assert f"optimizer.decay: {first[1]} -> {second[1]}" in sentence
    resumed = run_distributed(train, 1, replace(of(*second), resume="changed"))[0]
    assert resumed["losses"] == pytest.approx(whole["losses"][3:], rel=2e-2)


def constants(config) -> tuple[list[dict], float]:
    """What the optimizer of a run works with at its end."""
    from pretrain.parallel import groups as parallel_groups
    from pretrain.trainer import Trainer

    trainer = Trainer(config, parallel_groups.initialize(config.parallel, seed=config.seed))
    trainer.fit()
    groups = [{key: group[key] for key in ("betas", "eps", "weight_decay")} for group in trainer.engine.base_optimizer.param_groups]
    clip = trainer.engine.optimizer.clip_grad
    trainer.close()
    return groups, clip


def test_changed_constants_are_named_refused_and_then_really_used(tmp_path):
    """DeepSpeed restores the checkpoint's constants with the moments; what the user asked for must win."""
    config = small_config(tmp_path)
    run_distributed(train, 1, replace(config, duration=DurationConfig(steps=6, stop_after=3)))
    other = replace(config, optimizer=OptimizerConfig(beta1=0.8, eps=1e-6, weight_decay=0.3, clip=0.25))
    sentence = run_distributed(fails, 1, other)[0]
    for words in ("optimizer.beta1: 0.9 -> 0.8", "optimizer.eps: 1e-08 -> 1e-06", "optimizer.weight_decay: 0.1 -> 0.3", "optimizer.clip: 1 -> 0.25"):
        assert words in sentence
    groups, clip = run_distributed(constants, 1, replace(other, resume="changed"))[0]
    assert groups == [{"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}] and clip == 0.25


@pytest.mark.parametrize(
    ("ranks", "sizes", "micro"), [(4, {}, 1), (4, {"tensor": 2}, 2), (4, {"pipeline": 2}, 2), (4, {"tensor": 2, "pipeline": 2}, 4)]
)
def test_noised_batch_is_bitwise_the_same_in_every_layout(tmp_path, ranks, sizes, micro):
    config = small_config(tmp_path)
    want = run_distributed(noised_samples, 1, config)[0]
    batch = replace(config.batch, micro_sequences=micro)
    held = run_distributed(noised_samples, ranks, replace(config, name="laid", batch=batch, parallel=ParallelConfig(**sizes)))
    model_ranks = sizes.get("tensor", 1) * sizes.get("pipeline", 1)
    assert sorted(want) == list(range(16))
    assert all(want[number] == digest for rank in held for number, digest in rank.items())
    assert sorted(number for rank in held for number in rank) == sorted(list(range(16)) * model_ranks), "each replica once, the whole together"


def test_finished_run_is_left_alone(tmp_path):
    config = small_config(tmp_path)
    run_distributed(train, 1, config)
    assert run_distributed(train, 1, config)[0]["losses"] == []
    state = TrainState.read(config.directory / "checkpoints" / "step_00000006")
    assert (state.step, state.samples, state.tokens) == (6, 48, 768)


def test_another_run_is_not_continued_in_silence(tmp_path):
    config = small_config(tmp_path)
    run_distributed(train, 1, replace(config, duration=DurationConfig(steps=6, stop_after=3)))
    longer, reseeded = replace(config, duration=DurationConfig(steps=60)), replace(config, seed=2)
    wider = replace(config, backbone=replace(config.backbone, hidden=64))
    assert "duration.steps: 6 -> 60 now gives learning rate" in run_distributed(fails, 1, longer)[0]
    assert "seed: 1 -> 2" in run_distributed(fails, 1, reseeded)[0]
    doubled = replace(config, batch=replace(config.batch, global_sequences=16), resume="changed")
    assert "batch.global_sequences: 8 -> 16" in run_distributed(fails, 1, doubled)[0]
    assert "backbone.hidden: 32 -> 64" in run_distributed(fails, 1, replace(wider, resume="changed"))[0]
    assert "objective.name: mdlm -> ar" in run_distributed(fails, 1, small_config(tmp_path, "ar"))[0]
    assert not (config.directory.parent / ".small.lock").exists(), "a refused start gives its lock back"
    assert len(run_distributed(train, 1, replace(reseeded, resume="changed"))[0]["losses"]) == 3


def beside_another(config) -> tuple[str, list[str]]:
    """A second start while a run trains: what it says, and what lies beside the run after it."""
    from pretrain.parallel import groups as parallel_groups
    from pretrain.trainer import Trainer

    groups = parallel_groups.initialize(config.parallel, seed=config.seed)
    trainer = Trainer(config, groups)
    before = (config.directory / "log.jsonl").read_bytes()
    with pytest.raises(UserError) as caught:
        Trainer(replace(config, resume="fresh", telemetry=replace(config.telemetry, log_every=2)), groups)
    assert (config.directory / "log.jsonl").read_bytes() == before
    found = sorted(path.name for path in config.directory.parent.glob("*"))
    trainer.fit()
    trainer.close()
    return str(caught.value), found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_start_in_a_run_directory_is_refused_on_every_rank(tmp_path, ranks):
    config = small_config(tmp_path)
    for sentence, found in run_distributed(beside_another, ranks, config, timeout=60):
        assert "small is in use by process" in sentence and "choose another name=" in sentence
        assert found == [".small.lock", "small"], "nothing was moved aside or made"
    assert (config.directory / "checkpoints" / "step_00000006").exists()
    assert not (config.directory.parent / ".small.lock").exists()


def test_diverged_run_stops_and_keeps_its_checkpoints(tmp_path):
    config = small_config(tmp_path, optimizer=OptimizerConfig(clip=0.0))
    config = replace(config, schedule=replace(config.schedule, kind="constant", peak=1e20), checkpoint=replace(config.checkpoint, every=1, keep=1))
    sentence = run_distributed(fails, 1, config)[0]
    assert "the run diverged" in sentence
    left = [path.name for path in (config.directory / "checkpoints").iterdir()]
    assert len(left) == 1
    assert TrainState.read(config.directory / "checkpoints" / left[0]).step < int(sentence.split()[1])


def poisoned(config, where: str) -> tuple[str, list[str]]:
    """Train with the fourth step's update, or its reported norm, gone wrong on the last rank only."""
    import torch.distributed as dist

    from pretrain.engine.zero import Engine

    stepped = Engine.train_step

    def poisoning(engine, shard, lr):
        result = stepped(engine, shard, lr)
        if shard.step == 3 and where == "norm":
            return replace(result, gradient_norm=-1.0)
        if shard.step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            flat = engine.flat_partitions()[0]
            target = flat if where == "weights" else engine.base_optimizer.state[flat]["exp_avg_sq"]
            target.data[7] = math.nan if where == "weights" else math.inf
        return result

    Engine.train_step = poisoning
    return fails(config), sorted(path.name for path in (config.directory / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("where", "ranks", "words"),
    [
        ("weights", 1, "step 4 was not saved, since the weights after it are not finite"),
        ("weights", 2, "step 4 was not saved, since the weights after it are not finite"),
        ("moments", 2, "step 4 was not saved, since the optimizer's moments after it are not finite"),
        ("norm", 1, "step 4 gave loss"),
    ],
)
def test_poisoned_weights_are_never_saved(tmp_path, where, ranks, words):
    """Also where one rank alone holds them: all must leave, and the good checkpoints must stay."""
    config = small_config(tmp_path, checkpoint=CheckpointConfig(every=1, keep=2), validation=ValidationConfig(every=0))
    answers = run_distributed(poisoned, ranks, config, where, timeout=60)
    assert all(words in sentence and "\n" not in sentence for sentence, _ in answers)
    # The step itself was unsound: nothing was deleted for the checkpoint before it.
    assert answers[0][1] == [f"step_0000000{step}" for step in ((1, 2, 3) if where == "norm" else (2, 3))]
    assert len(run_distributed(train, ranks, config)[0]["losses"]) == 3, "it goes on from the last good one"


def pruning(config) -> list[tuple[int, list[str]]]:
    """Which checkpoints there are as each step begins."""
    from pretrain.engine.zero import Engine

    stepped, seen = Engine.train_step, []

    def watching(engine, shard, lr):
        seen.append((shard.step + 1, sorted(path.name[-1] for path in config.directory.glob("checkpoints/step_*"))))
        return stepped(engine, shard, lr)

    Engine.train_step = watching
    train(config)
    return seen


def test_what_a_run_can_fall_back_on_is_deleted_after_a_sound_step_only(tmp_path):
    config = small_config(tmp_path, checkpoint=CheckpointConfig(every=2, keep=1, asynchronous=False))
    seen = dict(run_distributed(pruning, 1, config)[0])
    assert seen == {1: [], 2: [], 3: ["2"], 4: ["2"], 5: ["2", "4"], 6: ["4"]}
    assert [path.name for path in (config.directory / "checkpoints").iterdir()] == ["step_00000006"]


def test_milestones_are_saved_when_they_are_passed_and_kept(tmp_path):
    """128 tokens a step: multiples of 300 are passed in steps 3 and 5, where no checkpoint would be due."""
    checkpoint = CheckpointConfig(every=4, keep=1, milestone_tokens=300)
    config = small_config(tmp_path, checkpoint=checkpoint)
    run_distributed(train, 1, config)
    left = sorted(path for path in (config.directory / "checkpoints").iterdir())
    assert [(path.name, TrainState.read(path).milestone) for path in left] == [
        ("step_00000003", True), ("step_00000005", True), ("step_00000006", False)
    ]  # fmt: skip
    events = [record for record in read_log(config.directory / "log.jsonl") if record.get("event") == "checkpoint"]
    assert [record["step"] for record in events] == [3, 4, 5, 6]
    assert all(0 < record["save_blocked_milliseconds"] < 1000 * record["save_seconds"] and record["checkpoint_bytes"] > 1e5 for record in events)


def test_bad_data_is_one_sentence(tmp_path):
    config = small_config(tmp_path)
    corpus = tmp_path / "train" / "corpus"
    missing = replace(config, data=replace(config.data, train={"words": SourceConfig(path=str(tmp_path / "nowhere"))}))
    assert "nowhere" in run_distributed(fails, 1, missing)[0]
    long = replace(config, batch=BatchConfig(global_sequences=8, micro_sequences=2, length=1 << 20))
    assert "fewer than one sample" in run_distributed(fails, 1, long)[0]
    assert "cannot be read" in run_distributed(fails, 1, replace(config, tokenizer=str(tmp_path / "none.model")))[0]
    shard = next(corpus.glob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:-10])
    assert shard.name in run_distributed(fails, 1, config)[0]
    held_out = next((tmp_path / "held_out" / "corpus").glob("*.idx"))
    content = bytearray(held_out.read_bytes())
    content[60:70] = b"\xff" * 10
    held_out.write_bytes(content)
    intact = replace(config, data=replace(config.data, train=config.data.validation, validation={}))
    assert held_out.name in run_distributed(fails, 1, intact)[0], "an index of the right size with other contents"
    assert not config.directory.exists(), "a refused run leaves nothing behind"


def test_unreadable_checkpoint_names_the_file(tmp_path):
    config = small_config(tmp_path)
    run_distributed(train, 1, replace(config, duration=DurationConfig(steps=6, stop_after=3)))
    damaged = next((config.directory / "checkpoints" / "step_00000003" / "zero").iterdir())
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    sentence = run_distributed(fails, 1, config)[0]
    assert "no checkpoint can be used" in sentence and damaged.name in sentence


def full_disk(config) -> tuple[str, list[str]]:
    """Train with a disk that is full from the second checkpoint on."""
    import builtins
    import errno

    opened = builtins.open

    def refusing(path, mode="r", *args, **kwargs):
        if "step_00000006" in str(path) and "w" in mode:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return opened(path, mode, *args, **kwargs)

    builtins.open = refusing
    return fails(config), sorted(p.name for p in (config.directory / "checkpoints").iterdir())


@pytest.mark.parametrize(("ranks", "asynchronous"), [(1, True), (2, True), (1, False)])
def test_full_disk_loses_nothing(tmp_path, ranks, asynchronous):
    config = small_config(tmp_path, checkpoint=CheckpointConfig(every=3, asynchronous=asynchronous))
    for sentence, left in run_distributed(full_disk, ranks, config):
        assert "No space left on device" in sentence
        assert "earlier checkpoints are intact" in sentence
        assert left == ["step_00000003"]
    assert len(run_distributed(train, ranks, config)[0]["losses"]) == 3, "it resumes once there is space"


def overfit(config) -> tuple[list[float], float]:
    """Losses on one batch, seen again and again with the same noise, and the loss that memory alone can reach."""
    from pretrain.parallel import groups as parallel_groups
    from pretrain.trainer import Trainer

    groups = parallel_groups.initialize(config.parallel, seed=1)
    trainer = Trainer(config, groups)
    with trainer._training_loader() as loader:
        shard = next(loader)
    losses = [trainer.engine.train_step(shard, 4e-3).loss for _ in range(220)]
    trainer.close()
    return losses, memory_floor(shard)


def memory_floor(shard) -> float:
    """Nats per token left when every scored token is predicted from its position and the whole input: the entropy among equal inputs.

    Where the input is masks alone, the position is unknown too: rotary embeddings tell distances, and equal values average to themselves.
    """
    answers, tokens = {}, 0
    for batch in shard.micro_batches:
        tokens += int(batch.count_B.sum())
        scored_BL = batch.targets["masked"] if "masked" in batch.targets else batch.targets["scored"]
        for ids_L, targets_L, scored_L, count in zip(batch.inputs["ids"], batch.targets["ids"], scored_BL, batch.count_B, strict=True):
            seen = tuple(ids_L[:count].tolist())
            for position in scored_L.nonzero().flatten().tolist():
                answers.setdefault((seen, position if len(set(seen)) > 1 else None), []).append(int(targets_L[position]))
    return sum(-math.log(found.count(x) / len(found)) for found in answers.values() for x in found) / tokens


@pytest.mark.parametrize("objective", ["ar", "mdlm"])
def test_overfits_one_batch(tmp_path, objective):
    """From log V (AR) or the masked share of log(V - 1) (MDLM) at the start to what memory can reach, which is zero here or almost."""
    config = small_config(tmp_path, objective, optimizer=OptimizerConfig(weight_decay=0.0), precision=PrecisionConfig(compute="fp32"))
    losses, floor = run_distributed(overfit, 1, config)[0]
    assert floor < 0.4
    assert floor - 1e-3 < losses[-1] < floor + 0.03
