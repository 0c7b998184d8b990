"""A noised sample in words, for each objective. Positions follow the text, whatever order the network reads them in.

`‹mask›` stands for a masked token, `‹old→new›` for a replaced one, `‹token:1?0›` for one with masked digits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from pretrain.audit.run import AuditedRun
from pretrain.convert.held_out import load_objective
from pretrain.objectives.base import Corrupted
from pretrain.objectives.mdm_prime import MDMPrime
from pretrain.objectives.replaid import RePlaid


@dataclass(frozen=True)
class Described:
    """Notes, one a line, the clean text, and the text as the network reads it."""

    notes: list[str]
    clean: str
    noised: str


def describe(run: AuditedRun, number: int, sample: Corrupted, tokens: int | None) -> Described:
    """What a sample of the run's objective says; `tokens`: of so many positions only."""
    return _KINDS[run.objective.name](run, sample, slice(0, tokens))


def _ar(run: AuditedRun, sample: Corrupted, part: slice) -> Described:
    scored_L = np.asarray(sample.targets["scored"])
    notes = [f"the loss asks for the next token at {_positions(scored_L)}; inputs are not noised"]
    targets = _text(run, sample.targets["ids"][part])
    return Described(notes, _text(run, sample.inputs["ids"][part]), f"(next tokens) {targets}")


def _mdlm(run: AuditedRun, sample: Corrupted, part: slice) -> Described:
    ids_L, masked_L = sample.targets["ids"], sample.targets["masked"]
    notes = [f"masked and scored: {_positions(masked_L)}", _weights(sample), *_cut(sample)]
    return Described(notes, _text(run, ids_L[part]), _masked(run, ids_L[part], masked_L[part]))


def _duo(run: AuditedRun, sample: Corrupted, part: slice) -> Described:
    ids_L, noisy_L = sample.targets["ids"], sample.targets["noisy"]
    replaced_L = ids_L != noisy_L
    alpha = float(sample.targets["alpha"])
    notes = [f"alpha {alpha:.6g}; replaced: {_positions(replaced_L)}; scored: {_positions(sample.targets['scored'])}", *_cut(sample)]
    if "weights" in sample.inputs:
        weights_LK = sample.inputs["weights"]
        first = float(weights_LK.max(1).mean())
        notes.append(f"curriculum: the network reads {weights_LK.shape[1]} weighted ids per position, the heaviest of weight {first:.3f} on average")
    marks = [
        f"‹{_piece(run, old)}→{_piece(run, new)}›" if changed else None
        for old, new, changed in zip(ids_L[part], noisy_L[part], replaced_L[part], strict=True)
    ]
    return Described(notes, _text(run, ids_L[part]), _marked(run, ids_L[part], marks))


def _esolm(run: AuditedRun, sample: Corrupted, part: slice) -> Described:
    order_L = sample.inputs["positions"][: len(sample.targets["ids"])]
    back_L = np.argsort(order_L)
    ids_L, masked_L = sample.targets["ids"][back_L], sample.targets["masked"][back_L]
    sequential = len(sample.inputs["streams"]) == 2
    clean = len(order_L) - int(masked_L.sum())
    kind = "sequential (two streams: with masks, then clean)" if sequential else "diffusion (one stream)"
    listed = ", ".join(map(str, order_L[:12]))
    first = f"{clean} clean or padding, from position(s) {listed}{', …' if len(order_L) > 12 else ''}"
    notes = [f"{kind}; masked and scored: {_positions(masked_L)}", f"order of generation: {first}", _weights(sample)]
    return Described(notes, _text(run, ids_L[part]), _masked(run, ids_L[part], masked_L[part]))


def _replaid(run: AuditedRun, sample: Corrupted, part: slice) -> Described:
    objective = run.objective
    assert isinstance(objective, RePlaid)
    learned = "as initialised"
    if run.earlier:
        load_objective(objective, run.earlier[-1].folder)
        learned = f"as learned by step {run.earlier[-1].state.step}"
    inputs, targets = (
        {key: torch.as_tensor(np.asarray(value))[None] for key, value in arrays.items()} for arrays in (sample.inputs, sample.targets)
    )
    times = {key: value.detach() for key, value in objective.prepare(inputs, targets, evaluation=False)[1].items()}
    reconstruct, conditioned = bool(times["reconstruct"]), bool(times["self_conditioned"])
    normals_LE = sample.inputs["normals"]
    notes = [
        f"t {float(times['t']):.6g}, gamma {float(times['g']):.6g}, weight {float(times['weight']):.6g}, by the schedule {learned}"
        f"{' (a reconstruction entry)' if reconstruct else ''}{'; self-conditioned' if conditioned else ''}",
        f"u {float(sample.inputs['u']):.6g}; normals of [{normals_LE.shape[0]}, {normals_LE.shape[1]}]: mean {normals_LE.mean():.4f}, "
        f"variance {normals_LE.var():.4f}, first {', '.join(f'{value:.4f}' for value in normals_LE[0][:4])}",
        *_cut(sample),
    ]
    text_L = sample.targets["text"]
    noised = f"latents of {_positions(text_L)}: alpha x embedding + sigma x normals"
    return Described(notes, _text(run, sample.targets["ids"][part]), noised)


