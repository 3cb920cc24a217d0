"""Types of the data that a study stores: the result of a run and the attributes of an Optuna trial."""

from typing import NotRequired, TypedDict

Settings = dict[str, str]  # one combination: setting -> value as typed
Curves = dict[str, list[float]]  # train_loss, val_accuracy, seconds, … -> one value per epoch


class RunResult(TypedDict):
    """The result of one run."""

    run: str  # path below the study's runs; empty for a reused run
    accuracy: float
    seconds: float  # without set-up
    together: int  # number of runs trained in one batch
    machine: str
    compiled: bool
    parameters: int
    flops: float
    images_seen: int
    curves: Curves
    beside: NotRequired[int]  # other workers on the same machine


class TrialAttributes(TypedDict):
    """The user attributes of a trial in the storage. A waiting trial of a search has no settings yet."""

    cell: Settings
    seeds: list[int]
    results: dict[str, RunResult]  # by seed; of a finished trial
    worker: NotRequired[tuple[str, int]]  # host and process id
    alive: NotRequired[float]  # time of the last heartbeat
    begun: NotRequired[tuple[int, str]]  # seed and folder of an unfinished run
    failed: NotRequired[str]  # reason
    again: NotRequired[int]  # number of the trial that this one replaces
