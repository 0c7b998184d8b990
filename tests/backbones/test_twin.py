"""The Megatron backbone against the plain PyTorch network: same weights through the parameter map, same logits and gradients.

Also attention patterns against a loop over documents, and parameter counts against the papers' configurations.
"""

from dataclasses import replace
from pathlib import Path

import hydra
import pytest
import torch

from pretrain.backbones.attention import dense_mask, mask_function
from pretrain.backbones.config import BackboneConfig, InputConfig
from pretrain.backbones.megatron import build_stage
from pretrain.backbones.parameters import count_parameters
from pretrain.compose import command_from
from pretrain.convert.param_map import ParameterMap, network_config
from pretrain.hf_model.modeling_network import build_network
from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.parallel import groups as parallel_groups
from pretrain.parallel.config import ParallelConfig
from pretrain.presets import LADDER, LADDER_OBJECTIVES, register
from tests.distributed import run_distributed
from tests.engine.world import randomise

MODEL_SIZE, LENGTH, BATCH = 51, 24, 3
DIT = BackboneConfig(kind="dit", hidden=48, layers=3, heads=4, cond_dim=16)
LLAMA = BackboneConfig(kind="llama", hidden=48, layers=3, heads=4, kv_heads=2, ffn=80, qk_norm=True)


TOKENS = InputConfig()
DIGITS = {join: replace(DIT, inputs=InputConfig(kind="digits", base=3, digits=5, join=join)) for join in ("concat_shared", "concat", "sum")}
LATENTS = replace(LLAMA, inputs=InputConfig(kind="latents", latent=6))
PROMPTED = replace(DIT, inputs=InputConfig(kind="latents", latent=6, prompt=True))


def network_input(attention: Attention, documents: bool, inputs: InputConfig = TOKENS, softened: bool = False) -> NetworkInput:
    generator = torch.Generator().manual_seed(5)
    documents_BL = torch.zeros(BATCH, LENGTH, dtype=torch.int32)
    documents_BL[0, 7:], documents_BL[1, 15:], documents_BL[2, 20:] = 1, 1, -1
    return NetworkInput(
        positions_BL=torch.stack([torch.randperm(40, generator=generator)[:LENGTH] for _ in range(BATCH)]),
        conditioning_B=torch.tensor([0.0, 0.7, 5.0]),
        attention=attention,
        documents_BL=documents_BL if documents else None,
        **_positions_hold(inputs, softened, generator),
    )


