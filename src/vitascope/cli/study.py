"""`vitascope study` and `sheet`: compare settings over several seeds; run coursework sheets."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitascope.cli.console import create_console, create_table
from vitascope.errors import UserError, format_count
from vitascope.recipe.reading import split_required_recipe_args

if TYPE_CHECKING:
    from vitascope.study.design import Design
    from vitascope.study.queue import TrialQueue
    from vitascope.study.results import StudyResults


BatchRunsOption = Annotated[
    int | None, typer.Option("--batch-runs", help="Number of runs trained as one batch. Default: as many as fit.")
]
SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600}


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
    batch_runs: BatchRunsOption = None,
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
    recipe, settings = split_required_recipe_args(words)
    if split not in ("val", "test"):
        raise UserError(f"--split {split} is unknown. Choose val or test.")
    for option, number in (("--jobs", jobs), ("--batch-runs", batch_runs)):
        if number is not None and number < 1:
            raise UserError(f"{option} {number} must be at least 1.")
    seconds = None if budget is None else _parse_duration(budget)
    from vitascope.study.design import read_design

    made = read_design(recipe, settings, seeds, num_search_trials=search, eval_split=split)
    called = name or _make_study_name(recipe, made.varied_settings)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", called):
        raise UserError(f"--name {called} cannot name a folder. Use letters, digits, - and _.")
    _run_study(made, out / called, called, storage, seconds, jobs, retry, batch_runs)


def _run_study(
    study_design: "Design",
    folder: Path,
    study_name: str,
    storage_url: str | None,
    budget_seconds: float | None,
    num_processes: int,
    retry_failed: bool,
    max_batched_runs: int | None,
) -> None:
    from vitascope.run.files import make_folder
    from vitascope.study.queue import TrialQueue
    from vitascope.study.storage import get_default_storage_url
    from vitascope.study.workers import print_outcome, run_trials

    make_folder(folder, "Choose another folder with --out.")
    queue = TrialQueue(study_design, storage_url or get_default_storage_url(folder), study_name)
    if retry_failed:
        print(f"{format_count(queue.requeue_failed_trials(), f'failed {study_design.unit}')} will be repeated.")
    left = format_count(queue.num_waiting, study_design.unit) if study_design.num_search_trials else queue.num_waiting
    print(f"Study: {folder}, {study_design.size}, {left} to do")
    others = [_start_worker(number, folder) for number in range(2, num_processes + 1)]
    until = None if budget_seconds is None else time.monotonic() + budget_seconds
    try:
        for told in run_trials(queue, folder, until, max_batched_runs):
            print_outcome(told, create_console())
    except KeyboardInterrupt:
        print("Stopped. To continue, run the same command again.")
        for other in others:
            other.terminate()
        sys.exit(130)
    finally:
        for number, other in enumerate(others, start=2):
            if other.wait() > 0:
                print(f"Worker {number} failed. See {folder / f'worker-{number}.log'}")
        found = _write_and_print_report(queue, folder)
    if found.failed_trials and not found.combinations:
        raise UserError("Every run failed.")


def _start_worker(worker_number: int, folder: Path) -> "subprocess.Popen[bytes]":
    """Start the same command as another worker process."""
    words = sys.argv[1:]
    place = next(index for index, word in enumerate(words) if word.split("=")[0] == "--jobs")
    rest = words[:place] + words[place + (1 if "=" in words[place] else 2) :]
    rest = [word for word in rest if word != "--retry"]
    log = (folder / f"worker-{worker_number}.log").open("wb")
    return subprocess.Popen([sys.executable, "-m", "vitascope", *rest], stdout=log, stderr=subprocess.STDOUT)


def _write_and_print_report(queue: "TrialQueue", folder: Path) -> "StudyResults":
    from vitascope.study.report import build_results_table as rows_of
    from vitascope.study.report import format_notes, write_report
    from vitascope.study.results import collect_results

    found = collect_results(queue.design, queue.trials)
    page = write_report(found, folder)
    head, rows = rows_of(found)
    if rows:
        create_console().print(create_table("Results", head, rows))
    for line in [found.conclusion, *format_notes(found)[1:]]:
        print(line)
    print(f"Report: {page}")
    return found


def _parse_duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found:
        raise UserError(f"--budget {text} is not a duration. Write 90s, 30m or 2h.")
    return float(found[1]) * SECONDS_PER_UNIT[found[2] or "s"]


def _make_study_name(recipe: str, varied_settings: list[str]) -> str:
    return "-".join([Path(recipe).stem, *(key.split(".")[-1] for key in varied_settings)])


QUICK = "Run a shortened version for a CPU. On two cores, A takes about 1 minute, D 10 minutes or more."


def run_coursework_sheet(
    letter: Annotated[str, typer.Argument(metavar="A|B|C|D|E", help="Letter of the sheet.")],
    quick: Annotated[bool, typer.Option("--quick", help=QUICK)] = False,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds. Default: 5, or 2 with --quick.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for reports and runs.")] = Path("sheets"),
    batch_runs: BatchRunsOption = None,
    weights: Annotated[str | None, typer.Option(help="Sheet D: pretrained weights. Default: timm's DeiT-tiny.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="Git commit for the record, if there is no Git.", hidden=True)
    ] = None,
) -> None:
    """Run a coursework sheet: train its experiments, draw its figures and answer its questions.

    A: a minimal ViT on MNIST, and its attention map.
    B: shapes through attention; training for 10, 30 and 50 epochs (CIFAR-10).
    C: heads and a causal mask; training with and without shift (CIFAR-10).
    D: three studies, cost of attention, pretrained weights, little data (MNIST).
    E: layers compared with PyTorch; 25, 50 and 70 % accuracy (CIFAR-10).

    To continue after an interruption, run the same command again. Finished runs are not repeated.

    Example: vitascope sheet A --quick
    """
    from vitascope.cli.console import create_console
    from vitascope.coursework.sheets.run_sheet import run_sheet

    options = {"seeds": seeds, "quick": quick, "device": device, "together": batch_runs, "weights": weights}
    try:
        page = run_sheet(letter, out, **options, git_commit=commit, console=create_console())
    except KeyboardInterrupt:
        print("Stopped. To continue, run the same command again.")
        raise typer.Exit(130) from None
    print(f"Report: {page.with_suffix('.md')}, {page}")
