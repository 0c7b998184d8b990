"""One evaluation: a model and problems in; samples, scores and a card out."""

import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from finetune.gsm8k_card import Throughput, card, write_card
from finetune.gsm8k_config import LEFT_TO_RIGHT, GSM8KEvaluation
from finetune.gsm8k_data import first_problems, majority_baseline, read_evaluation_problems
from finetune.gsm8k_decode import Asked, Decoder, HasAnswer, answers
from finetune.gsm8k_progress import EvaluationDisplay
from finetune.gsm8k_prompts import PromptFormat, PromptMaker, prompt_format
from finetune.gsm8k_samples import SampleFolder, record_of, settings_hash
from finetune.gsm8k_scores import Baseline, Report, report, write_disagreements
from pretrain.checkpoint.layout import MANIFEST
from pretrain.convert.hub_folder import is_hub_folder
from pretrain.convert.origin import read_origin
from pretrain.data.files import file_hash
from pretrain.data.problems import Problem
from pretrain.data.sft_format import SFTFormat
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.hf_model.sampling_draw import TokenLaw
from pretrain.hf_model.sampling_methods import Method
from pretrain.outputs import require_writable
from pretrain.sampling.config import SamplingConfig
from pretrain.sampling.generate import choose_method
from pretrain.sampling.memory import require_memory
from pretrain.sampling.model import SampledModel
from pretrain.sampling.session import choose_dtype

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is settled before weights are read."""

    problems: list[Problem]
    in_file: int
    prompts: list[tuple[int, ...]]
    baseline: Baseline
    format: PromptFormat
    maker: PromptMaker
    sampling: SamplingConfig
    method: Method
    settings: Mapping[str, Any]


def evaluate_gsm8k(
    model: SampledModel, config: GSM8KEvaluation, *, device: torch.device, host_memory: Callable[[], float], say: Say = print
) -> Report:
    """Answer what is not answered yet, score everything, write the card.

    host_memory  bytes that this process could still take, where it runs without CUDA.

    Raises UserError, before weights are read, for what does not fit together, and for a folder that cannot be used.
    """
    plan = _plan(model, config)
    output = Path(config.output) if config.output else model.home / "gsm8k" / f"{config.sampler}-{settings_hash(plan.settings)}"
    require_writable(output, folder=True)
    for sentence in _notes(model, config, plan):
        print(f"note: {sentence}", file=sys.stderr)
    with SampleFolder(output, plan.settings) as samples:
        decoder = _decoder(model, config, plan, device, host_memory)
        _answer(decoder, model, config, plan, samples)
        records = [samples.records[item] for item in range(len(plan.problems))]
        found = report(records, plan.baseline, config.confidence)
        shown = write_disagreements(output, records)

        def write(throughput: Throughput | None) -> None:
            tree = card(
                model=_identity(model), settings=plan.settings, hash=samples.hash, files=_files(config), format_origin=plan.format.origin,
                report=found, throughput=throughput, batch=config.batch, device=_device_name(device), problems_in_file=plan.in_file,
            )  # fmt: skip
            write_card(output, tree, found, throughput)

        write(None)  # what is known is kept, whatever becomes of the measurement
        for line in (*found.lines(), *shown):
            say(line)
        if config.throughput_items and (throughput := _throughput(decoder, model, config, plan, device)) is not None:
            write(throughput)
            say(str(throughput))
    say(f"{output} holds card.md, card.json, samples.jsonl and disagreements.jsonl")
    return found


def require_tokenizer(model: SampledModel) -> None:
    """UserError where a run's checkpoint was trained with another tokenizer than lies there now; exports check theirs when they are opened."""
    if not isinstance(model.codec, Tokenizer) or is_hub_folder(model.folder):
        return
    trained = read_origin(model.folder).tokenizer
    if not model.codec.hash.startswith(trained):
        raise UserError(
            f"{model.folder} was trained with a tokenizer of hash {trained}, and {model.codec.path} has {model.codec.hash[: len(trained)]}; "
            "put back the tokenizer of that run"
        )


