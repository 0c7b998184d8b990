"""README.md of an exported model: what it is, where it comes from, what was measured, how to load it. Every number is from a file."""

import json
import math
from pathlib import Path
from typing import Any

from pretrain.backbones.parameters import count_parameters
from pretrain.convert.gate_reports import REPORT, GateReport
from pretrain.convert.plain_network import TrainedModel
from pretrain.convert.provenance import validations

_OBJECTIVES = {
    "ar": "autoregressive: the next token",
    "mdlm": "masked diffusion (MDLM)",
    "duo": "uniform-state diffusion (Duo)",
    "esolm": "any-order autoregression and masked diffusion in one (Eso-LM)",
    "replaid": "Gaussian diffusion of learned embeddings (RePlaid)",
    "mdm_prime": "masked diffusion of the digits of token ids (MDM-Prime-v2)",
}


def write_card(folder: Path, trained: TrainedModel, origin: dict[str, Any], report: GateReport, *, stock: bool, dtype: str) -> None:
    """Write README.md."""
    run, vocabulary = trained.run, trained.vocabulary
    backbone = run.backbone
    mask = "none" if vocabulary.mask_id is None else f"id {vocabulary.mask_id}"
    rows = [
        ("objective", _OBJECTIVES[run.objective.name]),
        ("backbone", f"{backbone.kind}, width {backbone.hidden}, {backbone.layers} layers, {backbone.heads} heads, {backbone.kv_groups} key/value"
                     f" heads, MLP {backbone.ffn_width}"),
        ("parameters", f"{count_parameters(backbone, vocabulary.model_size):,}"),
        ("vocabulary", f"{vocabulary.model_size:,} classes ({vocabulary.tokenizer_size:,} ids of the tokenizer; mask: {mask})"),
        ("sequence length in training", f"{run.batch.length:,} tokens"),
        ("trained on", f"{origin['tokens']:,} input tokens, {origin['step']:,} steps"),
        ("weights", f"{origin['weights']}, {dtype}"),
        ("code", origin["code"]),
        *((f"data manifest of {name} (BLAKE2b)", value) for name, value in origin["data_manifests_blake2b"].items()),
        *((f"problems of {name} (BLAKE2b)", value) for name, value in origin.get("problems_blake2b", {}).items()),
        ("tokenizer (BLAKE2b)", origin["tokenizer_blake2b"]),
        *([("imported from", str(origin["imported"]))] if "imported" in origin else []),
    ]  # fmt: skip
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    (folder / "README.md").write_text(
        f"---\nlibrary_name: transformers\n---\n# {run.name}\n\n| | |\n|---|---|\n{table}\n\n"
        f"{_prompts(trained)}## Measured\n\n{_measured(trained, origin)}\n\n"
        f"## Load and sample\n\n```python\n{_example(stock)}```\n\n## Checked before publication\n\n{report.text()}\n\n"
        f"The whole report: {REPORT}.\n",
        encoding="utf-8",
    )


def _prompts(trained: TrainedModel) -> str:
    """How a fine-tuned model is to be asked."""
    if trained.run.sft is None:
        return ""
    form = trained.run.sft.format
    segments = {"question": form.question, "rationale": form.rationale, "answer": form.answer}
    listed = "\n".join(f"{name}: {json.dumps(template, ensure_ascii=False)}" for name, template in segments.items())
    apart = " Each begins with BOS." if form.segment_bos else ""
    return (
        "## Prompts\n\nFine-tuned to answer word problems in this form, also in `prompt_format` of config.json. The prompt is the question's "
        f"segment, the response the rationale's and the answer's; segments are tokenised apart, and the response ends with end-of-text.{apart}\n\n"
        f"```\n{listed}\n```\n\n"
    )


def _measured(trained: TrainedModel, origin: dict[str, Any]) -> str:
    found = validations(trained)
    if not found:
        return "The run's log holds no likelihood of held-out text at or before this step."
    record = found[0]
    nats, interval = float(record["nelbo_nats_per_token"]), float(record["ci95_nats_per_token"])
    width = f" ± {interval:.4f} (95% confidence interval)" if math.isfinite(interval) else ""
    raw = "" if origin["weights"] == "raw" else " It was measured with the raw weights, not with the average that is exported."
    return (
        f"Held-out text of the run at step {record['step']:,}: {nats:.4f} nats/token{width}, label `{record['nelbo_label']}`, over "
        f"{record['validation_tokens']:,} tokens.{raw}\n"
        "Labels: `exact`: the negative log-likelihood; `bound`: its expectation is an upper bound on it; `estimate`: close to a bound, not proven "
        "above the likelihood; `not_a_likelihood`: a training loss."
    )


def _example(stock: bool) -> str:
    if stock:
        return (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
            'tokenizer, model = AutoTokenizer.from_pretrained("."), AutoModelForCausalLM.from_pretrained(".")\n'
            'print(tokenizer.decode(model.generate(**tokenizer("The", return_tensors="pt"), max_new_tokens=50)[0]))\n'
        )
    return (
        "from transformers import AutoModel, AutoTokenizer\n"
        'tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=True)\n'
        'model = AutoModel.from_pretrained(".", trust_remote_code=True).eval()\n'
        "print(tokenizer.batch_decode(model.sample(count=2, seed=1).sequences))\n"
    )
