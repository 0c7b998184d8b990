"""Plans: memory against what the layers really save and the parameters really weigh, layouts that fit, and refusals before allocation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.backbones.config import BackboneConfig
from pretrain.backbones.parameters import parameter_table
from pretrain.data.manifest import Manifest
from pretrain.errors import UserError
from pretrain.launch_config import PlanConfig
from pretrain.plan import machine as machine_module
from pretrain.plan import memory as memory_module
from pretrain.plan import plan as plan_module
from pretrain.plan.layouts import smallest_layout
from pretrain.plan.machine import GIB, Machine, check_machine
from pretrain.plan.memory import chunks_in_flight, layer_activations_per_token, rank_memory, stage_memory
from pretrain.plan.plan import Needs, check_data, check_fits, check_ready, make_plan, work_out_needs
from pretrain.plan.table import show
from pretrain.rules import resolve
from tests.distributed import run_distributed
from tests.small_run import small_config
from tests.test_rules import BASE, LLAMA, changed

TINY = changed(BASE, backbone=BackboneConfig(kind="dit", hidden=64, layers=4, heads=4), batch__length=64)
CPU = Machine(device="CPU", memory=16 * GIB, cuda_devices=0, bf16=False)


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(plan_module, "this_machine", lambda local_ranks: CPU)
    monkeypatch.chdir(tmp_path)


BACKBONES = (
    BackboneConfig(kind="dit", hidden=256, layers=2, heads=4),
    BackboneConfig(kind="llama", hidden=256, layers=2, heads=4, ffn=512),
    BackboneConfig(kind="llama", hidden=256, layers=2, heads=4, kv_heads=1, qk_norm=True),
)


def saved_bytes_per_token() -> dict[tuple[int, int], float]:
    """(number in BACKBONES, bytes of the compute type) -> what the real layers keep for the backward pass, per token and layer."""
    import torch

    from pretrain.parallel import groups as parallel_groups
    from pretrain.parallel.config import ParallelConfig

    groups = parallel_groups.initialize(ParallelConfig(), seed=1)
    sizes = {}
    for number, backbone in enumerate(BACKBONES):
        for dtype in (torch.float32, torch.bfloat16):
            two, four = (_saved_bytes(replace(backbone, layers=layers), dtype, groups) for layers in (2, 4))
            sizes[number, dtype.itemsize] = (four - two) / 2 / (SEQUENCES * LENGTH)
    return sizes


SEQUENCES, LENGTH = 2, 64


def _saved_bytes(backbone: BackboneConfig, dtype: Any, groups: Any) -> int:
    """Bytes of every tensor, parameters aside, that a forward pass of the network saves."""
    import torch

    from pretrain.backbones.megatron import build_stage
    from pretrain.hf_model.network_input import Attention, NetworkInput
    from pretrain.parallel.config import ParallelConfig

    stage = build_stage(
        backbone, ParallelConfig(), groups, rows=128, attention=Attention.FULL, dtype=dtype, device=torch.device("cpu"), fp32_residual=True,
        fp8=False, transformer_engine=False,
    )  # fmt: skip
    stage.initialize(1)
    known = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    kept: dict[int, Any] = {}  # by storage; the tensors stay alive, so no storage is counted for two

    def pack(tensor: Any) -> Any:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    inputs = NetworkInput(
        ids_BL=torch.zeros(SEQUENCES, LENGTH, dtype=torch.long), positions_BL=torch.arange(LENGTH).expand(SEQUENCES, LENGTH),
        conditioning_B=torch.zeros(SEQUENCES), attention=Attention.FULL,
    )  # fmt: skip
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = stage.chunks[0](inputs)
    assert result.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_activations_are_what_the_layers_save() -> None:
    measured = run_distributed(saved_bytes_per_token, 1)[0]
    assert len(measured) == 6
    for (number, compute_bytes), size in measured.items():
        assert sum(layer_activations_per_token(BACKBONES[number], compute_bytes)) == pytest.approx(size, rel=0.05)


def test_states_are_sixteen_bytes_per_parameter_and_shard_with_zero() -> None:
    parameters = sum(spec.size for spec in parameter_table(BASE.backbone, 131072).values())
    for zero, weights, gradients in ((1, 1.0, 1.0), (2, 1.0, 1 / 8), (3, None, 1 / 8)):
        config = changed(BASE, parallel__zero_stage=zero)
        derived = resolve(config, world_size=8, model_size=131072)
        memory = stage_memory(config, derived, 0, compute_bytes=2, cuda=True)
        assert memory.optimizer == pytest.approx(12 * parameters / 8)
        assert memory.gradients == pytest.approx(4 * parameters * gradients)
        if weights is not None:
            assert memory.parameters == 2 * parameters * weights
        else:
            assert memory.parameters < 2 * parameters
    average = stage_memory(changed(BASE, optimizer__ema=0.999), derived, 0, compute_bytes=2, cuda=True)
    assert average.optimizer == pytest.approx(16 * parameters / 8)


def test_stages_hold_every_parameter_once() -> None:
    config = changed(LLAMA, parallel__pipeline=4, parallel__virtual_pipeline=2)
    derived = resolve(config, world_size=4, model_size=32001)
    stages = [stage_memory(config, derived, stage, compute_bytes=2, cuda=True) for stage in range(4)]
    assert sum(stage.parameters for stage in stages) == 2 * sum(spec.size for spec in parameter_table(config.backbone, 32128).values())
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]
    assert rank_memory(config, derived, compute_bytes=2, cuda=True)[0].total == max(stage.total for stage in stages)


def test_micro_batches_in_flight() -> None:
    assert [chunks_in_flight(4, 1, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [chunks_in_flight(4, 1, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    # megatron-core's interleaved warm-up: 2 (PP - rank - 1) + (VP - 1) PP, and one more in steady state.
    assert [chunks_in_flight(4, 2, stage, 8) for stage in range(4)] == [11, 9, 7, 5]


def test_recomputation_and_sequence_parallelism_save_activations() -> None:
    derived = resolve(LLAMA, world_size=2, model_size=32001)
    plain = stage_memory(LLAMA, derived, 0, compute_bytes=2, cuda=True)
    full = stage_memory(changed(LLAMA, backbone__recompute="full"), derived, 0, compute_bytes=2, cuda=True)
    assert full.activations < plain.activations / 4 and full.total - full.activations == plain.total - plain.activations
    tensor = changed(LLAMA, parallel__tensor=2)
    split = changed(tensor, parallel__sequence=True)
    derived = resolve(split, world_size=2, model_size=32001)
    assert stage_memory(split, derived, 0, compute_bytes=2, cuda=True).activations == pytest.approx(plain.activations / 2)
    assert plain.activations / 2 < stage_memory(tensor, derived, 0, compute_bytes=2, cuda=True).activations < plain.activations


def needs(config: Any, memory: float, ranks: int = 1) -> Needs:
    """The needs of a run on machines of this much memory."""
    return work_out_needs(config, PlanConfig(ranks=ranks, memory_gib=memory / GIB, vocabulary=131072))


def test_a_run_that_does_not_fit_names_a_layout_that_does() -> None:
    sentence = r"run needs \d+\.\d GiB per rank on 1 rank, and 16\.0 GiB are available .*the smallest layout that fits is \d+ ranks"
    with pytest.raises(UserError, match=sentence) as caught:
        check_fits(needs(BASE, 16 * GIB))
    assert "\n" not in str(caught.value)
    found = needs(BASE, 24 * GIB)
    layout = smallest_layout(BASE, found.derived, memory=24 * GIB, compute_bytes=2, cuda=True)
    assert layout is not None and layout.ranks > 1
    derived = resolve(layout.config, world_size=layout.ranks, model_size=131072)
    assert rank_memory(layout.config, derived, compute_bytes=2, cuda=True)[0].total == layout.memory <= 24 * GIB
    with pytest.raises(UserError, match="no layout of up to 1024 such ranks fits"):
        check_fits(needs(BASE, 1 * GIB))
    check_fits(needs(BASE, 80 * GIB, ranks=8))


def test_missing_data_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer=tokenizer\.model does not exist; .*prepare_data\.py train_tokenizer .*output=tokenizer\.model"):
        check_ready(TINY, PlanConfig(vocabulary=300))
    with pytest.raises(UserError, match=r"plan\.vocabulary=32001"):
        make_plan(TINY, PlanConfig())
    with pytest.raises(UserError, match=r"copy the tokenizer there"):
        check_data(changed(TINY, tokenizer="tokenizer.json"))


def prepared_run(tmp_path: Path, **values: Any) -> Any:
    """A run whose text lies in tmp_path: some five thousand tokens."""
    config = small_config(tmp_path)
    return changed(config, **values)


def test_a_step_reads_no_text_twice(tmp_path: Path) -> None:
    tokens = Manifest.load(tmp_path / "train" / "corpus").tokens if prepared_run(tmp_path) else 0
    held = tokens // 16
    assert 300 < held < 400
    check_ready(prepared_run(tmp_path, batch__global_sequences=held - held % 2), PlanConfig())
    sentence = rf"global_sequences=4096 must not be more than the {held} sequences of 16 tokens .*use batch\.global_sequences=(\d+)$"
    with pytest.raises(UserError, match=sentence) as caught:
        check_ready(prepared_run(tmp_path, batch__global_sequences=4096), PlanConfig())
    check_ready(prepared_run(tmp_path, batch__global_sequences=int(str(caught.value).rpartition("=")[2])), PlanConfig())
    with pytest.raises(UserError, match="use more text, or a smaller batch.length"):
        check_ready(prepared_run(tmp_path, batch__global_sequences=4096, batch__micro_sequences=4096), PlanConfig())


def test_a_file_in_the_way_is_found_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in ("file", "file/runs", "file/a/b"):
        with pytest.raises(UserError, match=r"file is in the way: it is not a folder, and the run is to live in .*choose another root="):
            check_ready(prepared_run(tmp_path, root=str(tmp_path / root)), PlanConfig())
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "small").touch()
    with pytest.raises(UserError, match="runs/small is in the way"):
        check_ready(prepared_run(tmp_path), PlanConfig())
    check_ready(prepared_run(tmp_path, root=str(tmp_path / "not" / "yet")), PlanConfig())
    check_ready(prepared_run(tmp_path, root="relative"), PlanConfig())


def test_a_plan_costs_the_same_at_every_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[int] = []

    def counted(backbone: BackboneConfig, rows: int) -> Any:
        tables.append(backbone.layers)
        return parameter_table(backbone, rows)

    monkeypatch.setattr(memory_module, "parameter_table", counted)
    deep = changed(BASE, backbone__layers=9973, backbone__hidden=34, backbone__heads=17)
    with pytest.raises(UserError, match="the smallest layout that fits|no layout"):
        check_fits(needs(deep, 2 * GIB))
    assert set(tables) == {1} and len(tables) < 20
    shallow = changed(deep, backbone__layers=6)
    derived = resolve(shallow, world_size=1, model_size=32001)
    counted_all = sum(spec.size for spec in parameter_table(shallow.backbone, derived.padded_size).values())
    assert stage_memory(shallow, derived, 0, compute_bytes=2, cuda=True).parameters == 2 * counted_all


def test_missing_corpus(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(_hugging_face_tokenizer())
    config = changed(TINY, tokenizer=str(tokenizer))
    with pytest.raises(UserError, match=r"data\.train\.web\.path=web holds no prepared corpus; .*prepare_data\.py tokenize .* output=web"):
        check_ready(config, PlanConfig())
    assert work_out_needs(config, PlanConfig()).derived.model_size == 4  # three ids and a mask


def _hugging_face_tokenizer() -> str:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({"</s>": 0, "a": 1, "b": 2}, unk_token="a"))
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer.to_str()


@pytest.mark.parametrize(
    "assumption", [{"ranks": 0}, {"memory_gib": 0.0}, {"vocabulary": 1}, {"mfu": 0.0}, {"mfu": 1.5}, {"memory_gib": float("nan")}, {"ranks": 10**12}]
)
def test_nonsense_assumptions(assumption: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"plan.{next(iter(assumption))}="):
        make_plan(TINY, PlanConfig(**({"vocabulary": 300} | assumption)))


def test_machines_that_lack_something() -> None:
    gpus = Machine(device="H100", memory=80 * GIB, cuda_devices=4, bf16=True)
    with pytest.raises(UserError, match="8 processes on a machine with 4 GPUs.*--nproc-per-node 4"):
        check_machine(TINY, gpus, 8)
    with pytest.raises(UserError, match="precision.fp8=true needs a CUDA GPU"):
        check_machine(changed(TINY, precision__fp8=True), CPU, 1)


def test_memory_limits_of_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    free = machine_module.available_memory()
    assert free > 0
    monkeypatch.setattr(machine_module, "_cgroup_limits", lambda: [(5.0 * 2**20, 2.0 * 2**20)])
    assert machine_module.available_memory() == 3 * 2**20


def test_the_table_says_what_the_run_would_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assumptions = PlanConfig(ranks=64, memory_gib=80, vocabulary=131072, mfu=0.5)
    config = changed(BASE, batch__global_sequences=256, duration__steps=100_000, telemetry__peak_tflops=1000.0)
    plan = make_plan(config, assumptions)
    # 3 x 2 (12 n d^2 + V d + 2 n L d) operations per token, over 64 ranks at 500 TFLOP/s.
    per_token = 6 * (12 * 28 * 2176**2 + 131072 * 2176 + 2 * 28 * 2048 * 2176)
    assert plan.step_flops == pytest.approx(per_token * 256 * 2048)
    assert plan.hours == pytest.approx(plan.step_flops * 100_000 / (64 * 500e12) / 3600)
    show(plan)
    text = capsys.readouterr().out
    for part in ("2,209,706,112", "64 = tensor 1 x pipeline 1 x data 64", "524,288 tokens", "GiB", "fits", "not prepared"):
        assert part in text
    assert "1,000 TFLOP/s (configured)" in text


def test_objectives_cost_what_they_add() -> None:
    """Two streams double the activations (and nothing else); RePlaid keeps its embeddings, gradients and moments whole on every rank."""
    from pretrain.objectives.config import EsoLMConfig, ObjectiveConfig

    def memory(objective: ObjectiveConfig) -> memory_module.Memory:
        run = changed(BASE, objective=objective)
        return stage_memory(run, resolve(run, world_size=1, model_size=32001), 0, compute_bytes=2, cuda=True)

    plain = memory(ObjectiveConfig(name="mdlm"))
    mixed = memory(ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)))
    assert mixed.activations == pytest.approx(2 * plain.activations) and mixed.logits == plain.logits
    assert memory(ObjectiveConfig(name="esolm")).activations == plain.activations
    added = memory(ObjectiveConfig(name="replaid")).optimizer - plain.optimizer
    table = 32128 * 2176  # the network reads latents in place of ids: no table of ids, three small matrices
    network = 12 * (2176 * (16 + 16 + 64) - table)
    assert added == pytest.approx(network + 16 * (32128 * 16 + 3 * 1024 + 2))


def snapshot_size(config: Any) -> int:
    """Bytes of host memory that a real engine's snapshot takes."""
    from pretrain.parallel import groups as parallel_groups
    from pretrain.trainer import Trainer

    trainer = Trainer(config, parallel_groups.initialize(config.parallel, seed=config.seed))
    trainer.fit()
    snapshot = trainer.engine.snapshot()
    trainer.close()
    return sum(buffer.nbytes() for buffer in snapshot.memory.buffers)


