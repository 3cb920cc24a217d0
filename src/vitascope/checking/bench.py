"""Run the user's code once per case and compare it with the reference within a tolerance."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitascope.checking.reference import Options, Switch
from vitascope.checking.subject import Calm, Case, Inputs, Subject, Way

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-4}  # of the largest number


@dataclass
class Finding:
    """The way, the choices and the mistakes that reproduce the user's numbers."""

    way: Way
    reading: Options
    words: tuple[str, ...]
    switches: tuple[Switch, ...] = ()

    @property
    def options(self) -> Options:
        return dict(self.reading) | {k: v for switch in self.switches for k, v in switch.options.items()}


@dataclass
class Bench:
    """The user's results, each computed once."""

    subject: Subject
    results: dict[tuple[Any, ...], Tensor | Exception] = field(default_factory=dict)
    inputs: dict[str, Inputs] = field(default_factory=dict)
    agreed: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    calm: Calm = field(default_factory=Calm)

    def given(self, case: Case) -> Inputs:
        if case.name not in self.inputs:
            self.inputs[case.name] = {k: v.to(self.subject.dtype) for k, v in self.subject.inputs(case).items()}
        return self.inputs[case.name]

    def theirs(self, way: Way, case: Case) -> Tensor | Exception:
        key = (told_by(way, case), case.name)
        if key not in self.results:
            self.results[key] = attempt(self.subject, way, case, self.given(case), self.calm)
        return self.results[key]

    def ours(self, way: Way, case: Case, options: Options) -> Tensor | Exception:
        try:
            with torch.no_grad():
                return self.subject.ours(way, case, self.given(case), options)
        except (RuntimeError, ValueError, IndexError) as error:
            return error


def told_by(way: Way, case: Case) -> tuple[tuple[str, Any], ...]:
    """What of a way matters in a case: where nothing is masked, the mask's form does not."""
    return tuple((name, value) for name, value in way.settings.items() if case.mask is not None or name != "form")


def attempt(subject: Subject, way: Way, case: Case, inputs: Inputs, calm: Calm | None) -> Tensor | Exception:
    """Run the user's code on copies of the inputs; return the result or the exception."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            copies = {name: tensor.clone() for name, tensor in inputs.items()}
            if calm is None:
                return subject.theirs(way, case, copies)
            with calm:
                return subject.theirs(way, case, copies)
    except (Exception, SystemExit) as error:
        return error if isinstance(error, Exception) else RuntimeError(f"the code exited the program: {error!r}")


def agree(theirs: Tensor | Exception, ours: Tensor | Exception, tolerance: float) -> bool:
    """Close everywhere; two failures agree too."""
    if isinstance(theirs, Exception) or isinstance(ours, Exception):
        return isinstance(theirs, Exception) and isinstance(ours, Exception)
    if theirs.shape != ours.shape:
        return False
    theirs, ours = theirs.double(), ours.double()
    size = ours.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if ours.numel() else 0.0
    return torch.allclose(theirs, ours, rtol=0.0, atol=tolerance * max(size, 1e-3), equal_nan=True)


def is_random(subject: Subject, way: Way, case: Case, calm: Calm | None = None) -> bool:
    """Other numbers for the same input, in eval mode."""
    given = {name: tensor.to(subject.dtype) for name, tensor in subject.inputs(case).items()}
    results = [attempt(subject, way, case, given, calm) for _ in range(3)]
    return not all(agree(results[0], other, 1e-9) for other in results[1:])
