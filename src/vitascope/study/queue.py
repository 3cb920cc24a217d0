"""The queue of a study's trials in an Optuna storage, shared by workers on one or several machines.

All trials are in the storage from the start, and each is given to one worker. A database server guarantees this by
itself; for an SQLite file, workers use a lock. If a worker dies, its trial stays marked as running. Other workers put
it back, with its unfinished run, when its heartbeat has expired or its process no longer exists.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from vitascope.errors import UserError
from vitascope.study.design import Design, spelt
from vitascope.study.storage import one_after_the_other, open_study

ALIVE_EVERY, DEAD_AFTER = 20.0, 300.0  # seconds
SHOWN = {"judge": "--split"}  # stored name -> name in the error
MOST_DIFFERENCES = 4  # between two studies, listed in the error


@dataclass
class Trial:
    """One combination and its seeds. `told`: its attributes in the storage."""

    handle: Any
    cell: dict[str, str]
    seeds: list[int]

    @property
    def told(self) -> dict[str, Any]:
        return dict(self.handle.user_attrs)

    def note(self, name: str, value: Any) -> None:
        self.handle.set_user_attr(name, value)


class Queue:
    """The trials of one study in a storage."""

    def __init__(self, design: Design, url: str, name: str, remedy: str = "Choose another name: --name NAME.") -> None:
        """`remedy`: advice if the storage has another study of this name."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.design, self.optuna = design, optuna
        self.study = open_study(url, name)
        self.turn: AbstractContextManager[Any] = one_after_the_other(url)
        with self.turn:
            self._belongs(remedy)
            self._fill()

    def take(self) -> Trial | None:
        """Take the next waiting trial; None if there is none."""
        with self.turn:
            self._put_back_abandoned()
            return self._asked() if self.design.search else next(self._claimed(lambda told: True), None)

    def take_more(self, most: int, alike: Callable[[dict[str, str], int], bool]) -> list[Trial]:
        """Take more waiting trials of a grid that can be trained in one batch."""
        with self.turn:
            new = self._claimed(lambda told: "begun" not in told and alike(told["cell"], told["seeds"][0]))
            return list(islice(new, most))

    def _asked(self) -> Trial | None:
        """The next trial of a search, chosen by the sampler."""
        while self.waiting:
            handle = self.study.ask()
            if handle.number in {trial.number for trial in self.trials}:
                return self._taken(handle)
            # A duplicate, or a new trial because another worker took the last one.
            self.study.tell(handle, state=self.optuna.trial.TrialState.FAIL)
        return None

    def _claimed(self, wanted: Callable[[dict[str, Any]], bool]) -> Iterator[Trial]:
        """Claim the waiting trials of a grid that match, one after the other."""
        running = self.optuna.trial.TrialState.RUNNING
        for waiting in self.trials:
            if waiting.state.name == "WAITING" and wanted(waiting.user_attrs):
                with suppress(self.optuna.exceptions.UpdateFinishedTrialError):
                    if self.study._storage.set_trial_state_values(waiting._trial_id, state=running):
                        yield self._taken(self.optuna.trial.Trial(self.study, waiting._trial_id))

    def _taken(self, handle: Any) -> Trial:
        handle.set_user_attr("worker", [socket.gethostname(), os.getpid()])
        cell = self._chosen(handle) if self.design.search else handle.user_attrs["cell"]
        trial = Trial(handle, cell, list(handle.user_attrs["seeds"]))
        trial.note("cell", trial.cell)
        return trial

    def finish(self, trial: Trial, value: float) -> None:
        self.study.tell(trial.handle, value)

    def give_up(self, trial: Trial, why: str) -> None:
        """Mark a trial as failed. An unreachable storage or a trial taken by another worker is ignored."""
        with suppress(Exception):
            trial.note("failed", why)
            self.study.tell(trial.handle, state=self.optuna.trial.TrialState.FAIL)

    def known(self, cell: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Results of finished trials with the same combination, by seed; a search may repeat a combination."""
        same = [t.user_attrs for t in self.trials if t.state.name == "COMPLETE" and t.user_attrs["cell"] == cell]
        return {seed: found for told in same for seed, found in told["results"].items()}

    def prune(self, trial: Trial) -> None:
        self.study.tell(trial.handle, state=self.optuna.trial.TrialState.PRUNED)

    def back(self, trial: Trial) -> None:
        """Put a trial that the user interrupted back into the queue, with its unfinished run."""
        with self.turn:
            self._enqueue(trial.handle.number, trial.told, trial.handle.params)
            self.study.tell(trial.handle, state=self.optuna.trial.TrialState.FAIL)

    @property
    def trials(self) -> list[Any]:
        """Each trial of the design once, without replaced trials and without duplicates."""
        known = [trial for trial in self.study.get_trials(deepcopy=False) if "seeds" in trial.user_attrs]
        replaced = {trial.user_attrs.get("again") for trial in known}
        known = [trial for trial in known if trial.number not in replaced and not _lost(trial)]
        if self.design.search:
            return known[: self.design.search]
        first: dict[Any, Any] = {}
        wanted = {_key(cell, [seed]) for cell in self.design.cells for seed in self.design.seeds}
        for trial in known:
            if _key(trial.user_attrs["cell"], trial.user_attrs["seeds"]) not in wanted:
                continue  # from a larger version of the study
            first.setdefault(_key(trial.user_attrs["cell"], trial.user_attrs["seeds"]), trial)
        return list(first.values())

    @property
    def waiting(self) -> int:
        return sum(trial.state.name == "WAITING" for trial in self.trials)

    def beside(self) -> int:
        """Number of other processes on this machine that run trials of this study."""
        running = [trial.user_attrs.get("worker", ("", 0)) for trial in self.trials if trial.state.name == "RUNNING"]
        return len({process for host, process in running if host == socket.gethostname()} - {os.getpid()})

    @contextmanager
    def at_it(self, trial: Trial) -> Iterator[None]:
        """Send a heartbeat for the trial to the storage while the context is open."""
        done = threading.Event()

        def say() -> None:
            while not done.wait(ALIVE_EVERY):
                with suppress(Exception):  # the storage may be unreachable for a moment
                    trial.note("alive", time.time())

        trial.note("alive", time.time())
        thread = threading.Thread(target=say, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def retry_failed(self) -> int:
        """Put failed trials back into the queue and return their number."""
        with self.turn:
            failed = [trial for trial in self.trials if trial.state.name == "FAIL"]
            for trial in failed:
                self._enqueue(trial.number, trial.user_attrs, trial.params)
        return len(failed)

    def _belongs(self, remedy: str) -> None:
        told = self.study.user_attrs
        if "identity" not in told:
            self.study.set_user_attr("described", self.design.described)
            self.study.set_user_attr("identity", self.design.identity)
        elif told["identity"] != self.design.identity:
            differ = _differences(told.get("described", {}), self.design.described)
            raise UserError(f"A study named {self.study.study_name} exists with other settings{differ}. {remedy}")

    def _fill(self) -> None:
        """Add the missing trials to the storage."""
        for attributes in self._missing():
            self.study.enqueue_trial({}, user_attrs=attributes)

    def _missing(self) -> list[dict[str, Any]]:
        if self.design.search:
            seeds = list(self.design.seeds)
            return [{"seeds": seeds} for _ in range(self.design.search - len(self.trials))]
        known = {_key(trial.user_attrs["cell"], trial.user_attrs["seeds"]) for trial in self.trials}
        wanted = [{"cell": cell, "seeds": [seed]} for seed in self.design.seeds for cell in self.design.cells]
        return [trial for trial in wanted if _key(**trial) not in known]

    def _chosen(self, handle: Any) -> dict[str, str]:
        """The settings that the sampler suggests."""
        cell = {key: str(handle.suggest_categorical(key, values)) for key, values in self.design.axes.items()}
        for key, found in self.design.ranges.items():
            if found.whole:
                value = handle.suggest_int(key, int(found.low), int(found.high), log=found.log)
            else:
                value = handle.suggest_float(key, found.low, found.high, log=found.log)
            cell[key] = spelt(found, value)
        return cell

    def _put_back_abandoned(self) -> None:
        for trial in self.trials:
            if trial.state.name != "RUNNING" or not _abandoned(trial.user_attrs, trial.datetime_start):
                continue
            with suppress(self.optuna.exceptions.UpdateFinishedTrialError):  # another worker was faster
                self.study._storage.set_trial_state_values(trial._trial_id, state=self.optuna.trial.TrialState.FAIL)
                self._enqueue(trial.number, trial.user_attrs, trial.params)

    def _enqueue(self, number: int, told: dict[str, Any], chosen: dict[str, Any]) -> None:
        """Add the same trial once more."""
        kept = {name: value for name, value in told.items() if name not in ("worker", "alive", "failed", "again")}
        self.study.enqueue_trial(chosen, user_attrs=kept | {"again": number})


def _key(cell: dict[str, str], seeds: list[int]) -> tuple[Any, ...]:
    return (*sorted(cell.items()), *seeds)


def _differences(there: dict[str, str], here: dict[str, str]) -> str:
    """The differing settings as text; empty if the storage has no description."""
    both = there.get("varied", "") + ", " + here["varied"]
    names = [name for name in sorted(there | here) if there.get(name) != here.get(name)] if there else []
    names = [name for name in names if name not in both.split(", ") or (name in there and name in here)]
    said = [
        f"{SHOWN.get(name, name)} was {there.get(name, 'not set')}, now {here.get(name, 'not set')}" for name in names
    ]
    more = f"; and {len(said) - MOST_DIFFERENCES} more" if len(said) > MOST_DIFFERENCES else ""
    return ": " + "; ".join(said[:MOST_DIFFERENCES]) + more if said else ""


def _lost(trial: Any) -> bool:
    """Whether a worker closed the trial to put it back but died before doing so."""
    return trial.state.name == "FAIL" and "failed" not in trial.user_attrs


def _abandoned(told: dict[str, Any], began: datetime | None) -> bool:
    """Whether the worker's heartbeat has expired or, on this machine, its process no longer exists."""
    host, process = told.get("worker", (None, None))
    if host == socket.gethostname() and process is not None and not _is_there(int(process)):
        return True
    last = told.get("alive") or (began.timestamp() if began else 0.0)
    return time.time() - last > DEAD_AFTER


def _is_there(process: int) -> bool:
    if os.name == "nt":  # signal 0 would interrupt the process, so only the heartbeat counts
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