def _positions_hold(inputs: InputConfig, softened: bool, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if inputs.kind == "digits":
        return {"digits_BLJ": torch.randint(0, inputs.base + 1, (BATCH, LENGTH, inputs.digits), generator=generator)}
    if inputs.kind == "latents":
        latents_2BLE = torch.randn(2, BATCH, LENGTH, inputs.latent, generator=generator)
        held = {"latents_BLE": latents_2BLE[0], "estimate_BLE": latents_2BLE[1]}
        if inputs.prompt:
            ids_BL = torch.randint(0, MODEL_SIZE, (BATCH, LENGTH), generator=generator)
            held |= {"ids_BL": ids_BL, "given_BL": torch.arange(LENGTH).expand(BATCH, -1) < torch.tensor([[5], [0], [LENGTH - 1]])}
        return held
    if softened:
        ids_BLK = torch.randint(0, MODEL_SIZE, (BATCH, LENGTH, 4), generator=generator)
        return {"ids_BL": ids_BLK, "weights_BLK": torch.rand(BATCH, LENGTH, 4, generator=generator)}
    ids_BL = torch.randint(0, MODEL_SIZE, (BATCH, LENGTH), generator=generator)
    return {"ids_BL": ids_BL}


def twin_errors(
    backbone: BackboneConfig, attention: Attention, documents: bool, dtype: torch.dtype, softened: bool = False
) -> dict[str, float]:
    """Relative errors of logits and of every gradient, Megatron against plain."""
    groups = parallel_groups.initialize(ParallelConfig(), seed=1)
    stage = build_stage(backbone, ParallelConfig(), groups, rows=128, attention=attention, dtype=dtype, device=torch.device("cpu"))
    randomise(stage, groups)
    weights = {name: parameter.detach().float() for name, parameter in stage.named_parameters()}
    mapping = ParameterMap(backbone, MODEL_SIZE)
    plain = build_network(network_config(backbone, MODEL_SIZE))
    plain.load_state_dict(mapping.to_plain(weights))
    plain = plain.to(dtype)
    inputs = network_input(attention, documents, backbone.inputs, softened)
    got_BLV = stage(inputs).transpose(0, 1)[..., :MODEL_SIZE].float()
    want_BLV = plain(inputs).float()
    direction_BLV = torch.randn(want_BLV.shape, generator=torch.Generator().manual_seed(2))
    (got_BLV * direction_BLV).sum().backward()
    (want_BLV * direction_BLV).sum().backward()
    errors = {"logits": float((got_BLV - want_BLV).norm() / want_BLV.norm())}
    theirs = {name: parameter.grad.float() for name, parameter in plain.named_parameters()}
    for name, parameter in stage.named_parameters():
        for piece, gradient in mapping.split(name, parameter.grad.float()).items():
            errors[piece] = float((gradient - theirs[piece]).norm() / theirs[piece].norm().clamp_min(1e-9))
    return errors


@pytest.mark.parametrize("backbone", [*DIGITS.values(), LATENTS, PROMPTED, replace(LATENTS, kind="dit", kv_heads=None, qk_norm=False), DIT])
def test_every_input(backbone):
    """Digits joined in each way, latents under both families, and softened ids. (fp32 sines of the noise level reach angles of 742.)"""
    errors = run_distributed(twin_errors, 1, backbone, Attention.FULL, False, torch.float32, backbone is DIT)[0]
    worst = max(errors, key=errors.get)
    assert errors[worst] < 5e-5, f"{worst}: {errors[worst]:.1e}"


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("attention", list(Attention))
@pytest.mark.parametrize("backbone", [DIT, LLAMA, replace(DIT, recompute="full"), replace(LLAMA, kv_heads=None, qk_norm=False, recompute="full")])
def test_backbones_agree(backbone, attention, documents):
    errors = run_distributed(twin_errors, 1, backbone, attention, documents, torch.float32)[0]
    worst = max(errors, key=errors.get)
    assert errors[worst] < 1e-5, f"{worst}: {errors[worst]:.1e}"


def test_backbones_agree_in_bf16():
    errors = run_distributed(twin_errors, 1, DIT, Attention.FULL, False, torch.bfloat16)[0]
    assert errors["logits"] < 2e-2


@pytest.mark.parametrize("attention", [Attention.CAUSAL, Attention.FULL])
def test_masks_against_a_loop(attention):
    documents_BL = torch.tensor([[0, 0, 1, 1, 1, -1], [0, 1, 1, 2, -1, -1]], dtype=torch.int32)
    mask, allowed = dense_mask(attention, documents_BL), mask_function(attention, documents_BL)
    head = torch.tensor(0)
    for b in range(2):
        for q in range(6):
            for k in range(6):
                want = documents_BL[b, q] == documents_BL[b, k] and (attention is Attention.FULL or k <= q)
                assert mask[b, 0, q, k] == want
                assert allowed(torch.tensor(b), head, torch.tensor(q), torch.tensor(k)) == want


def eight_documents(real: bool) -> list[torch.Tensor]:
    """Random ids, or this project's own README, paragraph by paragraph, as bytes folded into the vocabulary."""
    if real:
        readme = (Path(__file__).parents[2] / "README.md").read_bytes()
        return [torch.tensor(list(paragraph)) % MODEL_SIZE for paragraph in readme.split(b"\n\n")[:8]]
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, MODEL_SIZE, (n,), generator=generator) for n in (3, 9, 1, 5, 12, 2, 7, 9)]