@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 1), (2, 2), (2, 3)])
def test_memory_of_a_save_is_what_a_real_snapshot_takes(tmp_path: Path, ranks: int, zero_stage: int) -> None:
    config = small_config(tmp_path)
    config = replace(config, parallel=replace(config.parallel, zero_stage=zero_stage), duration=replace(config.duration, stop_after=1))
    taken = max(run_distributed(snapshot_size, ranks, config))
    vocabulary = 321
    counted = memory_module.snapshot_bytes(config, resolve(config, world_size=ranks, model_size=vocabulary), 0, compute_bytes=4)
    assert counted == pytest.approx(taken, rel=0.02)  # DeepSpeed pads a little, and AdamW counts its steps
    at_once = replace(config, checkpoint=replace(config.checkpoint, asynchronous=False))
    assert memory_module.snapshot_bytes(at_once, resolve(at_once, world_size=ranks, model_size=vocabulary), 0, compute_bytes=4) == 0


def test_the_memory_of_a_save_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    show(make_plan(TINY, PlanConfig(ranks=2, vocabulary=1000)))
    assert "memory: snapshot" in capsys.readouterr().out
    show(make_plan(TINY, PlanConfig(ranks=2, vocabulary=1000, memory_gib=80)))
    assert "host memory to save from" in capsys.readouterr().out


def test_text_of_another_tokenizer_is_found_before_the_start(tmp_path: Path) -> None:
    config = prepared_run(tmp_path)
    other = tmp_path / "tokenizer.json"
    other.write_text(_hugging_face_tokenizer())
    said = r"data\.train\.words\.path=.* was prepared with tokenizer small\.model .*tokenizer\.json is another .*set tokenizer="
    with pytest.raises(UserError, match=said):
        check_data(changed(config, tokenizer=str(other)))
    check_data(config)
