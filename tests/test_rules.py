"""Every rule between fields refuses with its own sentence: the value, the rule, and a fix that is legal when it is followed."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from pretrain.backbones.config import BackboneConfig
from pretrain.data.config import DataConfig, SourceConfig
from pretrain.data.sft_config import SFTConfig
from pretrain.engine.schedule import learning_rate
from pretrain.errors import UserError
from pretrain.objectives.config import DuoConfig, ObjectiveConfig
from pretrain.objectives.rules import SECTIONS
from pretrain.ranges import RANGES, leaves
from pretrain.rules import legal_tensor_sizes, resolve, validate
from pretrain.run_config import BatchConfig, DurationConfig, RunConfig

BASE = RunConfig(
    name="run",
    tokenizer="tokenizer.model",
    objective=ObjectiveConfig(name="mdlm"),
    backbone=BackboneConfig(kind="dit", hidden=2176, layers=28, heads=17),
    data=DataConfig(train={"web": SourceConfig(path="web")}),
    batch=BatchConfig(global_sequences=32, micro_sequences=2, length=2048),
    duration=DurationConfig(steps=1000),
)


def changed(config: RunConfig, **values: Any) -> RunConfig:
    """`config` with dotted keys (written with two underscores) replaced."""
    for key, value in values.items():
        config = _with(config, key.split("__"), value)
    return config


def _with(tree: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    return replace(tree, **{first: _with(getattr(tree, first), rest, value) if rest else value})


LLAMA = changed(BASE, backbone=BackboneConfig(kind="llama", hidden=2048, layers=24, heads=16, kv_heads=4))
AR = changed(BASE, objective=ObjectiveConfig(name="ar"))

REFUSED: list[tuple[RunConfig, int, str]] = [
    # The paper's 17 heads over two ranks: say so, and what can.
    (changed(BASE, parallel__tensor=2), 2, r"backbone\.heads=17 cannot be split over parallel\.tensor=2.*can be only 1 .*pipeline can be 2, 4, 7"),
    (changed(LLAMA, parallel__tensor=3), 3, r"backbone\.heads=16 cannot be split over parallel\.tensor=3.*can be 1, 2 or 4 \(2 is nearest\)"),
    (changed(LLAMA, parallel__tensor=8), 8, r"backbone\.kv_heads=4 cannot be split over parallel\.tensor=8.*1, 2 or 4 \(4 is nearest\)"),
    (changed(LLAMA, parallel__tensor=4, backbone__ffn=5462), 4, r"backbone\.ffn=5462 cannot be split.*1 or 2 \(2 is nearest\)"),
    (changed(LLAMA, parallel__tensor=4, backbone__vocab_multiple=2), 4, r"backbone\.vocab_multiple=2 cannot be split.*padded vocabulary"),
    (changed(LLAMA, parallel__tensor=4, parallel__sequence=True, batch__length=2046), 4, r"batch\.length=2046 cannot be split.*sequence=true"),
    (changed(LLAMA, parallel__sequence=True), 1, r"parallel\.sequence=true .* parallel\.tensor=1; use parallel\.sequence=false"),
    (changed(BASE, backbone__heads=15), 1, r"hidden=2176 must be a multiple of backbone\.heads=15; use .*hidden=2190 or backbone\.heads=16"),
    (changed(BASE, backbone__hidden=31, backbone__heads=4), 1, r"hidden=31 must be .*heads=4; use backbone\.hidden=32$"),
    (changed(BASE, backbone__hidden=1, backbone__heads=4), 1, r"use backbone\.heads=1 with backbone\.hidden=2$"),
    (changed(BASE, backbone__hidden=128, backbone__heads=1000), 1, r"heads=1000; use backbone\.heads=64$"),
    (changed(LLAMA, backbone__heads=15, backbone__kv_heads=None), 1, r"use backbone\.hidden=2040 or backbone\.heads=16$"),
    (changed(BASE, backbone__hidden=51), 1, r"= 3 must be even.*backbone\.hidden=68"),
    (changed(BASE, backbone__kv_heads=1), 1, r"backbone\.kv_heads=1 belongs to backbone\.kind=llama"),
    (changed(BASE, backbone__qk_norm=True), 1, r"backbone\.qk_norm=True belongs to backbone\.kind=llama"),
    (changed(LLAMA, backbone__cond_dim=64), 1, r"backbone\.cond_dim=64 has no meaning for llama"),
    (changed(LLAMA, backbone__kv_heads=5), 1, r"backbone\.kv_heads=5 must divide backbone\.heads=16; use backbone\.kv_heads=4"),
    (changed(BASE, parallel__pipeline=3), 3, r"layers=28 must be .* parallel\.pipeline = 3; use 1, 2, 4, 7 or 14 \(2 is nearest\).*layers=27"),
    (changed(BASE, parallel__pipeline=1_000_000), 10**6, r"= 1000000; use 2, .* 28 \(28 is nearest\) there$"),
    (changed(BASE, backbone__layers=9973, parallel__tensor=2), 2, r"pipeline can be only 9973"),
    (changed(BASE, parallel__pipeline=4, parallel__virtual_pipeline=2), 4, r"multiple of parallel\.pipeline x parallel\.virtual_pipeline = 8"),
    (changed(BASE, parallel__virtual_pipeline=2), 1, r"virtual_pipeline=2 needs pipeline stages"),
    (changed(BASE, parallel__pipeline=4, parallel__virtual_pipeline=7, batch__global_sequences=12), 4, r"parallel\.pipeline=4.*are 6; use.*=16"),
    (changed(BASE, parallel__pipeline=2, parallel__zero_stage=3), 2, r"zero_stage=3 .* needs parallel\.pipeline=1 .*use parallel\.zero_stage=1"),
    (changed(BASE, parallel__pipeline=2), 3, r"3 ranks must be a multiple of .* 1 x 2 = 2; start 4 ranks"),
    (BASE, 3, r"global_sequences=32 must be a multiple of .* 2 x 3 = 6; use batch\.global_sequences=30"),
    (BASE, 32, r"2 x 32 = 64; use batch\.global_sequences=64 or batch\.micro_sequences=1"),
    (changed(BASE, duration=DurationConfig()), 1, r"no length: set one of duration\.steps, duration\.tokens and duration\.flops"),
    (changed(BASE, duration__flops=1e18), 1, r"duration\.steps=1000 and duration\.flops=1e\+18 are set.*to keep steps, add duration\.flops=null"),
    (changed(BASE, duration=DurationConfig(tokens=100)), 1, r"duration\.tokens=100 is less than one step of 65536 tokens"),
    (changed(BASE, duration=DurationConfig(flops=10)), 1, r"duration\.flops=10 pays for less than one step"),
    (changed(BASE, duration__stop_after=1001), 1, r"stop_after=1001 is never reached in a run of 1000 steps"),
    (changed(BASE, schedule__warmup_steps=1000), 1, r"warmup_steps=1000 must be below the 1000 steps"),
    (changed(BASE, duration=DurationConfig(steps=1), schedule__warmup_steps=40), 1, r"must be below the 1 step of the run; use .*warmup_steps=0 or"),
    (changed(BASE, schedule__final=1.0), 1, r"schedule\.final=1 must not be above schedule\.peak=0\.0002"),
    (changed(BASE, schedule__kind="wcd", schedule__warmup_steps=600, schedule__decay_fraction=0.5), 1, r"do not fit.*warmup_steps=500"),
    (changed(AR, data__random_length_probability=0.01), 1, r"random_length_probability=0\.01 is for diffusion"),
    (changed(AR, objective__low_variance=False), 1, r"objective\.low_variance=False has no meaning for ar"),
    (changed(BASE, objective=ObjectiveConfig(name="duo", duo=DuoConfig(top_k=8))), 1, r"duo\.top_k=8 belongs to the curriculum.*objective=duo_curr"),
    (changed(AR, objective__mask_id=3), 1, r"objective\.mask_id=3 has no meaning for ar"),
    (changed(AR, objective__time_eps=0.01), 1, r"objective\.time_eps=0\.01 has no meaning for ar"),
    (changed(AR, validation__draws=4), 1, r"validation\.draws=4 averages over noise and ar has none"),
    (changed(BASE, precision__fp8=True, precision__compute="fp32"), 1, r"precision\.fp8=true .* precision\.compute=bf16"),
    (changed(BASE, precision__fp8=True, batch__micro_sequences=1, batch__length=1000), 1, r"batch\.length = 1000 in multiples of 16; make .* 992"),
    (changed(LLAMA, precision__fp8=True, parallel__tensor=4, backbone__ffn=5472), 4, r"ffn / parallel\.tensor = 5472 / 4 in multiples of 16"),
    (changed(BASE, optimizer__eps=1e-300), 1, r"optimizer\.eps=1e-300 must lie between 1\.2e-38 and 3\.4e\+38: in fp32, where it is used, it is 0"),
    (changed(BASE, schedule__peak=1e300), 1, r"schedule\.peak=1e\+300 .* it is infinite"),
    (changed(BASE, backbone__layers=1_000_000), 1, r"backbone\.layers=1000000 must lie in \[1, 10000\]"),
    (changed(BASE, name="a" * 300), 1, r"name='a{39}… \(300 characters\) must .* at most 100 of them"),
    (changed(BASE, data__train={}), 1, r"data\.train names no source"),
    (changed(BASE, data__train={"a/b": SourceConfig(path="x")}), 1, r"data\.train\.a/b: the name of a source must"),
    (changed(BASE, data__validation={"v": SourceConfig(path=" ")}), 1, r"data\.validation\.v\.path is empty"),
    (changed(BASE, data__train={"v": SourceConfig(path="x", weight=math.nan)}), 1, r"data\.train\.v\.weight=nan must be above 0"),
    (changed(BASE, data__train={"v": SourceConfig(path="x", weight=0)}), 1, r"data\.train\.v\.weight=0 must be above 0; .*~data\.train\.v"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "ranks", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_refused(config: RunConfig, ranks: int, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(config, world_size=ranks, model_size=32001)
    assert re.search(sentence, str(caught.value)), str(caught.value)


def fixes(sentence: str) -> list[dict[str, Any]]:
    """The alternatives that a sentence offers as `use KEY=VALUE [with KEY=VALUE] or KEY=VALUE`."""
    advice = re.split(r"\buse ", sentence)[1:]
    found = [re.findall(r"(\w+\.\w+)=([\w.+-]*\w)", alternative) for text in advice for alternative in text.split(" or ")]
    return [{key.replace(".", "__"): number(value) for key, value in pairs} for pairs in found if pairs]


def number(text: str) -> Any:
    """A value of the command line, where 2e-05 is a number (YAML wants 2.0e-05)."""
    return float(text) if re.fullmatch(r"[\d.]+e[+-]?\d+", text) else yaml.safe_load(text)


def test_every_fix_that_is_offered_works() -> None:
    tried = 0
    for config, ranks, _ in REFUSED:
        with pytest.raises(UserError) as caught:
            resolve(config, world_size=ranks, model_size=32001)
        for fix in fixes(str(caught.value)):
            tried += 1
            try:
                resolve(changed(config, **fix), world_size=ranks, model_size=32001)
            except UserError as error:
                pytest.fail(f"{caught.value} | {fix} gives: {error}")
    assert tried > 25


def test_fixes_are_found_in_sentences() -> None:
    assert fixes("x; use a.b=3 or c.d=null.") == [{"a__b": 3}, {"c__d": None}]
    assert fixes("x; use a.b=1 with c.d=2") == [{"a__b": 1, "c__d": 2}]


def test_the_bases_of_these_tests_are_legal() -> None:
    for config in (BASE, LLAMA, AR):
        assert resolve(config, world_size=4, model_size=32001).data_parallel == 4


NONSENSE: dict[str, list[Any]] = {
    "sft.train": ["", " "],
    "sft.validation": [""],
    "name": ["", "a/b", "..", "-x", "a b"],
    "root": [" "],
    "init_from": [""],
    "tokenizer": ["", "tokenizer.bin"],
    "telemetry.wandb_project": [""],
    "backbone.rope_base": [1.0],
    "backbone.norm_eps": [0.0, 1.0],
    "objective.schedule_eps": [1.0],
    "objective.time_eps": [0.0, 1.0],
    "data.random_length_probability": [1.5],
    "optimizer.beta1": [1.0],
    "optimizer.beta2": [1.0],
    "optimizer.eps": [0.0],
    "optimizer.ema": [1.0],
    "schedule.peak": [0.0],
    "schedule.decay_fraction": [0.0, 1.1],
    "parallel.zero_stage": [0, 4],
    "telemetry.peak_tflops": [0.0],
    "objective.duo.top_k": [1],
    "objective.esolm.alpha_0": [1.01],
    "objective.esolm.batch_split": [1.0],
    "objective.replaid.self_conditioning": [0.3, 2.0],
    "objective.mdm_prime.base": [1],
    "objective.mdm_prime.joint_mask_above": [1.0],
}
MAY_BE_ZERO = {
    "seed", "objective.mask_id", "schedule.warmup_steps", "schedule.final", "optimizer.clip", "optimizer.ema", "optimizer.weight_decay",
    "optimizer.beta1", "optimizer.beta2", "validation.every", "checkpoint.keep", "telemetry.hang_seconds", "guard.max_skips",
    "guard.replicas_every", "objective.schedule_eps", "data.random_length_probability",
    "objective.duo.log10_tau_start", "objective.duo.log10_tau_end", "objective.duo.curriculum_start", "objective.duo.curriculum_end",
    "objective.duo.gamma_min", "objective.duo.gamma_max", "objective.esolm.alpha_0", "objective.replaid.gamma_0", "objective.replaid.gamma_1",
    "objective.replaid.self_conditioning", "objective.replaid.prior_ramp_steps", "objective.replaid.endpoint_decay",
    "objective.mdm_prime.shuffle_seed", "objective.mdm_prime.joint_mask_above",
}  # fmt: skip
MAY_BE_NEGATIVE = {
    "objective.duo.log10_tau_start", "objective.duo.log10_tau_end", "objective.duo.gamma_min", "objective.duo.gamma_max",
    "objective.replaid.gamma_0", "objective.replaid.gamma_1",
}  # fmt: skip
EVERY_FLOAT = changed(BASE, duration=DurationConfig(tokens=1.0, flops=1.0), telemetry__peak_tflops=1.0)
FLOATS = {key for key, value in leaves(EVERY_FLOAT) if isinstance(value, float)}


@pytest.mark.parametrize("key", RANGES)
def test_nonsense_is_refused_in_every_field(key: str) -> None:
    assert len(RANGES) >= 46 and len(FLOATS) >= 14
    bad = list(NONSENSE.get(key, []))
    if key not in ("name", "root", "tokenizer", "init_from", "telemetry.wandb_project", "sft.train", "sft.validation"):
        bad += ([-99] if key in MAY_BE_NEGATIVE else [-1]) + ([0] if key not in MAY_BE_ZERO else [])
    if key in FLOATS:
        bad += [math.nan, math.inf, -math.inf]
    assert bad
    for value in bad:
        with pytest.raises(UserError, match=re.escape(key)):
            validate(changed(_owner(key), **{key.replace(".", "__"): value}), world_size=1)


def _owner(key: str) -> RunConfig:
    """A run whose objective has the constant, or one that fine-tunes."""
    if key.startswith("sft."):
        return changed(BASE, sft=SFTConfig(train="train.jsonl"))
    section = key.split(".")[1] if key.startswith("objective.") else ""
    return changed(BASE, objective=ObjectiveConfig(name=section)) if section in SECTIONS else BASE  # type: ignore[arg-type]


def test_derived_quantities() -> None:
    config = changed(
        LLAMA, parallel__tensor=2, parallel__pipeline=2, batch__global_sequences=64, duration=DurationConfig(tokens=2.0e9, stop_after=100)
    )
    derived = resolve(config, world_size=16, model_size=32001)
    assert (derived.data_parallel, derived.micro_batches, derived.tokens_per_step) == (4, 8, 131072)
    assert (derived.steps, derived.last_step, derived.warmup_steps) == (15258, 100, 152)
    assert (derived.model_size, derived.padded_size) == (32001, 32128)
    assert legal_tensor_sizes(config) == [1, 2, 4]


def test_a_run_of_one_step_and_a_schedule_that_just_fits() -> None:
    one = changed(BASE, duration=DurationConfig(steps=1))
    assert learning_rate(one.schedule, 0, resolve(one, world_size=1, model_size=10).steps) == one.schedule.peak
    tight = changed(BASE, schedule__kind="wcd", schedule__warmup_steps=500, schedule__decay_fraction=0.5)
    assert resolve(tight, world_size=1, model_size=10).warmup_steps == 500
