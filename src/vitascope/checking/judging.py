"""A subject -> a report: is it right, and if not, which mistakes give exactly the reader's numbers."""

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from vitascope.checking.mistakes import MISTAKES
from vitascope.checking.reference import MASK_KEYS, Options, Switch
from vitascope.checking.result import Report, Row
from vitascope.checking.showing import example_lines, first_difference
from vitascope.checking.subject import Calm, Case, Inputs, Subject, Way
from vitascope.errors import first_line

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-4}  # of the largest number
RARE = {"split", "norms_swapped", "mean_pool", "rare_bend"}  # rare choices, tried last and not with two mistakes
PATIENCE = 10.0  # seconds for the search among pairs of mistakes


@dataclass
class Finding:
    """The way, the choices and the mistakes that reproduce the reader's numbers."""

    way: Way
    reading: Options
    words: tuple[str, ...]
    switches: tuple[Switch, ...] = ()

    @property
    def options(self) -> Options:
        return dict(self.reading) | {k: v for switch in self.switches for k, v in switch.options.items()}


@dataclass
class Bench:
    """The reader's results, each computed once."""

    subject: Subject
    results: dict[tuple[int, str], Tensor | Exception] = field(default_factory=dict)
    inputs: dict[str, Inputs] = field(default_factory=dict)
    agreed: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    calm: Calm = field(default_factory=Calm)

    def given(self, case: Case) -> Inputs:
        if case.name not in self.inputs:
            self.inputs[case.name] = {k: v.to(self.subject.dtype) for k, v in self.subject.inputs(case).items()}
        return self.inputs[case.name]

    def theirs(self, way: Way, case: Case) -> Tensor | Exception:
        key = (id(way), case.name)
        if key not in self.results:
            self.results[key] = attempt(self.subject, way, case, self.given(case), self.calm)
        return self.results[key]

    def ours(self, way: Way, case: Case, options: Options) -> Tensor | Exception:
        try:
            with torch.no_grad():
                return self.subject.ours(way, case, self.given(case), options)
        except (RuntimeError, ValueError, IndexError) as error:
            return error


