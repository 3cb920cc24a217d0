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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from vitascope.errors import UserError
from vitascope.study.design import Design, format_identity_differences
from vitascope.study.storage import RunResult, Settings, TrialAttributes, make_lock_if_sqlite, open_or_create_study

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT_SECONDS = 20.0, 300.0
TrialKey = tuple[tuple[str, str] | int, ...]  # settings and seeds, comparable


@dataclass
class StudyTrial:
    """One combination and its seeds, taken by this worker."""

    optuna_trial: "Trial"
    settings: Settings
    seeds: list[int]

    @property
    def attributes(self) -> TrialAttributes:
        """The attributes in the storage."""
        return cast(TrialAttributes, dict(self.optuna_trial.user_attrs))

    def set_attribute(self, name: str, value: object) -> None:
        """Write an attribute (a key of `TrialAttributes`) to the storage."""
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
        """Open the study and add its missing trials. `conflict_hint` ends the error if the storage has another study of
        this name."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.design, self.optuna = design, optuna
        self.optuna_study = open_or_create_study(storage_url, study_name)
        self.lock: AbstractContextManager[object] = make_lock_if_sqlite(storage_url)
        with self.lock:
            self._store_or_check_identity(conflict_hint)
            self._enqueue_missing_trials()

    def take_next_trial(self) -> StudyTrial | None:
        """Take the next waiting trial; None if there is none."""
        with self.lock:
            self._requeue_abandoned_trials()
            return (
                self._take_search_trial()
                if self.design.num_search_trials
                else next(self._claim_waiting_trials(lambda attributes: True), None)
            )

    def take_matching_unstarted_trials(
        self, max_trials: int, is_match: Callable[[Settings, int], bool]
    ) -> list[StudyTrial]:
        """Take waiting trials of a grid, without unfinished runs, for which `is_match(settings, seed)` is true."""
        with self.lock:
            claimed = self._claim_waiting_trials(
                lambda attributes: "begun" not in attributes and is_match(attributes["cell"], attributes["seeds"][0])
            )
            return list(islice(claimed, max_trials))

    def _take_search_trial(self) -> StudyTrial | None:
        """Take the next trial of a search, chosen by the sampler."""
        while self.num_waiting:
            optuna_trial = self.optuna_study.ask()
            if optuna_trial.number in {trial.number for trial in self.trials}:
                return self._claim_and_make_study_trial(optuna_trial)
            # A duplicate, or a new trial because another worker took the last one.
            self.optuna_study.tell(optuna_trial, state=self.optuna.trial.TrialState.FAIL)
        return None

    def _claim_waiting_trials(self, is_match: Callable[[TrialAttributes], bool]) -> Iterator[StudyTrial]:
        """Claim the waiting trials of a grid that match, one after the other."""
        running = self.optuna.trial.TrialState.RUNNING
        for waiting in self.trials:
            if waiting.state.name == "WAITING" and is_match(_get_trial_attributes(waiting)):
                with suppress(self.optuna.exceptions.UpdateFinishedTrialError):
                    if self.optuna_study._storage.set_trial_state_values(waiting._trial_id, state=running):
                        yield self._claim_and_make_study_trial(
                            self.optuna.trial.Trial(self.optuna_study, waiting._trial_id)
                        )

    def _claim_and_make_study_trial(self, optuna_trial: "Trial") -> StudyTrial:
        """Store this process as the worker of the trial."""
        optuna_trial.set_user_attr("worker", [socket.gethostname(), os.getpid()])
        is_search = bool(self.design.num_search_trials)
        settings = self._suggest_settings(optuna_trial) if is_search else optuna_trial.user_attrs["cell"]
        trial = StudyTrial(optuna_trial, settings, list(optuna_trial.user_attrs["seeds"]))
        trial.set_attribute("cell", trial.settings)
        return trial

    def mark_trial_finished(self, trial: StudyTrial, accuracy: float) -> None:
        self.optuna_study.tell(trial.optuna_trial, accuracy)

    def mark_trial_failed_if_possible(self, trial: StudyTrial, reason: str) -> None:
        """Mark a trial as failed. An unreachable storage or a trial taken by another worker is ignored."""
        with suppress(Exception):
            trial.set_attribute("failed", reason)
            self.optuna_study.tell(trial.optuna_trial, state=self.optuna.trial.TrialState.FAIL)

    def find_finished_results_by_seed(self, settings: Settings) -> dict[str, RunResult]:
        """Return the results of finished trials with the same combination, by seed. A search may repeat one."""
        finished = [_get_trial_attributes(trial) for trial in self.trials if trial.state.name == "COMPLETE"]
        same = [attributes for attributes in finished if attributes["cell"] == settings]
        return {seed: result for attributes in same for seed, result in attributes["results"].items()}

    def mark_trial_pruned(self, trial: StudyTrial) -> None:
        self.optuna_study.tell(trial.optuna_trial, state=self.optuna.trial.TrialState.PRUNED)

    def requeue_unfinished_trial(self, trial: StudyTrial) -> None:
        """Put a trial that the user interrupted back into the queue, with its unfinished run."""
        with self.lock:
            self._enqueue_copy_of_trial(trial.optuna_trial.number, trial.attributes, trial.optuna_trial.params)
            self.optuna_study.tell(trial.optuna_trial, state=self.optuna.trial.TrialState.FAIL)

    @property
    def trials(self) -> "list[FrozenTrial]":
        """Each trial of the design once, without replaced trials and without duplicates."""
        stored = [trial for trial in self.optuna_study.get_trials(deepcopy=False) if "seeds" in trial.user_attrs]
        replaced = {trial.user_attrs.get("again") for trial in stored}
        stored = [trial for trial in stored if trial.number not in replaced and not _is_closed_but_not_requeued(trial)]
        if self.design.num_search_trials:
            return stored[: self.design.num_search_trials]
        first_by_key: dict[TrialKey, FrozenTrial] = {}
        design_keys = {_make_trial_key(cell, [seed]) for cell in self.design.combinations for seed in self.design.seeds}
        for trial in stored:
            key = _make_trial_key(trial.user_attrs["cell"], trial.user_attrs["seeds"])
            if key in design_keys:  # else from a larger version of the study
                first_by_key.setdefault(key, trial)
        return list(first_by_key.values())

    @property
    def num_waiting(self) -> int:
        return sum(trial.state.name == "WAITING" for trial in self.trials)

    def count_other_workers_on_this_machine(self) -> int:
        """Return the number of other processes on this machine that run trials of this study."""
        workers = [trial.user_attrs.get("worker", ("", 0)) for trial in self.trials if trial.state.name == "RUNNING"]
        return len({process for host, process in workers if host == socket.gethostname()} - {os.getpid()})

    @contextmanager
    def send_heartbeats_while_open(self, trial: StudyTrial) -> Iterator[None]:
        """Send a heartbeat for the trial to the storage while the context is open."""
        done = threading.Event()

        def send_heartbeats() -> None:
            while not done.wait(HEARTBEAT_SECONDS):
                with suppress(Exception):  # the storage may be unreachable for a moment
                    trial.set_attribute("alive", time.time())

        trial.set_attribute("alive", time.time())
        thread = threading.Thread(target=send_heartbeats, daemon=True)
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
                self._enqueue_copy_of_trial(trial.number, _get_trial_attributes(trial), trial.params)
        return len(failed)

    def _store_or_check_identity(self, conflict_hint: str) -> None:
        """Store the identity of a new study; reject another study of the same name."""
        stored = self.optuna_study.user_attrs
        if "identity" not in stored:
            self.optuna_study.set_user_attr("described", self.design.identity_fields)
            self.optuna_study.set_user_attr("identity", self.design.identity_hash)
        elif stored["identity"] != self.design.identity_hash:
            differences = format_identity_differences(stored.get("described", {}), self.design.identity_fields)
            study_name = self.optuna_study.study_name
            raise UserError(f"A study named {study_name} exists with other settings{differences}. {conflict_hint}")

    def _enqueue_missing_trials(self) -> None:
        """Add the missing trials to the storage."""
        for attributes in self._list_attributes_of_missing_trials():
            self.optuna_study.enqueue_trial({}, user_attrs=attributes)

    def _list_attributes_of_missing_trials(self) -> list[dict[str, Any]]:
        """Return the attributes of the trials that are not in the storage."""
        if self.design.num_search_trials:
            seeds = list(self.design.seeds)
            return [{"seeds": seeds} for _ in range(self.design.num_search_trials - len(self.trials))]
        stored = {_make_trial_key(trial.user_attrs["cell"], trial.user_attrs["seeds"]) for trial in self.trials}
        return [
            {"cell": settings, "seeds": [seed]}
            for seed in self.design.seeds
            for settings in self.design.combinations
            if _make_trial_key(settings, [seed]) not in stored
        ]

    def _suggest_settings(self, optuna_trial: "Trial") -> Settings:
        """Return the settings that the sampler suggests."""
        settings = {
            key: str(optuna_trial.suggest_categorical(key, values))
            for key, values in self.design.values_by_setting.items()
        }
        for key, bounds in self.design.ranges_by_setting.items():
            if bounds.is_integer:
                value = optuna_trial.suggest_int(key, int(bounds.low), int(bounds.high), log=bounds.is_log_scale)
            else:
                value = optuna_trial.suggest_float(key, bounds.low, bounds.high, log=bounds.is_log_scale)
            settings[key] = bounds.format_value(value)
        return settings

    def _requeue_abandoned_trials(self) -> None:
        """Put the trials of dead workers back into the queue."""
        for trial in self.trials:
            attributes = _get_trial_attributes(trial)
            # With a lock, no other process is between its claim and the storing of its name.
            was_killed_in_claim = "worker" not in attributes and not isinstance(self.lock, nullcontext)
            is_abandoned = was_killed_in_claim or _is_abandoned(attributes, trial.datetime_start)
            if trial.state.name != "RUNNING" or not is_abandoned:
                continue
            with suppress(self.optuna.exceptions.UpdateFinishedTrialError):  # another worker was faster
                self.optuna_study._storage.set_trial_state_values(
                    trial._trial_id, state=self.optuna.trial.TrialState.FAIL
                )
                self._enqueue_copy_of_trial(trial.number, attributes, trial.params)

    def _enqueue_copy_of_trial(
        self, trial_number: int, attributes: TrialAttributes, suggested_params: dict[str, Any]
    ) -> None:
        """Add a copy of a trial to the queue, without the attributes of its worker."""
        dropped = ("worker", "alive", "failed", "again")
        copied = {name: value for name, value in attributes.items() if name not in dropped}
        self.optuna_study.enqueue_trial(suggested_params, user_attrs=copied | {"again": trial_number})


def _get_trial_attributes(optuna_trial: "FrozenTrial") -> TrialAttributes:
    return cast(TrialAttributes, optuna_trial.user_attrs)


def _make_trial_key(settings: Settings, seeds: list[int]) -> TrialKey:
    return (*sorted(settings.items()), *seeds)


def _is_closed_but_not_requeued(optuna_trial: "FrozenTrial") -> bool:
    """Return whether a worker closed the trial to put it back but died before doing so."""
    return optuna_trial.state.name == "FAIL" and "failed" not in optuna_trial.user_attrs


def _is_abandoned(attributes: TrialAttributes, start_time: datetime | None) -> bool:
    """Return whether the worker's heartbeat has expired or, on this machine, its process no longer exists."""
    host, process = attributes.get("worker", (None, None))
    if host == socket.gethostname() and process is not None and not _is_process_possibly_alive(int(process)):
        return True
    last = attributes.get("alive") or (start_time.timestamp() if start_time else 0.0)
    return time.time() - last > HEARTBEAT_TIMEOUT_SECONDS


def _is_process_possibly_alive(process_id: int) -> bool:
    if os.name == "nt":  # signal 0 would interrupt the process, so only the heartbeat counts
        return True
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
