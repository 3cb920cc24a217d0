"""Train a list of settings with one tree's code, in a process of its own.

`python worker.py JOB.json` prints one JSON line per setting. PYTHONPATH decides which tree's code runs. Therefore this
file imports only what every tree has: `train`, `resume` and `UserError` of `vitascope`, and `vitascope.cli.main`.
"""

import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

ArgumentValue = str | int | float | bool | list[float]
Arguments = dict[str, ArgumentValue]  # settings such as train.lr and options such as --seeds, with their values
Trained = TypeVar("Trained")

RUN = "{run}"  # as a value: the path of the run of the setting in `starts_from`


@dataclass(frozen=True)
class Setting:
    """What is trained, in the working tree's names."""

    name: str
    recipe: str
    settings: Arguments
    kind: str = "train"  # train; resume: interrupted after one epoch, then resumed; study: several runs in one batch
    options: Arguments = field(default_factory=dict)  # of `vitascope study`
    starts_from: str = ""  # another setting, trained first; its run replaces "{run}"
    expected_metric: str = ""  # a metric that shows that the intended code ran


@dataclass(frozen=True)
class Rename:
    """A setting, an option or a metric that has a new name; with values, only that value of it."""

    new: str
    old: str
    new_value: ArgumentValue | None = None
    old_value: ArgumentValue | None = None

    def is_used_in(self, arguments: Arguments) -> bool:
        return self.new in arguments and self.new_value in (None, arguments[self.new])

    def restore_old_name(self, arguments: Arguments) -> Arguments:
        """Return the names with this one replaced by the old one."""
        old_value = arguments[self.new] if self.old_value is None else self.old_value
        return {key: value for key, value in arguments.items() if key != self.new} | {self.old: old_value}


@dataclass(frozen=True)
class Job:
    """All that a process has to do."""

    package: str  # the folder that `vitascope` must be imported from
    folder: str  # for the runs
    settings: list[Setting]
    needed: list[Setting]  # settings that others start from
    renames: list[Rename]


@dataclass(frozen=True)
class Result:
    """The run folders of one setting, or the error."""

    name: str
    runs: list[str]
    error: str = ""


def call_with_accepted_names(
    call: Callable[[Arguments], Trained], arguments: Arguments, renames: Sequence[Rename], error_type: type[Exception]
) -> Trained:
    """Call with the current names. Each name that the tree's error message refuses is replaced by its old name."""
    first_message, unused = "", list(renames)
    while True:
        try:
            return call(arguments)
        except error_type as error:
            message = str(error)
            rename = _find_refused_rename(message, [rename for rename in unused if rename.is_used_in(arguments)])
            if rename is None and first_message:
                raise error_type(f"{first_message} With old names: {message}") from error
            if rename is None:
                raise
            first_message, arguments = first_message or message, rename.restore_old_name(arguments)
            unused.remove(rename)


def _find_refused_rename(message: str, renames: list[Rename]) -> Rename | None:
    """Return the rename whose new name comes first in the message. A message may leave out the section (`model.`)."""
    places = {}
    for rename in renames:
        last_part = rename.new if rename.new.startswith("-") else rename.new.rpartition(".")[2]
        if match := re.search(rf"(?<![\w-]){re.escape(last_part)}(?![\w-])", message):
            places[match.start()] = rename
    return places[min(places)] if places else None


class Interruption:
    """Raise KeyboardInterrupt when the second row of a metrics.jsonl is about to be written, once."""

    def __init__(self) -> None:
        self.num_openings = -1  # less than 0: off

    def handle_audit_event(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.num_openings < 0 or event != "open" or Path(str(arguments[0])).name != "metrics.jsonl":
            return
        if isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            self.num_openings += 1
            if self.num_openings == 2:
                self.num_openings = -1
                raise KeyboardInterrupt


def train_setting(setting: Setting, folder: Path, renames: Sequence[Rename], start_run: str = "") -> list[Path]:
    """Train one setting and return its run folders, in the order in which they were created."""
    from vitascope import UserError

    settings = {key: start_run if value == RUN else value for key, value in setting.settings.items()}
    train = {"train": _train_recipe, "resume": _train_with_interruption, "study": _run_study}[setting.kind]
    call_with_accepted_names(
        lambda names: train(setting.recipe, folder, names), settings | setting.options, renames, UserError
    )
    return _find_runs(folder)


def _find_runs(folder: Path) -> list[Path]:
    files = folder.rglob("recipe.yaml")
    return [file.parent for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, str(file)))]