def attempt(subject: Subject, way: Way, case: Case, inputs: Inputs, calm: Calm | None) -> Tensor | Exception:
    """The reader's code may raise anything, print anything and change what it was given."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            copies = {name: tensor.clone() for name, tensor in inputs.items()}
            if calm is None:
                return subject.theirs(way, case, copies)
            with calm:
                return subject.theirs(way, case, copies)
    except (Exception, SystemExit) as error:
        return error if isinstance(error, Exception) else RuntimeError(f"it left the program: {error!r}")


def agree(theirs: Tensor | Exception, ours: Tensor | Exception, tolerance: float) -> bool:
    """Close everywhere; two failures agree too."""
    if isinstance(theirs, Exception) or isinstance(ours, Exception):
        return isinstance(theirs, Exception) and isinstance(ours, Exception)
    if theirs.shape != ours.shape:
        return False
    theirs, ours = theirs.double(), ours.double()
    size = ours.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if ours.numel() else 0.0
    return torch.allclose(theirs, ours, rtol=0.0, atol=tolerance * max(size, 1e-3), equal_nan=True)


def judge(subject: Subject) -> Report:
    """The whole examination of one part."""
    bench, ways = settle(subject)
    if not ways:
        return crashed(subject, bench)
    cases = [case for case in subject.cases() if case.required]
    random = is_random(subject, ways[0], cases[0])
    finding = explain(bench, ways, cases)
    report = Report(subject.part, subject.name, passed=False)
    if random:
        report.mistakes.append("dropout-in-eval")
    if finding is None and not (random and is_random(subject, ways[0], cases[0], Calm())):
        report.mistakes += subject.guessed(ways[0]) or ["unknown"]
    if finding is not None:
        report.mistakes += [switch.id for switch in finding.switches if switch.id not in report.mistakes]
    way = finding.way if finding else ways[0]
    right = Finding(way, finding.reading, ()) if finding else Finding(way, *subject.readings(way)[0])
    describe(report, bench, finding, right)
    if report.passed and bench.calm.fused and "attention" in subject.part:
        report.notes.append("It calls PyTorch's fused attention; sheet E wants the steps written out.")
    return report


def describe(report: Report, bench: Bench, finding: Finding | None, right: Finding) -> None:
    """Fill in the table, the assumptions and, where something is wrong, the help."""
    subject, way = bench.subject, right.way
    report.table = table(bench, right, "dropout-in-eval" in report.mistakes)
    needed = {case.name for case in subject.cases() if not case.required}
    failing = [row.check for row in report.table if row.holds is False and row.check not in needed]
    if not report.mistakes and failing:
        report.mistakes.append("unknown")
        report.evidence.append(f"The forward numbers are right, but not: {', '.join(failing)}.")
    report.passed = not report.mistakes
    report.assumed = [*way.words, *(finding.words if finding else ())]
    report.hints = [MISTAKES[name].hint for name in report.mistakes]
    if report.passed:
        return
    absent = [switch.id for switch in subject.forms(way)] if finding else []
    if absent:
        lacking = {"check": "its layers", "index": None, "expected": "one more", "got": absent[0].replace("-", " ")}
        report.table.insert(0, Row("its layers", False, ", ".join(MISTAKES[name].meaning for name in absent)))
        report.first_difference = lacking
    else:
        report.first_difference = first_difference(bench, right)
        report.example = example_lines(bench, right)
    first = next(case for case in subject.cases() if case.required)
    theirs, ours = bench.theirs(way, first), bench.ours(way, first, right.reading)
    if finding is None and isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        report.evidence += subject.evidence(way, theirs, ours)


def settle(subject: Subject) -> tuple[Bench, list[Way]]:
    """The first group of ways that runs; float32 where the reader's code knows nothing else."""
    bench, later = Bench(subject), None
    for dtype in (torch.float64, torch.float32):
        subject.dtype, bench = dtype, Bench(subject)
        cases = [case for case in subject.cases() if case.required]
        for group in subject.groups():
            running = [way for way in group if any(isinstance(bench.theirs(way, case), Tensor) for case in cases)]
            shaped = [way for way in running if _has_shape(bench, way, cases)]
            if shaped:
                return bench, shaped + [way for way in running if way not in shaped]
            later = later or ((bench, running) if running else None)
        if later:
            return later
    return bench, []


def _has_shape(bench: Bench, way: Way, cases: list[Case]) -> bool:
    for case in cases:
        theirs, ours = bench.theirs(way, case), bench.ours(way, case, bench.subject.readings(way)[0][0])
        if isinstance(theirs, Tensor):
            return isinstance(ours, Tensor) and theirs.shape == ours.shape
    return False


def is_random(subject: Subject, way: Way, case: Case, calm: Calm | None = None) -> bool:
    """Other numbers for the same input, in eval mode."""
    given = {name: tensor.to(subject.dtype) for name, tensor in subject.inputs(case).items()}
    results = [attempt(subject, way, case, given, calm) for _ in range(3)]
    return not all(agree(results[0], other, 1e-9) for other in results[1:])


def explain(bench: Bench, ways: list[Way], cases: list[Case]) -> Finding | None:
    """The fewest mistakes that give the reader's numbers in every case; None where none do."""
    end = time.monotonic() + PATIENCE
    readings = {way.words: bench.subject.readings(way) for way in ways}
    for count, rare in ((0, False), (0, True), (1, False), (2, False), (1, True)):
        for way in ways:
            forms = tuple(bench.subject.forms(way))
            choices = [one for one in readings[way.words] if bool(RARE & one[0].keys()) == rare]
            for switches in _sets(bench.subject.switches(way), count):
                if time.monotonic() > end:
                    return None
                for reading, words in choices:
                    finding = Finding(way, reading, words, (*forms, *switches))
                    if fits(bench, finding, cases):
                        return finding
    return None


def _sets(switches: list[Switch], count: int) -> Iterator[tuple[Switch, ...]]:
    for chosen in combinations(switches, count):
        if count < 2 or (chosen[0].id != chosen[1].id and not chosen[0].options.keys() & chosen[1].options.keys()):
            yield chosen


