"""Open an Optuna study in a storage; the types of the data that it stores."""

import re
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from vitascope.errors import UserError, shorten_error_message

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


if TYPE_CHECKING:
    import optuna

MAX_ATTEMPTS = 3  # to open a storage


def open_or_create_study(storage_url: str, study_name: str, num_attempts: int = MAX_ATTEMPTS) -> "optuna.Study":
    """Open the study or create it. Retry, because two workers may try to create the tables at the same time."""
    try:
        return _create_or_load_study(storage_url, study_name)
    except ImportError as error:
        hint = "For PostgreSQL: pip install 'vitascope[postgresql]'."
        raise UserError(
            f"The storage {hide_password(storage_url)} needs a driver that is not installed. {hint}"
        ) from error
    except Exception as error:  # of the driver or of the database
        if num_attempts == 1:
            reason = shorten_error_message(_get_root_error(error))
            raise UserError(f"The storage {hide_password(storage_url)} cannot be reached: {reason}") from error
    time.sleep(0.5)
    return open_or_create_study(storage_url, study_name, num_attempts - 1)


def _create_or_load_study(storage_url: str, study_name: str) -> "optuna.Study":
    import optuna

    return optuna.create_study(
        storage=optuna.storages.RDBStorage(storage_url),
        study_name=study_name,
        sampler=optuna.samplers.TPESampler(n_startup_trials=10),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=3),
        direction="maximize",
        load_if_exists=True,
    )


def make_lock_if_sqlite(storage_url: str) -> AbstractContextManager[object]:
    """Return a lock for a read followed by a write. An SQLite file has a file lock, which the system releases if its
    process dies. A database server locks rows by itself."""
    from filelock import FileLock
    from sqlalchemy import make_url

    url = make_url(storage_url)
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return nullcontext()
    return FileLock(f"{url.database}.lock")


def make_sqlite_storage_url(study_folder: Path) -> str:
    """Return the URL of an SQLite file in the study's folder."""
    if any(sign in str(study_folder) for sign in "?#%"):
        raise UserError(
            f"{study_folder}: a folder name with ?, # or % cannot hold a database. Choose another folder with --out."
        )
    return f"sqlite:///{study_folder / 'study.db'}"


def hide_password(storage_url: str) -> str:
    """Return the URL without the password."""
    return re.sub(r":[^:/@]*@", ":…@", storage_url)


def _get_root_error(error: BaseException) -> BaseException:
    """Return the original error of the database, which libraries wrap."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return error