def _plan(model: SampledModel, config: GSM8KEvaluation) -> _Plan:
    require_tokenizer(model)
    sampling = config.sampling(config.sampler_of(model.objective))
    format = prompt_format(model.folder, config.format)
    if _fine_tuned_duo(model, config, format):
        sampling = replace(sampling, clean_share="filled")
    method = choose_method(sampling, model.objective)
    everything = read_evaluation_problems(Path(config.data))
    problems = everything[: config.items]
    shots = first_problems(Path(config.shots_data), config.shots) if config.shots_data else []
    counted = read_evaluation_problems(Path(config.train), "train") if config.train else problems
    answer, accuracy = majority_baseline(problems, counted, config.confidence)
    maker = PromptMaker(format.format, model.codec, model.vocabulary.eos_id, shots)
    prompts = [tuple(maker.ids(problem)) for problem in problems]
    if (shortest := min(map(len, prompts))) >= format.format.context:
        rule = f"the shortest prompt has {shortest} tokens, and context={format.format.context} leaves no room for an answer to any of the problems"
        raise UserError(f"{rule}; set a larger format.context={', or fewer shots=' if shots else ''}")
    return _Plan(
        problems=problems, in_file=len(everything), prompts=prompts,
        baseline=Baseline(answer=answer, source="the training problems" if config.train else "the test problems themselves", accuracy=accuracy),
        format=format, maker=maker, sampling=sampling, method=method, settings=_settings(model, config, format.format, sampling, method, len(shots)),
    )  # fmt: skip


def _fine_tuned_duo(model: SampledModel, config: GSM8KEvaluation, format: PromptFormat) -> bool:
    """Whether the network has never seen a noised prompt, and is to be told the share of clean tokens among the others."""
    return format.fine_tuned and model.objective == "duo" and config.sampler == LEFT_TO_RIGHT and config.clean_share is None


def _settings(
    model: SampledModel, config: GSM8KEvaluation, format: SFTFormat, sampling: SamplingConfig, method: Method, shots: int
) -> dict[str, Any]:
    """Everything that an output depends on, and nothing else: not the batch, the device or the number of problems."""
    read = {key: value for key, value in asdict(format).items() if key not in ("padding", "score_prompt")}
    return {
        "checkpoint": checkpoint_hash(model.folder), "step": model.origin.get("step"), "objective": model.objective,
        "tokenizer": model.codec.hash if isinstance(model.codec, Tokenizer) else None,
        "data": file_hash(Path(config.data)), "format": read,
        "shots": shots, "shots_data": file_hash(Path(config.shots_data)) if config.shots_data else None,
        "sampler": config.sampler, "sampler_settings": dict(method.settings), "temperature": sampling.temperature, "top_k": sampling.top_k,
        "top_p": sampling.top_p, "seed": config.seed, "dtype": config.dtype,
    }  # fmt: skip


def checkpoint_hash(folder: Path) -> str:
    """BLAKE2b-256 of a checkpoint's manifest, which holds the checksum of its every file; or of an export's configuration and weights."""
    if (folder / MANIFEST).is_file():
        return file_hash(folder / MANIFEST)
    digest = hashlib.blake2b(digest_size=32)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(f"{path.name} {file_hash(path)}\n".encode())
    return digest.hexdigest()


def _notes(model: SampledModel, config: GSM8KEvaluation, plan: _Plan) -> list[str]:
    """What a person should know before the minutes go by."""
    context, found = plan.format.format.context, [f"prompts follow {plan.format.origin}"]
    if context > model.trained_length:
        found.append(f"context={context} is beyond the {model.trained_length} tokens that the model was trained on; set format.context= to fewer")
    if long := sum(len(prompt) >= context for prompt in plan.prompts):
        lost = f"{long} of {len(plan.prompts)} prompts leave no room in context={context} and count as wrong"
        found.append(f"{lost}; a larger format.context= fits them")
    if plan.format.format.padding == "unscored" and model.objective not in ("ar", "esolm"):
        found.append("the model was fine-tuned with format.padding=unscored, so it never saw a response of unknown length, as it is asked for here")
    if model.objective == "replaid" and config.sampler == LEFT_TO_RIGHT:
        found.append("RePlaid's process has no order, and training never showed a half-known response; sampler=ddpm is its own")
    return found