def _train_recipe(recipe: str, folder: Path, arguments: Arguments) -> None:
    import vitascope

    vitascope.train(recipe, runs=folder, quiet=True, **arguments)


def _train_with_interruption(recipe: str, folder: Path, arguments: Arguments) -> None:
    import vitascope

    interruption = Interruption()
    sys.addaudithook(interruption.handle_audit_event)
    interruption.num_openings = 0
    try:
        _train_recipe(recipe, folder, arguments)
    except KeyboardInterrupt:
        vitascope.resume(_find_runs(folder)[-1], quiet=True)
        return
    finally:
        interruption.num_openings = -1
    raise RuntimeError("The run could not be interrupted: metrics.jsonl was not opened for its second row.")


def _run_study(recipe: str, folder: Path, arguments: Arguments) -> None:
    """Run `vitascope study` in this process; a message with exit code 2 becomes a UserError."""
    from vitascope import UserError
    from vitascope.cli import main

    settings = [f"{key}={value}" for key, value in arguments.items() if not key.startswith("-")]
    options = [part for key, value in arguments.items() if key.startswith("-") for part in (key, str(value))]
    words_before, messages = sys.argv, io.StringIO()
    sys.argv = ["vitascope", "study", recipe, *settings, *options, "--out", str(folder)]
    try:
        with redirect_stderr(messages), redirect_stdout(io.StringIO()):
            main()
    except SystemExit as end:
        message = " ".join(messages.getvalue().split())
        if end.code == 2:
            raise UserError(message) from None
        if end.code:
            raise RuntimeError(f"vitascope study ended with code {end.code}: {message}") from None
    finally:
        sys.argv = words_before


def run_job(job: Job, report_result: Callable[[Result], None]) -> None:
    """Train all settings, one after the other. An error ends one setting, not the job."""
    known = {setting.name: setting for setting in [*job.settings, *job.needed]}
    trained: dict[str, Result] = {}

    def train_once(name: str) -> Result:
        if name not in trained:
            setting = known[name]
            first = train_once(setting.starts_from) if setting.starts_from else Result(name, [""])
            trained[name] = first if first.error else _try_setting(setting, job, first.runs[-1])
        return Result(name, trained[name].runs, trained[name].error)

    for setting in job.settings:
        report_result(train_once(setting.name))


def _try_setting(setting: Setting, job: Job, start_run: str) -> Result:
    try:
        runs = train_setting(setting, Path(job.folder) / setting.name, job.renames, start_run)
    except Exception as error:  # any error of the tree's code is reported for this setting
        return Result(setting.name, [], f"{type(error).__name__}: {' '.join(str(error).split())}")
    is_finished = runs and all((run / "model.safetensors").is_file() for run in runs)
    return Result(setting.name, [str(run) for run in runs], "" if is_finished else "A run has no model.safetensors.")


def write_job(job: Job, path: Path) -> None:
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")


def read_job(path: Path) -> Job:
    content = json.loads(path.read_text(encoding="utf-8"))
    for key, kind in (("settings", Setting), ("needed", Setting), ("renames", Rename)):
        content[key] = [kind(**entry) for entry in content[key]]
    return Job(**content)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # the parent process reads only the results
    job = read_job(Path(sys.argv[1]))
    import vitascope

    if Path(vitascope.__file__).resolve().parent != Path(job.package).resolve():
        sys.exit(f"vitascope was imported from {Path(vitascope.__file__).parent}, not from {job.package}.")
    run_job(job, lambda result: print(json.dumps(asdict(result)), file=answers, flush=True))


if __name__ == "__main__":
    main()
