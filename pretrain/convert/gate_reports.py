"""What the export gate found: gate.json beside the weights."""

import json
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

REPORT = "gate.json"
_PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "sentencepiece", "megatron-core")


@dataclass(frozen=True)
class Check:
    """One comparison. value: what was measured, in `unit`; passed: value <= threshold. said: the sentence about a failure."""

    name: str
    value: float
    threshold: float
    unit: str
    said: str = ""

    @property
    def passed(self) -> bool:
        """A value that is no number fails."""
        return self.value <= self.threshold


@dataclass
class GateReport:
    """All comparisons of one export, with what they were made on."""

    facts: dict[str, Any]
    checks: list[Check] = field(default_factory=list)

    def add(self, name: str, value: float, threshold: float, unit: str, said: str = "") -> bool:
        """Record a comparison; whether it passed."""
        self.checks.append(Check(name, value, threshold, unit, "" if value <= threshold else said))
        return self.checks[-1].passed

    @property
    def failures(self) -> list[Check]:
        """What did not pass."""
        return [check for check in self.checks if not check.passed]

    def write(self, folder: Path) -> None:
        """gate.json."""
        versions = {}
        for package in _PACKAGES:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        checks = [asdict(check) | {"passed": check.passed} for check in self.checks]
        text = json.dumps({"passed": not self.failures, **self.facts, "versions": versions, "checks": checks}, indent=1, ensure_ascii=False)
        (folder / REPORT).write_text(text + "\n", encoding="utf-8")

    def summary(self) -> str:
        """One clause: the worst of each kind."""
        logits = max((check.value for check in self.checks if check.name.startswith("logits")), default=0.0)
        return f"all {len(self.checks)} comparisons with the training backbone passed, logits to {logits:.1e}"

    def text(self) -> str:
        """Rows for the model card."""
        rows = [f"| {check.name} | {check.value:.2g} {check.unit} | {check.threshold:g} |" for check in self.checks]
        return "| compared with the training backbone | found | allowed |\n|---|---|---|\n" + "\n".join(rows)