def _decoder(model: SampledModel, config: GSM8KEvaluation, plan: _Plan, device: torch.device, host_memory: Callable[[], float]) -> Decoder:
    network, constants = model.load(device, choose_dtype(config.dtype))
    context = plan.format.format.context
    require_memory(network, model.objective, host_memory, batch=config.batch, count=len(plan.problems), length=context)
    sampling = plan.sampling
    law = TokenLaw(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, mask_id=model.vocabulary.mask_id)
    return Decoder(
        network=network, constants=constants, method=plan.method, law=law, vocabulary=model.vocabulary, seed=config.seed, context=context
    )  # fmt: skip


def _has_answer(model: SampledModel, format: SFTFormat) -> HasAnswer | None:
    """Of the two-example format: whether what stands before an answer is in an output."""
    mark, size = format.answer.partition("{answer}")[0].strip(), model.vocabulary.tokenizer_size
    if format.examples == "one":
        return None
    return lambda ids: bool(mark) and mark in model.codec.decode([[token for token in ids if token < size]])[0]


def _answer(decoder: Decoder, model: SampledModel, config: GSM8KEvaluation, plan: _Plan, samples: SampleFolder) -> None:
    """Every problem that has no record yet."""
    missing = [item for item in range(len(plan.problems)) if item not in samples.records]
    done = {item: samples.records[item].correct["strict"] for item in range(len(plan.problems)) if item in samples.records}
    if done:
        print(f"note: {len(done)} of {len(plan.problems)} problems were answered before, with equal settings", file=sys.stderr)
    asked = []
    for item in missing:
        if len(plan.prompts[item]) < decoder.context:
            asked.append(Asked(item, plan.prompts[item]))
        else:
            problem = plan.problems[item]
            samples.add(record_of(item, problem, plan.format.format.prompt(problem), "", None, samples.hash))
            done[item] = False
    tokens = 0
    with EvaluationDisplay(len(plan.problems), len(done), sys.stderr) as display:
        for batch in answers(decoder, asked, config.batch, _has_answer(model, plan.format.format)):
            size = model.vocabulary.tokenizer_size  # a mask that is left has no text
            texts = model.codec.decode([[token for token in answered.output if 0 <= token < size] for _, answered in batch])
            for (one, answered), text in zip(batch, texts, strict=True):
                problem = plan.problems[one.item]
                record = record_of(one.item, problem, plan.format.format.prompt(problem), text, answered, samples.hash)
                samples.add(record)
                done[one.item] = record.correct["strict"]
                tokens += answered.tokens
            display.show(len(done), sum(done.values()), tokens)


def _throughput(decoder: Decoder, model: SampledModel, config: GSM8KEvaluation, plan: _Plan, device: torch.device) -> Throughput | None:
    """The first problems once more, one at a time, after one that is not counted; None where no prompt fits."""
    fitting = [Asked(item, prompt) for item, prompt in enumerate(plan.prompts) if len(prompt) < decoder.context][: config.throughput_items]
    if not fitting:
        return None
    has_answer = _has_answer(model, plan.format.format)
    list(answers(decoder, fitting[:1], 1, has_answer))
    start = time.perf_counter()
    found = [answered for batch in answers(decoder, fitting, 1, has_answer) for _, answered in batch]
    seconds = time.perf_counter() - start
    return Throughput(
        items=len(found), tokens=sum(one.tokens for one in found), evaluations=sum(one.evaluations for one in found), seconds=seconds,
        device=_device_name(device),
    )  # fmt: skip


def _identity(model: SampledModel) -> dict[str, Any]:
    return {"name": model.home.name, "folder": str(model.folder), "objective": model.objective, **model.origin}


def _files(config: GSM8KEvaluation) -> dict[str, str]:
    named: Sequence[str] = ("data", "train", "shots_data")
    return {key: value for key in named if (value := getattr(config, key)) is not None}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
