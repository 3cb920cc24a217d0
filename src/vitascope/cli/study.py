"""`vitascope study`: compare settings over several seeds and test which differences are significant."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitascope.cli.tables import console, table
from vitascope.errors import UserError, format_count
from vitascope.recipe.reading import recipe_first

if TYPE_CHECKING:
    from vitascope.study.answer import Answer
    from vitascope.study.design import Design
    from vitascope.study.queue import Queue

BatchRuns = Annotated[
    int | None, typer.Option("--batch-runs", help="Number of runs trained as one batch. Default: as many as fit.")
]
UNITS = {"s": 1, "m": 60, "h": 3600}


def study(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE KEY=A,B,C…", help="A recipe, and settings with comma-separated values."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds per combination.")] = 5,
    search: Annotated[int, typer.Option(help="Try this many combinations, chosen by Optuna, instead of the grid.")] = 0,
    split: Annotated[str, typer.Option(help="Images for the comparison: val (held-out) or test.")] = "val",
    budget: Annotated[
        str | None, typer.Option(help="Start no new run after this time, such as 30m. Run again to continue.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Number of parallel processes on this machine.")] = 1,
    together: BatchRuns = None,
    name: Annotated[str | None, typer.Option(help="Name of the study. Default: names of recipe and settings.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Optuna database URL, to share a study between machines: postgresql://…")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the studies.")] = Path("studies"),
    retry: Annotated[bool, typer.Option("--retry", help="Repeat failed runs.")] = False,
) -> None:
    """Compare settings: train every combination with several seeds and test which differences are significant.

    To continue after an interruption, run the same command again. Finished runs are not repeated.

    Example: vitascope study digits model.embed_dim=16,32,64 --seeds 5
    """
    recipe, settings = recipe_first(words)
    if split not in ("val", "test"):
        raise UserError(f"--split {split} is unknown. Choose val or test.")
    for option, number in (("--jobs", jobs), ("--batch-runs", together)):
        if number is not None and number < 1:
            raise UserError(f"{option} {number} must be at least 1.")
    seconds = None if budget is None else _seconds(budget)
    from vitascope.study.design import design

    made = design(recipe, settings, seeds, search=search, judge=split)
    called = name or _name(recipe, made.varied)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", called):
        raise UserError(f"--name {called} cannot name a folder. Use letters, digits, - and _.")
    _run(made, out / called, called, storage, seconds, jobs, retry, together)


def _run(
    made: "Design",
    folder: Path,
    called: str,
    storage: str | None,
    budget: float | None,
    jobs: int,
    retry: bool,
    together: int | None,
) -> None:
    from vitascope.run.files import make_folder
    from vitascope.study.queue import Queue
    from vitascope.study.running import show, work_off
    from vitascope.study.storage import default_storage

    make_folder(folder, "Choose another folder with --out.")
    queue = Queue(made, storage or default_storage(folder), called)
    if retry:
        print(f"{format_count(queue.retry_failed(), f'failed {made.unit}')} will be repeated.")
    left = format_count(queue.waiting, made.unit) if made.search else queue.waiting
    print(f"Study: {folder}, {made.size}, {left} to do")
    others = [_helper(number, folder) for number in range(2, jobs + 1)]
    until = None if budget is None else time.monotonic() + budget
    try:
        for told in work_off(queue, folder, until, together):
            show(told, console())
    except KeyboardInterrupt:
        print("Stopped. To continue, run the same command again.")
        for other in others:
            other.terminate()
        sys.exit(130)
    finally:
        for number, other in enumerate(others, start=2):
            if other.wait() > 0:
                print(f"Worker {number} failed. See {folder / f'worker-{number}.log'}")
        found = _tell(queue, folder)
    if found.failed and not found.cells:
        raise UserError("Every run failed.")


def _helper(number: int, folder: Path) -> "subprocess.Popen[bytes]":
    """Start the same command as another worker process."""
    words = sys.argv[1:]
    place = next(index for index, word in enumerate(words) if word.split("=")[0] == "--jobs")
    rest = words[:place] + words[place + (1 if "=" in words[place] else 2) :]
    rest = [word for word in rest if word != "--retry"]
    log = (folder / f"worker-{number}.log").open("wb")
    return subprocess.Popen([sys.executable, "-m", "vitascope", *rest], stdout=log, stderr=subprocess.STDOUT)


def _tell(queue: "Queue", folder: Path) -> "Answer":
    from vitascope.study.answer import answer
    from vitascope.study.report import notes, write_report
    from vitascope.study.report import table as rows_of

    found = answer(queue.design, queue.trials)
    page = write_report(found, folder)
    head, rows = rows_of(found)
    if rows:
        console().print(table("Results", head, rows))
    for line in [found.sentence, *notes(found)[1:]]:
        print(line)
    print(f"Report: {page}")
    return found


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found:
        raise UserError(f"--budget {text} is not a duration. Write 90s, 30m or 2h.")
    return float(found[1]) * UNITS[found[2] or "s"]


def _name(recipe: str, varied: list[str]) -> str:
    return "-".join([Path(recipe).stem, *(key.split(".")[-1] for key in varied)])