def _mdm_prime(run: AuditedRun, sample: Corrupted, part: slice) -> Described:
    assert isinstance(run.objective, MDMPrime)
    ids_L, masked_LJ, digits_LJ = sample.targets["ids"], sample.targets["masked"], sample.inputs["digits"]
    whole, partly = int(masked_LJ.all(1).sum()), int((masked_LJ.any(1) & ~masked_LJ.all(1)).sum())
    notes = [
        f"digits masked: {int(masked_LJ.sum())} of {masked_LJ.size}; tokens masked whole: {whole}, in part: {partly}",
        f"weight of the NELBO {float(sample.targets['weight']):.6g}",
        *_cut(sample),
    ]
    marks = [_digits(run, token, masked_J, digits_J) for token, masked_J, digits_J in zip(ids_L[part], masked_LJ[part], digits_LJ[part], strict=True)]
    return Described(notes, _text(run, ids_L[part]), _marked(run, ids_L[part], marks))


def _digits(run: AuditedRun, token: int, masked_J: np.ndarray, digits_J: np.ndarray) -> str | None:
    if not masked_J.any():
        return None
    if masked_J.all():
        return "‹mask›"
    shown = [("?" if masked else str(digit)) for digit, masked in zip(digits_J, masked_J, strict=True)]
    return f"‹{_piece(run, token)}:{('' if max(map(len, shown)) == 1 else ' ').join(shown)}›"


_KINDS: dict[str, Callable[[AuditedRun, Corrupted, slice], Described]] = {
    "ar": _ar, "mdlm": _mdlm, "duo": _duo, "esolm": _esolm, "replaid": _replaid, "mdm_prime": _mdm_prime,
}  # fmt: skip


def _masked(run: AuditedRun, ids_L: np.ndarray, masked_L: np.ndarray) -> str:
    return _marked(run, ids_L, ["‹mask›" if masked else None for masked in masked_L])


def _marked(run: AuditedRun, ids_L: np.ndarray, marks: Sequence[str | None]) -> str:
    """The text with marks in the place of tokens; runs of one mark are counted."""
    words = []
    for mark, group in groupby(range(len(ids_L)), key=lambda place: marks[place]):
        places = list(group)
        words.append(_text(run, ids_L[places]) if mark is None else mark if len(places) == 1 else f"{mark}x{len(places)}")
    return " ".join(words)


def _text(run: AuditedRun, ids_L: np.ndarray) -> str:
    return repr(run.tokenizer.decode([[int(token) for token in ids_L if token < run.tokenizer.size]])[0])[1:-1]


def _piece(run: AuditedRun, token: int) -> str:
    return run.tokenizer.piece(int(token)) if token < run.tokenizer.size else f"id {token}"


def _positions(which_L: np.ndarray) -> str:
    """`37 of 64 positions (0-4, 7, …)`."""
    found = np.flatnonzero(which_L)
    runs = [piece for piece in np.split(found, np.flatnonzero(np.diff(found) > 1) + 1) if len(piece)]
    listed = ", ".join(str(piece[0]) if len(piece) == 1 else f"{piece[0]}-{piece[-1]}" for piece in runs[:12])
    return f"{len(found)} of {len(which_L)} positions" + (f" ({listed}{', …' if len(runs) > 12 else ''})" if listed else "")


def _weights(sample: Corrupted) -> str:
    return f"weight {float(sample.targets['loss_weight']):.6g} in the loss, {float(sample.targets['nelbo_weight']):.6g} in the NELBO"


def _cut(sample: Corrupted) -> list[str]:
    """A note where the random-length rule cut the sequence."""
    length = len(np.asarray(sample.inputs["documents"]))
    return [f"cut to {sample.count} of {length} tokens by the random-length rule"] if sample.count < length else []
