"""Open an Optuna study in a storage."""

import re
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from vitascope.errors import UserError, first_line

TRIES = 3  # to open a storage


def open_study(url: str, name: str, tries: int = TRIES) -> Any:
    """Open the study or create it. Retry, because two workers may try to create the tables at the same time."""
    try:
        return _opened(url, name)
    except ImportError as error:
        hint = "For PostgreSQL: pip install 'vitascope[postgresql]'."
        raise UserError(f"The storage {hidden(url)} needs a driver that is not installed. {hint}") from error
    except Exception as error:  # a driver's own, a database's own
        if tries == 1:
            raise UserError(f"The storage {hidden(url)} cannot be reached: {first_line(_root(error))}") from error
    time.sleep(0.5)
    return open_study(url, name, tries - 1)


def _opened(url: str, name: str) -> Any:
    import optuna

    return optuna.create_study(
        storage=optuna.storages.RDBStorage(url),
        study_name=name,
        sampler=optuna.samplers.TPESampler(n_startup_trials=10),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=3),
        direction="maximize",
        load_if_exists=True,
    )


def one_after_the_other(url: str) -> AbstractContextManager[Any]:
    """A lock on an SQLite file for a read followed by a write; the system releases it if its process dies. A database
    server locks rows by itself."""
    from filelock import FileLock
    from sqlalchemy import make_url

    place = make_url(url)
    if place.get_backend_name() != "sqlite" or place.database in (None, "", ":memory:"):
        return nullcontext()
    return FileLock(f"{place.database}.lock")


def default_storage(folder: Path) -> str:
    if any(sign in str(folder) for sign in "?#%"):
        raise UserError(
            f"{folder}: a folder name with ?, # or % cannot hold a database. Choose another folder with --out."
        )
    return f"sqlite:///{folder / 'study.db'}"


def hidden(url: str) -> str:
    """The URL without the password."""
    return re.sub(r":[^:/@]*@", ":…@", url)


def _root(error: BaseException) -> BaseException:
    """The original error of the database, which libraries wrap."""
    while before := error.__cause__ or error.__context__:
        error = before
    return error
