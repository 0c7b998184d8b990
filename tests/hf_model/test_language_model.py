"""The Hugging Face model: losses against closed forms and against the training objectives, generation, recomputation, masks, its files."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.build import build_objective
from pretrain.convert.gate_nelbo import nats_of
from pretrain.convert.objective_parts import parts_of
from pretrain.hf_model import attention_patterns
from pretrain.hf_model.attention_patterns import Pattern, attend, attention_pattern, block_mask
from pretrain.hf_model.configuration_language_model import LanguageModelConfig
from pretrain.hf_model.likelihood_draws import Text, draw_esolm
from pretrain.hf_model.modeling_language_model import AutoregressiveLanguageModel, LanguageModel
from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.objectives.config import EsoLMConfig, MDMPrimeConfig, ObjectiveConfig, RePlaidConfig
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary

SIZE, LENGTH = 24, 10
FILES = sorted(Path(attention_patterns.__file__).parent.glob("[a-z]*.py"))
OBJECTIVES = {
    "ar": ObjectiveConfig(name="ar"),
    "mdlm": ObjectiveConfig(name="mdlm"),
    "duo": ObjectiveConfig(name="duo"),
    "esolm": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)),
    "esolm-1": ObjectiveConfig(name="esolm"),
    "esolm-0": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.0)),
    "replaid": ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=4, schedule_hidden=6, prior_ramp_steps=0)),
    "esolm-natural": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5, clean_order="natural")),
    "replaid-table": ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=4, schedule_hidden=6, prior_ramp_steps=0, prompt_embedding=True)),
    "replaid-alone": ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=4, schedule_hidden=6, self_conditioning=0.0, output_prior=False)),
    "mdm_prime": ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=5)),
    "mdm_prime-free": ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=3, base=3, carry_over=False)),
}


def model_of(config: ObjectiveConfig, backbone: str = "llama", **fields: object) -> LanguageModel:
    """A small model with random weights everywhere."""
    prime, replaid = config.mdm_prime, config.replaid
    hub = LanguageModelConfig(
        objective=config.name, backbone=backbone, vocab_size=SIZE, mask_token_id=SIZE - 1 if config.has_mask else None, hidden_size=16,
        num_attention_heads=4, num_key_value_heads=4 if backbone == "dit" else 2, max_position_embeddings=LENGTH, eos_token_id=1, cond_dim=8,
        alpha_0=config.esolm.alpha_0, latent=replaid.latent, schedule_hidden=replaid.schedule_hidden, self_conditioning=replaid.self_conditioning > 0,
        output_prior=float(replaid.output_prior), digits=prime.digits, digit_base=prime.base, carry_over=prime.carry_over,
        low_variance=config.trains_low_variance, clean_order=config.esolm.clean_order, prompt_table=replaid.prompt_embedding, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    model = (AutoregressiveLanguageModel if config.name == "ar" else LanguageModel)(hub)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model.eval()


def random_ids(rows: int = 3) -> Tensor:
    return torch.randint(SIZE - 1, (rows, LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("prompt", [0, 4])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_scores_are_those_of_the_training_objective(name: str, prompt: int) -> None:
    """The same draws through the objective's own code, and through the model's: two programs for one bound."""
    config = OBJECTIVES[name]
    tokenizer = SIZE - 1 if config.has_mask else SIZE
    mask = SIZE - 1 if config.has_mask else None
    vocabulary = Vocabulary(tokenizer_size=tokenizer, model_size=SIZE, padded_size=32, mask_id=mask, eos_id=1)
    objective = build_objective(config, vocabulary)
    objective.modules().requires_grad_(False)
    model = model_of(config)
    model.load_state_dict(parts_of(objective), strict=False)
    ids_BL = random_ids(4)

    def logits(inputs: NetworkInput) -> Tensor:
        logits_BLV = model.network(inputs)
        return F.pad(logits_BLV, (0, 32 - SIZE))

    with torch.no_grad():
        for seed in (1, 2):
            scored_BL = torch.arange(LENGTH).expand_as(ids_BL) >= prompt
            text = Text(ids_BL=ids_BL, scored_BL=scored_BL, documents_BL=None, seed=seed)
            found = model.score(ids_BL, torch.where(scored_BL, ids_BL, -100), seed=seed)
            torch.testing.assert_close(found.nelbo_B, nats_of(objective, text, VocabShard.whole(vocabulary), logits), rtol=2e-5, atol=1e-4)
            assert found.label == objective.label(evaluation=True)
    assert model.code.codes_V.tolist() == objective.code.codes_V.tolist() if config.name == "mdm_prime" else True


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_train_and_leave_given_tokens_alone(name: str) -> None:
    model, ids_BL = model_of(OBJECTIVES[name]), random_ids()
    labels_BL = ids_BL.clone()
    labels_BL[:, :4] = -100
    model.train()
    output = model(ids_BL, labels=labels_BL, seed=3)
    output.loss.backward()
    gradient = model.network.norm.weight.grad
    assert gradient is not None and bool(gradient.isfinite().all()) and float(gradient.abs().sum()) > 0
    assert output.nelbo_label == ("exact" if name in ("ar", "esolm-0") else "bound")
    assert torch.equal(output.loss, model(ids_BL, labels=labels_BL, seed=3).loss)
    if name not in ("ar", "esolm-0"):  # which has no noise, and one order where what is given stands first
        assert not torch.equal(output.loss, model(ids_BL, labels=labels_BL, seed=4).loss)
    if name not in ("ar", "esolm-0"):  # text after padding has no effect, and neither has padding
        padded = torch.cat((ids_BL, ids_BL[:, :3]), 1)
        labels = torch.cat((labels_BL, torch.full_like(ids_BL[:, :3], -100)), 1)
        masks = torch.cat((torch.ones_like(ids_BL), torch.zeros_like(ids_BL[:, :3])), 1)
        model.eval()
        other = model(torch.where(masks == 0, 5, padded), labels=labels, attention_mask=masks, seed=3).nelbo
        torch.testing.assert_close(model(padded, labels=labels, attention_mask=masks, seed=3).nelbo, other)


def test_the_autoregressive_loss_is_the_mean_of_next_tokens() -> None:
    model, ids_BL = model_of(OBJECTIVES["ar"]), random_ids()
    log_p = model(ids_BL).logits.log_softmax(-1)
    rows, places = torch.arange(3)[:, None], torch.arange(LENGTH - 1)
    expected = -log_p[rows, places, ids_BL[:, 1:]].mean()
    torch.testing.assert_close(model(ids_BL, labels=ids_BL).loss, expected)


def test_generation_is_greedy_decoding_with_any_padding() -> None:
    model, ids_BL = model_of(OBJECTIVES["ar"]), random_ids(2)[:, :5]
    wanted = ids_BL
    for _ in range(6):
        wanted = torch.cat((wanted, model(wanted).logits[:, -1].argmax(-1, keepdim=True)), 1)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": SIZE + 5}
    assert torch.equal(model.generate(ids_BL, attention_mask=torch.ones_like(ids_BL), **settings), wanted)
    padded = torch.cat((torch.zeros_like(ids_BL[:, :3]), ids_BL), 1)
    mask = (torch.arange(8) >= 3).long().expand(2, -1)
    assert torch.equal(model.generate(padded, attention_mask=mask, **settings)[:, 3:], wanted)
    beams = model.generate(ids_BL, attention_mask=torch.ones_like(ids_BL), num_beams=3, **settings)
    assert beams.shape == wanted.shape
    ours = model.sample(prompt=ids_BL[0], length=11, temperature=0).sequences
    start = torch.cat((torch.tensor([[1]]), ids_BL[:1]), 1)
    assert torch.equal(ours, model.generate(start, attention_mask=torch.ones_like(start), **settings)[:, 1:])


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if "-" not in name])
@pytest.mark.parametrize("backbone", ["dit", "llama"])
def test_samples_fill_every_blank_and_keep_the_prompt(name: str, backbone: str) -> None:
    model = model_of(OBJECTIVES[name], backbone)
    found = model.sample(count=3, length=8, prompt=[3, 4], seed=1)
    assert found.sequences[:, :2].tolist() == [[3, 4]] * 3
    assert ((found.sequences >= 0) & (found.sequences < SIZE - (name not in ("ar", "mdm_prime")))).all()
    assert torch.equal(found.sequences, model.sample(count=3, length=8, prompt=[3, 4], seed=1).sequences)
    with pytest.raises(ValueError, match="sampler=none cannot sample"):
        model.sample(sampler="none", length=4)
    with pytest.raises(ValueError, match="colour=1 means nothing to sampler="):
        model.sample(colour=1, length=4)
    with pytest.raises(ValueError, match="leaves nothing to fill"):
        model.sample(prompt=[1, 2], length=2)


@pytest.mark.parametrize("name", ["mdlm", "esolm"])
def test_recomputed_layers_give_the_same_gradients(name: str) -> None:
    gradients = []
    for recompute in (False, True):
        model, ids_BL = model_of(OBJECTIVES[name], "dit" if name == "mdlm" else "llama"), random_ids()
        model.train()
        if recompute:
            model.gradient_checkpointing_enable()
            assert model.network.gradient_checkpointing
        model(ids_BL, labels=ids_BL, seed=1).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("attention", list(Attention))
def test_block_masks_see_what_dense_masks_see(attention: Attention, documents: bool) -> None:
    """FlexAttention without compilation runs forward on a CPU too."""
    length, noisy = 20, 8
    ids = torch.zeros(2, length, dtype=torch.int32)
    ids[0, 6:], ids[1, 15:] = 1, -1
    inputs = NetworkInput(
        positions_BL=torch.arange(length).expand(2, -1), conditioning_B=torch.zeros(2), attention=attention,
        documents_BL=ids if documents else None, noisy=noisy if attention is Attention.TWO_STREAM else 0,
    )  # fmt: skip
    q, k, v = torch.randn(3, 2, 4, length, 16, generator=torch.Generator().manual_seed(0))
    dense = attend(q, k[:, :2], v[:, :2], attention_pattern(inputs))
    flex = attend(q, k[:, :2], v[:, :2], Pattern(None, is_causal=False, blocks=block_mask(inputs)))
    torch.testing.assert_close(dense, flex, rtol=1e-5, atol=1e-5)


def test_what_is_not_read_is_refused() -> None:
    ids_BL = random_ids()
    with pytest.raises(ValueError, match="give timesteps"):
        model_of(OBJECTIVES["duo"])(ids_BL)
    with pytest.raises(ValueError, match="replaid reads latents"):
        model_of(OBJECTIVES["replaid"])(ids_BL, timesteps=torch.ones(3))
    with pytest.raises(ValueError, match="cannot be resized"):
        model_of(OBJECTIVES["mdlm"]).resize_token_embeddings(40)
    with pytest.raises(ValueError, match="rope_layout 'pairs'"):
        LanguageModelConfig(rope_layout="pairs")
    model = model_of(OBJECTIVES["mdm_prime"])
    model.constants.digit_code[0] = 7
    with pytest.raises(ValueError, match="no permutation"):
        model(ids_BL)


def test_the_schedule_survives_half_precision() -> None:
    model = model_of(OBJECTIVES["replaid"])
    values = torch.cat((torch.tensor([-3.0, 6.0]), torch.randn(18, generator=torch.Generator().manual_seed(0)))).double() / 3
    model.constants.schedule_bits.copy_(values.view(torch.int64))
    half = model.to(torch.bfloat16)
    assert float(half.schedule().gamma_1) == float(values[1])


def test_shipped_files_import_little_and_are_all_named() -> None:
    allowed = {"torch", "transformers", "numpy"} | set(sys.stdlib_module_names)
    relative = {}
    for path in FILES:
        text = path.read_text()
        relative[path.stem] = set(re.findall(r"^\s*from\s+\.(\S+)\s+import", text, flags=re.MULTILINE))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert {name.name.split(".")[0] for name in node.names} <= allowed, path
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module and node.module.split(".")[0] in allowed, path
        assert not any(isinstance(node, ast.ImportFrom) and node.level > 1 for node in ast.walk(ast.parse(text)))
    everything = {path.stem for path in FILES}
    # transformers 4 copies only what the file of the class names itself
    assert relative["modeling_language_model"] == everything - {"modeling_language_model"}
    assert relative["configuration_language_model"] == {"configuration_network"} and not relative["configuration_network"]


def test_given_tokens_come_first_from_left_to_right_in_esolms_order() -> None:
    """As the objective that trains has them; clean tokens are shuffled, or from left to right where the model was trained so."""
    ids_BL = random_ids(64)
    scored_BL = torch.arange(LENGTH).expand_as(ids_BL) >= 3
    documents_BL = torch.where(torch.arange(LENGTH).expand_as(ids_BL) < LENGTH - 2, 0, -1)
    text = Text(ids_BL=ids_BL, scored_BL=scored_BL & (documents_BL >= 0), documents_BL=documents_BL, seed=1)
    for natural in (False, True):
        for draw in draw_esolm(text, SIZE - 1, 0.5, natural=natural):
            assert draw.order_BL is not None and (draw.order_BL[:, :3] == torch.arange(3)).all() and (draw.order_BL[:, -2:] >= LENGTH - 2).all()
            clean = [order[3:-2][~scored[3:-2]] for order, scored in zip(draw.order_BL, draw.scored_BL, strict=True)]
            assert all((part.diff() > 0).all() for part in clean) == natural


def test_a_prompt_table_is_read_from_input_ids() -> None:
    """Latents at the prompt mean nothing then; elsewhere the ids, which are masks, do."""
    model, ids_BL = model_of(OBJECTIVES["replaid-table"]), random_ids(2)
    ids_BL[:, 4:] = SIZE - 1
    latents_BLE, t_B = torch.randn(2, LENGTH, 4, generator=torch.Generator().manual_seed(3)), torch.tensor([0.3, 0.8])
    moved_BLE = torch.where(torch.arange(LENGTH)[:, None] < 4, latents_BLE + 1, latents_BLE)
    with torch.no_grad():
        first, same, without = (
            model(ids, latents=latents, timesteps=t_B).logits
            for ids, latents in ((ids_BL, latents_BLE), (ids_BL, moved_BLE), (None, latents_BLE))
        )
    assert torch.equal(first, same) and not torch.allclose(first, without, atol=1e-3)
