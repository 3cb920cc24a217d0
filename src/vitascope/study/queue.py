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
from vitascope.study.design import Design, format_range_value
from vitascope.study.storage import lock_storage, open_study

HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT_SECONDS = 20.0, 300.0  # seconds
SHOWN = {"judge": "--split"}  # stored name -> name in the error
MAX_DIFFERENCES = 4  # between two studies, listed in the error


@dataclass
class StudyTrial:
    """One combination and its seeds. `told`: its attributes in the storage."""

    optuna_trial: Any
    settings: dict[str, str]
    seeds: list[int]

    @property
    def attributes(self) -> dict[str, Any]:
        return dict(self.optuna_trial.user_attrs)

    def set_attribute(self, name: str, value: Any) -> None:
        self.optuna_trial.set_user_attr(name, value)


class TrialQueue:
    """The trials of one study in a storage."""

    def __init__(
        self,
        design: Design,
        storage_url: str,
        study_name: str,
        conflict_hint: str = "Choose another name: --name NAME.",
    ) -> None:
        """`remedy`: advice if the storage has another study of this name."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.design, self.optuna = design, optuna
        self.optuna_study = open_study(storage_url, study_name)
        self.lock: AbstractContextManager[Any] = lock_storage(storage_url)
        with self.lock:
            self._check_identity(conflict_hint)
            self._enqueue_missing_trials()

    def take_trial(self) -> StudyTrial | None:
        """Take the next waiting trial; None if there is none."""
        with self.lock:
            self._requeue_abandoned_trials()
            return (
                self._take_search_trial()
                if self.design.num_search_trials
                else next(self._claim_waiting_trials(lambda told: True), None)
            )

    def take_matching_trials(
        self, max_trials: int, is_match: Callable[[dict[str, str], int], bool]
    ) -> list[StudyTrial]:
        """Take more waiting trials of a grid that can be trained in one batch."""
        with self.lock:
            new = self._claim_waiting_trials(
                lambda told: "begun" not in told and is_match(told["cell"], told["seeds"][0])
            )
            return list(islice(new, max_trials))

    def _take_search_trial(self) -> StudyTrial | None:
        """The next trial of a search, chosen by the sampler."""
        while self.num_waiting:
            handle = self.optuna_study.ask()
            if handle.number in {trial.number for trial in self.trials}:
                return self._assign_to_worker(handle)
            # A duplicate, or a new trial because another worker took the last one.
            self.optuna_study.tell(handle, state=self.optuna.trial.TrialState.FAIL)
        return None

    def _claim_waiting_trials(self, is_match: Callable[[dict[str, Any]], bool]) -> Iterator[StudyTrial]:
        """Claim the waiting trials of a grid that match, one after the other."""
        running = self.optuna.trial.TrialState.RUNNING
        for waiting in self.trials:
            if waiting.state.name == "WAITING" and is_match(waiting.user_attrs):
                with suppress(self.optuna.exceptions.UpdateFinishedTrialError):
                    if self.optuna_study._storage.set_trial_state_values(waiting._trial_id, state=running):
                        yield self._assign_to_worker(self.optuna.trial.Trial(self.optuna_study, waiting._trial_id))

    def _assign_to_worker(self, optuna_trial: Any) -> StudyTrial:
        optuna_trial.set_user_attr("worker", [socket.gethostname(), os.getpid()])
        cell = (
            self._suggest_settings(optuna_trial) if self.design.num_search_trials else optuna_trial.user_attrs["cell"]
        )
        trial = StudyTrial(optuna_trial, cell, list(optuna_trial.user_attrs["seeds"]))
        trial.set_attribute("cell", trial.settings)
        return trial

    def finish_trial(self, trial: StudyTrial, accuracy: float) -> None:
        self.optuna_study.tell(trial.optuna_trial, accuracy)

    def fail_trial(self, trial: StudyTrial, reason: str) -> None:
        """Mark a trial as failed. An unreachable storage or a trial taken by another worker is ignored."""
        with suppress(Exception):
            trial.set_attribute("failed", reason)
            self.optuna_study.tell(trial.optuna_trial, state=self.optuna.trial.TrialState.FAIL)

    def find_known_results(self, settings: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Results of finished trials with the same combination, by seed; a search may repeat a combination."""
        same = [t.user_attrs for t in self.trials if t.state.name == "COMPLETE" and t.user_attrs["cell"] == settings]
        return {seed: found for told in same for seed, found in told["results"].items()}

    def prune_trial(self, trial: StudyTrial) -> None:
        self.optuna_study.tell(trial.optuna_trial, state=self.optuna.trial.TrialState.PRUNED)

    def requeue_trial(self, trial: StudyTrial) -> None:
        """Put a trial that the user interrupted back into the queue, with its unfinished run."""
        with self.lock:
            self._enqueue_again(trial.optuna_trial.number, trial.attributes, trial.optuna_trial.params)
            self.optuna_study.tell(trial.optuna_trial, state=self.optuna.trial.TrialState.FAIL)

    @property
    def trials(self) -> list[Any]:
        """Each trial of the design once, without replaced trials and without duplicates."""
        known = [trial for trial in self.optuna_study.get_trials(deepcopy=False) if "seeds" in trial.user_attrs]
        replaced = {trial.user_attrs.get("again") for trial in known}
        known = [trial for trial in known if trial.number not in replaced and not _is_lost(trial)]
        if self.design.num_search_trials:
            return known[: self.design.num_search_trials]
        first: dict[Any, Any] = {}
        wanted = {_make_trial_key(cell, [seed]) for cell in self.design.combinations for seed in self.design.seeds}
        for trial in known:
            if _make_trial_key(trial.user_attrs["cell"], trial.user_attrs["seeds"]) not in wanted:
                continue  # from a larger version of the study
            first.setdefault(_make_trial_key(trial.user_attrs["cell"], trial.user_attrs["seeds"]), trial)
        return list(first.values())

    @property
    def num_waiting(self) -> int:
        return sum(trial.state.name == "WAITING" for trial in self.trials)

    def count_other_workers(self) -> int:
        """Number of other processes on this machine that run trials of this study."""
        running = [trial.user_attrs.get("worker", ("", 0)) for trial in self.trials if trial.state.name == "RUNNING"]
        return len({process for host, process in running if host == socket.gethostname()} - {os.getpid()})

    @contextmanager
    def heartbeat(self, trial: StudyTrial) -> Iterator[None]:
        """Send a heartbeat for the trial to the storage while the context is open."""
        done = threading.Event()

        def say() -> None:
            while not done.wait(HEARTBEAT_SECONDS):
                with suppress(Exception):  # the storage may be unreachable for a moment
                    trial.set_attribute("alive", time.time())

        trial.set_attribute("alive", time.time())
        thread = threading.Thread(target=say, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def requeue_failed_trials(self) -> int:
        """Put failed trials back into the queue and return their number."""
        with self.lock:
            failed = [trial for trial in self.trials if trial.state.name == "FAIL"]
            for trial in failed:
                self._enqueue_again(trial.number, trial.user_attrs, trial.params)
        return len(failed)

    def _check_identity(self, conflict_hint: str) -> None:
        told = self.optuna_study.user_attrs
        if "identity" not in told:
            self.optuna_study.set_user_attr("described", self.design.identity_fields)
            self.optuna_study.set_user_attr("identity", self.design.identity_hash)
        elif told["identity"] != self.design.identity_hash:
            differ = _format_differences(told.get("described", {}), self.design.identity_fields)
            raise UserError(
                f"A study named {self.optuna_study.study_name} exists with other settings{differ}. {conflict_hint}"
            )

    def _enqueue_missing_trials(self) -> None:
        """Add the missing trials to the storage."""
        for attributes in self._list_missing_trials():
            self.optuna_study.enqueue_trial({}, user_attrs=attributes)

    def _list_missing_trials(self) -> list[dict[str, Any]]:
        if self.design.num_search_trials:
            seeds = list(self.design.seeds)
            return [{"seeds": seeds} for _ in range(self.design.num_search_trials - len(self.trials))]
        known = {_make_trial_key(trial.user_attrs["cell"], trial.user_attrs["seeds"]) for trial in self.trials}
        wanted = [{"cell": cell, "seeds": [seed]} for seed in self.design.seeds for cell in self.design.combinations]
        return [trial for trial in wanted if _make_trial_key(**trial) not in known]

    def _suggest_settings(self, optuna_trial: Any) -> dict[str, str]:
        """The settings that the sampler suggests."""
        cell = {
            key: str(optuna_trial.suggest_categorical(key, values))
            for key, values in self.design.values_by_setting.items()
        }
        for key, found in self.design.ranges_by_setting.items():
            if found.whole:
                value = optuna_trial.suggest_int(key, int(found.low), int(found.high), log=found.is_log_scale)
            else:
                value = optuna_trial.suggest_float(key, found.low, found.high, log=found.is_log_scale)
            cell[key] = format_range_value(found, value)
        return cell

    def _requeue_abandoned_trials(self) -> None:
        for trial in self.trials:
            if trial.state.name != "RUNNING" or not _is_abandoned(trial.user_attrs, trial.datetime_start):
                continue
            with suppress(self.optuna.exceptions.UpdateFinishedTrialError):  # another worker was faster
                self.optuna_study._storage.set_trial_state_values(
                    trial._trial_id, state=self.optuna.trial.TrialState.FAIL
                )
                self._enqueue_again(trial.number, trial.user_attrs, trial.params)

    def _enqueue_again(self, trial_number: int, attributes: dict[str, Any], suggested_params: dict[str, Any]) -> None:
        """Add the same trial once more."""
        kept = {name: value for name, value in attributes.items() if name not in ("worker", "alive", "failed", "again")}
        self.optuna_study.enqueue_trial(suggested_params, user_attrs=kept | {"again": trial_number})


def _make_trial_key(cell: dict[str, str], seeds: list[int]) -> tuple[Any, ...]:
    return (*sorted(cell.items()), *seeds)


def _format_differences(stored_fields: dict[str, str], new_fields: dict[str, str]) -> str:
    """The differing settings as text; empty if the storage has no description."""
    both = stored_fields.get("varied", "") + ", " + new_fields["varied"]
    names = (
        [name for name in sorted(stored_fields | new_fields) if stored_fields.get(name) != new_fields.get(name)]
        if stored_fields
        else []
    )
    names = [name for name in names if name not in both.split(", ") or (name in stored_fields and name in new_fields)]
    said = [
        f"{SHOWN.get(name, name)} was {stored_fields.get(name, 'not set')}, now {new_fields.get(name, 'not set')}"
        for name in names
    ]
    more = f"; and {len(said) - MAX_DIFFERENCES} more" if len(said) > MAX_DIFFERENCES else ""
    return ": " + "; ".join(said[:MAX_DIFFERENCES]) + more if said else ""


def _is_lost(optuna_trial: Any) -> bool:
    """Whether a worker closed the trial to put it back but died before doing so."""
    return optuna_trial.state.name == "FAIL" and "failed" not in optuna_trial.user_attrs


def _is_abandoned(attributes: dict[str, Any], start_time: datetime | None) -> bool:
    """Whether the worker's heartbeat has expired or, on this machine, its process no longer exists."""
    host, process = attributes.get("worker", (None, None))
    if host == socket.gethostname() and process is not None and not _is_process_alive(int(process)):
        return True
    last = attributes.get("alive") or (start_time.timestamp() if start_time else 0.0)
    return time.time() - last > HEARTBEAT_TIMEOUT_SECONDS


def _is_process_alive(process_id: int) -> bool:
    if os.name == "nt":  # signal 0 would interrupt the process, so only the heartbeat counts
        return True
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