def fits(bench: Bench, finding: Finding, cases: list[Case]) -> bool:
    tolerance, options, compared = TOLERANCE[bench.subject.dtype], finding.options, False
    for case in cases:
        theirs = bench.theirs(finding.way, case)
        unmasked = case.mask is None and not options.get("causal")  # there, mistakes of masks change nothing
        told = frozenset((k, v) for k, v in options.items() if not (unmasked and k in MASK_KEYS))
        key = (id(finding.way), case.name, told)
        if key not in bench.agreed:
            bench.agreed[key] = agree(theirs, bench.ours(finding.way, case, options), tolerance)
        if not bench.agreed[key]:
            return False
        compared = compared or isinstance(theirs, Tensor)
    return compared


def table(bench: Bench, right: Finding, random: bool) -> list[Row]:
    """What holds: every case, the other dtype, the gradient, both modes."""
    subject, way = bench.subject, right.way
    rows = []
    for case in subject.cases():
        theirs = bench.theirs(way, case)
        holds = isinstance(theirs, Tensor) and agree(
            theirs, bench.ours(way, case, right.reading), TOLERANCE[subject.dtype]
        )
        note = "" if isinstance(theirs, Tensor) else f"raises {type(theirs).__name__}: {first_line(theirs, 70)}"
        rows.append(Row(case.name, holds, note if case.required or holds else f"{note} (not needed)".strip()))
    rows.append(Row(f"{str(subject.dtype).removeprefix('torch.')}, against {subject.native()}", rows[0].holds))
    if subject.dtype == torch.float64:
        rows.append(_other_dtype(subject, right))
    rows.append(_gradient(subject, right, rows[0].holds is True))
    rows.append(Row("eval mode: the same numbers each time", not random))
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
        bench = Bench(subject)
        theirs = bench.theirs(right.way, case)
        if is_random(subject, right.way, case, Calm()) or not forward:
            return Row("train mode", None, "random by itself: not compared" if forward else "")
        ours = bench.ours(right.way, case, right.reading)
        return Row("train mode, dropout aside", agree(theirs, ours, TOLERANCE[subject.dtype]))
    finally:
        subject.training = False


def _gradient(subject: Subject, right: Finding, forward: bool) -> Row:
    """Of a random sum of the outputs, to the inputs and the reader's weights."""
    case = next(case for case in subject.cases() if case.required)
    leaves = {name: tensor.to(subject.dtype).requires_grad_() for name, tensor in subject.inputs(case).items()}
    leaves = {name: tensor for name, tensor in leaves.items() if tensor.is_floating_point()}
    if not forward or not leaves:
        return Row("gradient", None) if leaves else Row("", None)
    weights = [p for p in subject.parameters(right.way, case) if p.requires_grad]
    sums = []
    for run in (subject.theirs, lambda *given: subject.ours(*given, right.reading)):
        with warnings.catch_warnings(), Calm(), torch.enable_grad():
            warnings.simplefilter("ignore")
            out = run(right.way, case, leaves)
            sums.append((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum())
    if not sums[0].requires_grad:
        return Row("gradient", False, "no gradient flows: is there a detach(), .data or no_grad?")
    wanted = [*leaves.values(), *weights]
    pairs = zip(*(torch.autograd.grad(total, wanted, allow_unused=True) for total in sums), strict=True)
    zero = torch.zeros((), dtype=subject.dtype)
    alike = [
        agree(*(zero.expand_as(leaf) if part is None else part for part in pair), 10 * TOLERANCE[subject.dtype])
        for pair, leaf in zip(pairs, wanted, strict=True)
    ]
    return Row("gradient", all(alike), "" if all(alike) else "is there a detach(), .data or no_grad?")


def crashed(subject: Subject, bench: Bench) -> Report:
    """It raised for every input."""
    case = next(case for case in subject.cases() if case.required)
    errors = [result for result in bench.results.values() if isinstance(result, Exception)]
    words = f"{type(errors[0]).__name__}: {first_line(errors[0], 200)}" if errors else "nothing"
    named = subject.guessed(None) or ["unknown"]
    report = Report(subject.part, subject.name, False, named, evidence=[f"It raised, for every input: {words}"])
    report.hints = [MISTAKES[name].hint for name in named if name != "unknown"] or [
        "Call it yourself with small random tensors, and print the shapes step by step."
    ]
    report.first_difference = {"check": case.name, "index": None, "expected": None, "got": None, "error": words}
    return report
