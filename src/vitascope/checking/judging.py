"""Judge one part: find the mistakes that reproduce the user's results, and write the report."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor

from vitascope.checking.bench import TOLERANCE, Bench, Finding, agree, is_random, told_by
from vitascope.checking.holding import table
from vitascope.checking.mistakes import MISTAKES
from vitascope.checking.naming import source_of
from vitascope.checking.reference import IGNORED, MASK_KEYS, Switch
from vitascope.checking.result import Report, Row
from vitascope.checking.showing import example_lines, first_difference
from vitascope.checking.subject import Calm, Case, Subject, Way
from vitascope.errors import first_line

RARE = {
    "split",
    "norms_swapped",
    "mean_pool",
    "rare_bend",
}  # rare variants: tried last, and not in combination with two mistakes
PATIENCE = 30.0  # seconds for the search among pairs of mistakes


def judge(subject: Subject) -> Report:
    """Check one part and return its report."""
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
    right = Finding(way, finding.reading, finding.words) if finding else Finding(way, *subject.readings(way)[0])
    describe(report, bench, finding, right)
    if report.passed and bench.calm.fused and "attention" in subject.part:
        report.notes.append("The code calls PyTorch's fused attention. Sheet E requires you to write out the steps.")
    return report


def describe(report: Report, bench: Bench, finding: Finding | None, right: Finding) -> None:
    """Fill in the table, the assumptions and, if there are mistakes, the hints and the example."""
    subject, way = bench.subject, right.way
    report.table = table(bench, right, "dropout-in-eval" in report.mistakes)
    needed = {case.name for case in subject.cases() if not case.required}
    failing = [row.check for row in report.table if row.holds is False and row.check not in needed]
    if not report.mistakes and failing:
        report.mistakes.append("unknown")
        report.evidence.append(f"The forward pass is correct, but these checks fail: {', '.join(failing)}.")
    report.passed = not report.mistakes
    report.assumed = [*way.words, *right.words]
    report.hints = [MISTAKES[name].hint for name in report.mistakes]
    if report.passed:
        return
    if finding is not None and IGNORED in finding.switches:
        report.evidence.append("The mask has no effect on the output.")
    absent = [switch.id for switch in subject.forms(way)] if finding else []
    if absent:
        layer = absent[0].removeprefix("missing-").replace("-", " ")
        lacking = {"check": "layers", "index": None, "expected": layer, "got": "none"}
        report.table.insert(0, Row("layers", False, " ".join(MISTAKES[name].meaning for name in absent)))
        report.first_difference = lacking
    else:
        report.first_difference = first_difference(bench, right)
        report.example = example_lines(bench, right)
    first = next(case for case in subject.cases() if case.required)
    theirs, ours = bench.theirs(way, first), bench.ours(way, first, right.reading)
    if finding is None and isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        report.evidence += subject.evidence(way, theirs, ours)


def settle(subject: Subject) -> tuple[Bench, list[Way]]:
    """Return the first group of ways that runs; use float32 if float64 fails."""
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


def explain(bench: Bench, ways: list[Way], cases: list[Case]) -> Finding | None:
    """Find the smallest set of mistakes that reproduces the user's results in every case, or None."""
    end = time.monotonic() + PATIENCE
    readings = {way.words: bench.subject.readings(way) for way in ways}
    forms = {way.words: tuple(bench.subject.forms(way)) for way in ways}
    subject, tried = bench.subject, ((0, False), (0, True), (1, False), (2, False), (1, True))
    for count, rare in tried:
        choices = {w: [one for one in found if bool(RARE & one[0].keys()) == rare] for w, found in readings.items()}
        known = subject.switches(ways[0])
        for switches in _sets(_fewer(known, subject.variants) if count == 2 else known, count):
            if time.monotonic() > end:
                return None
            for way in ways:
                for reading, words in choices[way.words]:
                    finding = Finding(way, reading, words, (*forms[way.words], *switches))
                    if fits(bench, finding, cases):
                        return finding
    return None


def _fewer(switches: list[Switch], most: int | None) -> list[Switch]:
    """At most so many variants of every mistake."""
    seen: Counter[str] = Counter()
    kept = []
    for switch in switches:
        seen[switch.id] += 1
        if most is None or seen[switch.id] <= most:
            kept.append(switch)
    return kept


def _sets(switches: list[Switch], count: int) -> Iterator[tuple[Switch, ...]]:
    for chosen in combinations(switches, count):
        if count < 2 or (chosen[0].id != chosen[1].id and not chosen[0].options.keys() & chosen[1].options.keys()):
            yield chosen


def fits(bench: Bench, finding: Finding, cases: list[Case]) -> bool:
    tolerance, options, compared = TOLERANCE[bench.subject.dtype], finding.options, False
    for case in cases:
        theirs = bench.theirs(finding.way, case)
        unmasked = case.mask is None and not options.get("causal")  # without a mask, mask mistakes have no effect
        told = frozenset((k, v) for k, v in options.items() if not (unmasked and k in MASK_KEYS))
        key = (told_by(finding.way, case), case.name, told)
        if key not in bench.agreed:
            bench.agreed[key] = agree(theirs, bench.ours(finding.way, case, options), tolerance)
        if not bench.agreed[key]:
            return False
        compared = compared or isinstance(theirs, Tensor)
    return compared


def crashed(subject: Subject, bench: Bench) -> Report:
    """Report code that raised an error for every input."""
    case = next(case for case in subject.cases() if case.required)
    errors = [result for result in bench.results.values() if isinstance(result, Exception)]
    words = f"{type(errors[0]).__name__}: {first_line(errors[0], 200)}" if errors else "nothing"
    named = subject.guessed(None) or ["unknown"]
    nothing = "it returned NoneType" in words
    told = (
        "It returned None. Is a `return` statement missing?"
        if nothing
        else f"It raised an error for every input. {words}"
    )
    report = Report(subject.part, subject.name, False, named, evidence=[told])
    if re.search(r"\b(np|numpy)\.", source_of(getattr(subject, "thing", None))):
        report.evidence.append(
            "The code uses NumPy, but its inputs are PyTorch tensors. Use PyTorch functions instead."
        )
    report.verdict = "could not be checked" if named == ["unknown"] and not nothing else ""
    report.hints = [MISTAKES[name].hint for name in named if name != "unknown"] or [
        "Call the code yourself with small random tensors and print the shape after each step. If this works, "
        "the arguments were probably not recognised. In that case, use the argument names from docs/check.md."
    ]
    report.first_difference = {"check": case.name, "index": None, "expected": None, "got": None, "error": words}
    return report