def documents_alone_and_packed(backbone: BackboneConfig, attention: Attention, real: bool) -> float:
    """Largest difference of a document's logits alone, packed with others, and followed by padding, relative to the largest logit."""
    groups = parallel_groups.initialize(ParallelConfig(), seed=1)
    stage = build_stage(backbone, ParallelConfig(), groups, rows=128, attention=attention, dtype=torch.float32, device=torch.device("cpu"))
    randomise(stage, groups)
    texts = eight_documents(real)

    def logits(ids: list[torch.Tensor], documents: list[int]) -> torch.Tensor:
        row = torch.cat(ids)
        numbers = torch.cat([torch.full((len(x),), d) for x, d in zip(ids, documents, strict=True)])
        # Positions restart in each document here, so that alone and packed see the same rotations exactly.
        positions = torch.cat([torch.arange(len(x)) for x in ids])
        still = torch.zeros(1)
        inputs = NetworkInput(positions_BL=positions[None], conditioning_B=still, attention=attention, ids_BL=row[None], documents_BL=numbers[None])
        return stage(inputs)[:, 0]

    alone = [logits([x], [0]) for x in texts]
    packed = logits(texts, list(range(len(texts)))).split([len(x) for x in texts])
    padded = [logits([x, torch.zeros(6, dtype=torch.long)], [0, -1])[: len(x)] for x in texts]
    largest = max(float(x.abs().max()) for x in alone)
    return max(float((a - b).abs().max()) / largest for others in (packed, padded) for a, b in zip(alone, others, strict=True))


@pytest.mark.parametrize("attention", [Attention.CAUSAL, Attention.FULL])
@pytest.mark.parametrize("backbone", [DIT, LLAMA])
@pytest.mark.parametrize("real", [False, True], ids=["random", "real"])
def test_documents_see_only_themselves(backbone, attention, real):
    assert run_distributed(documents_alone_and_packed, 1, backbone, attention, real)[0] < 1e-5


def test_parameter_counts():
    """The 2121M DiT of the scaling study: 1,778.5M at V = 32001 and 2,209.7M at V = 131072."""
    largest = BackboneConfig(kind="dit", hidden=2176, layers=28, heads=17)
    assert count_parameters(largest, 32001) / 1e6 == pytest.approx(1778.5, abs=0.05)
    assert count_parameters(largest, 131072) / 1e6 == pytest.approx(2209.7, abs=0.05)


def count_on_meta(rows: int) -> int:
    groups = parallel_groups.initialize(ParallelConfig(), seed=1)
    largest = BackboneConfig(kind="dit", hidden=2176, layers=28, heads=17)
    stage = build_stage(largest, ParallelConfig(), groups, rows=rows, attention=Attention.FULL, dtype=torch.bfloat16, device=torch.device("meta"))
    return sum(parameter.numel() for parameter in stage.parameters())


def test_largest_model_builds_on_meta():
    assert run_distributed(count_on_meta, 1, 131072)[0] / 1e6 == pytest.approx(2209.7, abs=0.05)


def built_on_meta(shapes: list[tuple[BackboneConfig, int, Attention]]) -> list[int]:
    """Parameters of each network, built by the production code without memory."""
    groups = parallel_groups.initialize(ParallelConfig(), seed=1)
    meta, counts = torch.device("meta"), []
    for backbone, rows, attention in shapes:
        stage = build_stage(backbone, ParallelConfig(), groups, rows=rows, attention=attention, dtype=torch.bfloat16, device=meta)
        counts.append(sum(parameter.numel() for parameter in stage.parameters()))
    return counts


def test_presets_build_on_meta():
    """Every file, every rung of one objective, and the largest of the others; networks of one shape are built once."""
    configs = Path(__file__).parents[2] / "configs" / "model"
    names = sorted(file.stem for file in configs.glob("*.yaml")) + [f"mdlm_{size}" for size in LADDER]
    names += [f"{objective}_2121M" for objective in LADDER_OBJECTIVES]
    register()
    shapes = {}
    with hydra.initialize_config_dir(str(configs.parent), version_base="1.3"):
        for name in names:
            command = command_from(hydra.compose("pretrain", [f"+model={name}"]))
            shapes[command.run.backbone, command.plan.vocabulary, Attention.FULL] = None
    assert len(shapes) >= 40
    counts = run_distributed(built_on_meta, 1, list(shapes))[0]
    assert counts == [count_parameters(backbone, rows) for backbone, rows, _ in shapes]
