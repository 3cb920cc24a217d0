"""Make the table of checks: every case, float32, the gradient, eval and train mode."""

import warnings

import torch
from torch import Tensor

from vitascope.checking.bench import TOLERANCE, Bench, Finding, agree
from vitascope.checking.result import Row
from vitascope.checking.subject import Calm, Subject
from vitascope.errors import first_line

SKIPPED = "not checked, because the forward pass is wrong"
DRAWS = 40  # repetitions in train mode


def table(bench: Bench, right: Finding, random: bool) -> list[Row]:
    """Check every case, float32, the gradient, eval and train mode."""
    subject, way = bench.subject, right.way
    rows = []
    for case in subject.cases():
        theirs = bench.theirs(way, case)
        holds = isinstance(theirs, Tensor) and agree(
            theirs, bench.ours(way, case, right.reading), TOLERANCE[subject.dtype]
        )
        note = "" if isinstance(theirs, Tensor) else f"raises {type(theirs).__name__}: {first_line(theirs, 70)}"
        optional = "" if case.required else "(optional)" if holds else "(optional, does not count)"
        rows.append(Row(case.name, holds, f"{note} {optional}".strip()))
    rows.append(Row(f"{str(subject.dtype).removeprefix('torch.')}, compared with {subject.native()}", rows[0].holds))
    if subject.dtype == torch.float64:
        rows.append(_other_dtype(subject, right))
    rows.append(_gradient(subject, right, rows[0].holds is True))
    rows.append(Row("eval mode: same result on every call", not random))
    rows.append(_train_mode(subject, right, rows[0].holds is True))
    return [row for row in rows if row.check]


def _other_dtype(subject: Subject, right: Finding) -> Row:
    case = next(case for case in subject.cases() if case.required)
    subject.dtype = torch.float32
    try:
        bench = Bench(subject)
        theirs = bench.theirs(right.way, case)
        holds = isinstance(theirs, Tensor) and agree(
            theirs, bench.ours(right.way, case, right.reading), TOLERANCE[torch.float32]
        )
        note = f"raises {first_line(theirs, 70)}" if isinstance(theirs, Exception) else ""
        return Row("float32", holds, note)
    finally:
        subject.dtype = torch.float64


def _train_mode(subject: Subject, right: Finding, forward: bool) -> Row:
    case = next(case for case in subject.cases() if case.required)
    subject.training = True
    try:
        if not forward:
            return Row("train mode", None, SKIPPED)
        ours = Bench(subject).ours(right.way, case, right.reading)
        drawn = [Bench(subject).theirs(right.way, case) for _ in range(DRAWS)]
        if any(agree(theirs, ours, TOLERANCE[subject.dtype]) for theirs in drawn):
            return Row("train mode, dropout disabled", True)
        random = not all(agree(drawn[0], other, 1e-9) for other in drawn[1:])  # e.g. stochastic depth
        return (
            Row("train mode", None, "not compared, because the result is random")
            if random
            else Row("train mode", False)
        )
    finally:
        subject.training = False


def _gradient(subject: Subject, right: Finding, forward: bool) -> Row:
    """Compare the gradients of a weighted sum of the outputs with respect to the inputs and the weights."""
    case = next(case for case in subject.cases() if case.required)
    leaves = {name: tensor.to(subject.dtype).requires_grad_() for name, tensor in subject.inputs(case).items()}
    leaves = {name: tensor for name, tensor in leaves.items() if tensor.is_floating_point()}
    if not forward or not leaves:
        return Row("gradient", None, SKIPPED) if leaves else Row("", None)
    weights = [p for p in subject.parameters(right.way, case) if p.requires_grad]
    with warnings.catch_warnings(), Calm(), torch.enable_grad():
        warnings.simplefilter("ignore")
        outs = [subject.theirs(right.way, case, leaves), subject.ours(right.way, case, leaves, right.reading)]
        sums = [(out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum() for out in outs]
    if not sums[0].requires_grad:
        return Row("gradient", False, "There is no gradient. Does the code use detach(), .data or no_grad?")
    wanted = [*leaves.values(), *weights]
    theirs, ours = (torch.autograd.grad(total, wanted, allow_unused=True) for total in sums)
    zero = torch.zeros((), dtype=subject.dtype)
    alike = [
        agree(
            zero.expand_as(leaf) if one is None else one,
            zero.expand_as(leaf) if other is None else other,
            10 * TOLERANCE[subject.dtype],
        )
        for one, other, leaf in zip(theirs, ours, wanted, strict=True)
    ]
    return Row("gradient", all(alike), "" if all(alike) else "Does the code use detach(), .data or no_grad?")
