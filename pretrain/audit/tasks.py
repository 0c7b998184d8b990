"""What launchers/prepare_data.py can tell about a run: task -> (its configuration, what it does). torch is imported when a task runs."""

from collections.abc import Callable
from typing import Any

from pretrain.audit.config import ShowConfig, StepAuditConfig


def _audit_step(config: StepAuditConfig) -> None:
    from pretrain.audit.documents import audit_step

    audit_step(config)


def _show(config: ShowConfig) -> None:
    from pretrain.audit.noised import show

    show(config)


RUN_TASKS: dict[str, tuple[type, Callable[[Any], object]]] = {
    "audit_step": (StepAuditConfig, _audit_step),
    "show": (ShowConfig, _show),
}
