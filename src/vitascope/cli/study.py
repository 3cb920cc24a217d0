"""`vitascope study` and `sheet`: compare settings over several seeds; run coursework sheets."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitascope.cli import INTERRUPTED
from vitascope.cli.console import create_console, create_table
from vitascope.errors import UserError, format_count
from vitascope.recipe.reading import split_required_recipe_args

if TYPE_CHECKING:
    from vitascope.study.design import Design
    from vitascope.study.queue import TrialQueue
    from vitascope.study.results import StudyResults


BatchRunsOption = Annotated[
    int | None,
    typer.Option(
        "--batch-runs", help="Train this many runs at once on a GPU. Default: up to 32, fewer if the model is large."
    ),
]
StudyArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE KEY=A,B,C…", help="A recipe, and settings with comma-separated values, or ranges for --search."
    ),
]
WeightsOption = Annotated[str | None, typer.Option(help="Sheet D: pretrained weights. Default: timm's DeiT-tiny.")]
SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600}


def study(
    recipe_and_settings: StudyArgument = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds per combination.")] = 5,
    search: Annotated[int, typer.Option(help="Try this many combinations, chosen by Optuna, instead of the grid.")] = 0,
    split: Annotated[str, typer.Option(help="Images for the comparison: val (validation images) or test.")] = "val",
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
    With --search, a setting can be a range: train.lr=0.0001..0.1

    Example: vitascope study digits model.embed_dim=16,32,64 --seeds 5
    """
    recipe, settings = split_required_recipe_args(recipe_and_settings)
    if split not in ("val", "test"):
        raise UserError(f"--split {split} is unknown. Choose val or test.")
    for option, value in (("--jobs", jobs), ("--batch-runs", batch_runs)):
        if value is not None and value < 1:
            raise UserError(f"{option} {value} must be at least 1.")
    seconds = None if budget is None else _parse_duration_seconds(budget)
    from vitascope.study.design import parse_and_check_design

    design = parse_and_check_design(
        recipe, settings, seeds, num_search_trials=search, eval_split="test" if split == "test" else "val"
    )
    name = name or _make_study_name(recipe, design.varied_settings)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError(f"--name {name} cannot name a folder. Use letters, digits, - and _.")
    _run_study_and_write_report(design, out / name, name, storage, seconds, jobs, retry, batch_runs)


def _run_study_and_write_report(
    design: "Design",
    output_folder: Path,
    study_name: str,
    storage_url: str | None,
    budget_seconds: float | None,
    num_processes: int,
    retry_failed: bool,
    max_batched_runs: int | None,
) -> None:
    from vitascope.run.files import make_folder
    from vitascope.study.queue import TrialQueue
    from vitascope.study.storage import make_sqlite_storage_url
    from vitascope.study.workers import print_trial_outcome, run_trials

    make_folder(output_folder, "Choose another folder with --out.")
    queue = TrialQueue(design, storage_url or make_sqlite_storage_url(output_folder), study_name)
    if retry_failed:
        print(f"{format_count(queue.requeue_failed_trials(), f'failed {design.item_name}')} will be repeated.")
    waiting = format_count(queue.num_waiting, design.item_name) if design.num_search_trials else queue.num_waiting
    print(f"Study: {output_folder}, {design.size_text}, {waiting} to do")
    workers = [
        _start_same_command_as_worker(worker_number, output_folder) for worker_number in range(2, num_processes + 1)
    ]
    deadline = None if budget_seconds is None else time.monotonic() + budget_seconds
    try:
        for outcome in run_trials(queue, output_folder, deadline, max_batched_runs):
            print_trial_outcome(outcome, create_console())
    except KeyboardInterrupt:
        print("Stopped. To continue, run the same command again.")
        for worker in workers:
            worker.terminate()
        sys.exit(130)
    finally:
        for worker_number, worker in enumerate(workers, start=2):
            if worker.wait() > 0 and worker.returncode != INTERRUPTED:
                print(f"Worker {worker_number} failed. See {output_folder / f'worker-{worker_number}.log'}")
        results = _write_and_print_study_report(queue, output_folder)
    if results.failed_trials and not results.combinations:
        raise UserError("Every run failed.")


def _start_same_command_as_worker(worker_number: int, log_folder: Path) -> "subprocess.Popen[bytes]":
    """Start the same command as another worker process."""
    args = sys.argv[1:]
    jobs_index = next(index for index, arg in enumerate(args) if arg.split("=")[0] == "--jobs")
    args = args[:jobs_index] + args[jobs_index + (1 if "=" in args[jobs_index] else 2) :]
    args = [arg for arg in args if arg != "--retry"]
    log = (log_folder / f"worker-{worker_number}.log").open("wb")
    return subprocess.Popen([sys.executable, "-m", "vitascope", *args], stdout=log, stderr=subprocess.STDOUT)


def _write_and_print_study_report(queue: "TrialQueue", output_folder: Path) -> "StudyResults":
    from vitascope.study.report import build_results_table, format_notes, write_html_markdown_and_json_report
    from vitascope.study.results import collect_results

    results = collect_results(queue.design, queue.trials)
    report_path = write_html_markdown_and_json_report(results, output_folder)
    table = build_results_table(results)
    if table.rows:
        create_console().print(create_table("Results", table.header, table.rows))
    for line in [results.conclusion, *format_notes(results)[1:]]:
        print(line)
    print(f"Report: {report_path}")
    return results


def _parse_duration_seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match:
        raise UserError(f"--budget {text} is not a duration. Write 90s, 30m or 2h.")
    return float(match[1]) * SECONDS_PER_UNIT[match[2] or "s"]


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
    weights: WeightsOption = None,
    commit: Annotated[str | None, typer.Option(help="Git commit for the record, without Git.", hidden=True)] = None,
) -> None:
    """Run a coursework sheet: train its experiments, draw its figures and answer its questions.

    A: a minimal ViT on MNIST, and its attention map.
    B: shapes through attention; training for 10, 30 and 50 epochs (CIFAR-10).
    C: heads and a causal mask; training with and without randomly shifted images (CIFAR-10).
    D: studies of width, patch size and depth; time and memory of attention;
    pretrained weights; training on few images (MNIST).
    E: layers compared with PyTorch; training to 25, 50 and 70 % accuracy (CIFAR-10).

    To continue after an interruption, run the same command again. Finished runs are not repeated.

    Example: vitascope sheet A --quick
    """
    from vitascope.coursework.sheets.report import run_sheet_and_write_report

    try:
        page = run_sheet_and_write_report(
            letter,
            out,
            num_seeds=seeds,
            quick=quick,
            device=device,
            max_batched_runs=batch_runs,
            weights_ref=weights,
            git_commit=commit,
            console=create_console(),
        )
    except KeyboardInterrupt:
        print("Stopped. To continue, run the same command again.")
        raise typer.Exit(130) from None
    print(f"Report: {page.with_suffix('.md')}, {page}")
