"""Load exported folders with torch, transformers and safetensors alone: `python clean_load.py FOLDER …`.

Imports nothing of this project, and refuses to import what an environment with only those packages would not have. For each folder: logits of
fixed ids, a sample or a generation, a save and a second load with equal logits. Prints one JSON line per folder.
"""

import json
import re
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ALLOWED = ("torch", "transformers", "safetensors")


def needed(names):  # type: ignore[no-untyped-def]
    """The distributions of these names and of everything that they require without extras."""
    found, left = set(), list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        try:
            wanted = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        left += [re.match(r"[\w.-]+", line)[0] for line in wanted if "extra ==" not in line]  # type: ignore[index]
    return found


class Blind:
    """A finder that does not see some packages."""

    def __init__(self, finder, hidden):  # type: ignore[no-untyped-def]
        self._finder, self._hidden = finder, hidden

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        return None if name.split(".")[0] in self._hidden else self._finder.find_spec(name, path, target)

    def find_distributions(self, context):  # type: ignore[no-untyped-def]
        found = self._finder.find_distributions(context) if hasattr(self._finder, "find_distributions") else ()
        return (one for one in found if re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower() in kept)

    def __getattr__(self, name):  # type: ignore[no-untyped-def]
        return getattr(self._finder, name)


kept = needed(ALLOWED)
owners = metadata.packages_distributions()
hidden = {top for top, owned in owners.items() if not any(re.sub(r"[-_.]+", "-", name).lower() in kept for name in owned)} | {"pretrain"}
sys.meta_path[:] = [Blind(finder, hidden) for finder in sys.meta_path]

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

transformers.utils.logging.set_verbosity_error()


def logits(model, config):  # type: ignore[no-untyped-def]
    """Of fixed ids, or latents, at the middle of the noise."""
    batch, length = 2, 12
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(min(config.vocab_size, getattr(config, "tokenizer_size", config.vocab_size)), (batch, length), generator=generator)
    objective = getattr(config, "objective", "stock")
    half = torch.full((batch,), 0.5)
    with torch.no_grad():
        if objective == "replaid":
            return model(latents=torch.randn(batch, length, config.latent, generator=generator), timesteps=half).logits
        return model(ids, timesteps=half).logits if objective == "duo" else model(ids).logits


def check(folder: str) -> dict[str, object]:
    """One folder."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    stock = not hasattr(config, "objective")
    model = (AutoModelForCausalLM if stock else AutoModel).from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    first = logits(model, config)
    text = "the king"
    if stock or config.objective == "ar":
        ids = torch.tensor([[config.eos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0].tolist()
        lengths = len(made) <= ids.shape[1] + 8
    else:
        made = model.sample(count=2, length=12, seed=5).sequences[0].tolist()
        lengths = len(made) == 12
    assert lengths and all(0 <= token < config.vocab_size for token in made)
    loss = None
    if not stock:
        ids = torch.tensor([made[:12]] * 2)
        model.train()
        output = model(ids, labels=ids, seed=7)
        output.loss.backward()
        loss = float(output.loss)
        model.eval()
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        copied = sorted(path.name for path in Path(place).glob("*.py"))
        again = (AutoModelForCausalLM if stock else AutoModel).from_pretrained(place, trust_remote_code=True).eval()
        assert torch.equal(logits(again, config), first), "saved and loaded, the logits are others"
        assert stock or "modeling_language_model.py" in copied
    half = (AutoModelForCausalLM if stock else AutoModel).from_pretrained(folder, trust_remote_code=True, torch_dtype=torch.bfloat16).eval()
    near = float((logits(half, config).float() - first).abs().max() / first.abs().max())
    assert near < 0.1, near
    return {
        "folder": Path(folder).name, "transformers": transformers.__version__, "logits": round(float(first.double().abs().sum()), 2), "made": made,
        "loss": loss, "bf16": near, "text": tokenizer.decode(made, skip_special_tokens=True),
    }  # fmt: skip


if __name__ == "__main__":
    for place in sys.argv[1:]:
        print(json.dumps(check(place)), flush=True)
