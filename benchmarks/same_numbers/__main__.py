"""Prove that a refactoring changed no number: train with another commit's code and with the working tree's.

Metrics and weights are compared bit by bit. The exit code is 0 if all are identical, 1 if not, 2 for a wrong option.

    python -m benchmarks.same_numbers --base main
    python -m benchmarks.same_numbers --base main --export carry/base     (for a machine without the git history)
    python -m benchmarks.same_numbers --base carry/base --device cuda
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.race import REPOSITORY_FOLDER
from benchmarks.same_numbers.compare import SIDES, Comparison, MetricNames, compare_runs
from benchmarks.same_numbers.processes import Workspace, train_base_again, train_with_both_trees
from benchmarks.same_numbers.settings import ADDED_METRICS, METRIC_RENAMES, REMOVED_METRICS, SETTINGS
from benchmarks.same_numbers.worker import Result, Setting
from benchmarks.trees import export_commit, find_commit_hash, has_vitascope_package, make_empty_folder, name_tree
from vitascope.errors import UserError, suggest_choice
from vitascope.inference.hardware import choose_or_check_device

METRIC_NAMES = MetricNames(METRIC_RENAMES, ADDED_METRICS, REMOVED_METRICS)
IDENTICAL, DIFFERENT, NOT_REPEATABLE = "identical", "different", "not repeatable"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one setting."""

    setting: str
    comparison: Comparison
    outcome: str = IDENTICAL

    def __str__(self) -> str:
        compared, text = self.comparison, self.outcome
        text += f": {compared.difference}" if compared.difference else ""
        text += f" ({', '.join(sorted(compared.notes))})" if compared.notes else ""
        rows = f"{compared.rows} row{'s' if compared.rows != 1 else ''}, {compared.tensors} tensors"
        return f"{self.setting:<15} {rows:<20} {text}"


def compare_results(base_result: Result, new_result: Result) -> Comparison:
    """Compare what two processes trained. An error in either is a difference."""
    failed = [(result, side) for result, side in zip((base_result, new_result), SIDES, strict=True) if result.error]
    if failed:
        return Comparison(difference="; ".join(f"failed in {side}: {result.error}" for result, side in failed))
    return compare_runs([Path(run) for run in base_result.runs], [Path(run) for run in new_result.runs], METRIC_NAMES)


def check_expected_metric(setting: Setting, comparison: Comparison) -> None:
    """Two trees that both skip the intended code prove nothing."""
    if setting.expected_metric and setting.expected_metric not in comparison.metrics:
        comparison.note_difference(f"no metric {setting.expected_metric}: the code that writes it did not run")


def compare_trees(base_tree: Path, settings: Sequence[Setting], workspace: Workspace) -> list[Verdict]:
    """Train and compare all settings. Where a setting differs, the base is compared with itself, too."""
    verdicts, different, base_results = [], {}, {}
    for setting, (old, new) in zip(
        settings, train_with_both_trees(base_tree, REPOSITORY_FOLDER, settings, workspace), strict=True
    ):
        base_results[setting.name] = old
        comparison = compare_results(old, new)
        check_expected_metric(setting, comparison)
        if comparison.difference:
            different[setting.name] = comparison
        else:
            verdicts.append(_print_verdict(Verdict(setting.name, comparison)))
    repeated = [setting for setting in settings if setting.name in different]
    for setting, again in zip(
        repeated, train_base_again(base_tree, repeated, workspace) if repeated else [], strict=True
    ):
        itself = compare_results(base_results[setting.name], again)
        is_repeatable = not itself.difference or bool(again.error)
        outcome = DIFFERENT if is_repeatable else NOT_REPEATABLE
        verdicts.append(_print_verdict(Verdict(setting.name, different[setting.name], outcome)))
    return verdicts


def _print_verdict(verdict: Verdict) -> Verdict:
    print(verdict, flush=True)
    return verdict


def summarize_verdicts(verdicts: Sequence[Verdict], base_name: str) -> str:
    counts = {kind: sum(verdict.outcome == kind for verdict in verdicts) for kind in (DIFFERENT, NOT_REPEATABLE)}
    trees = f"{base_name} and the working tree"
    total = f"{len(verdicts)} setting{'s' if len(verdicts) > 1 else ''}"
    if not any(counts.values()):
        return f"{IDENTICAL}: {total}, {trees}"
    return "; ".join(f"{kind}: {count} of {total}" for kind, count in counts.items() if count) + f", {trees}"


def choose_settings(device: str, setting_names: Sequence[str] | None) -> list[Setting]:
    known = {setting.name: setting for setting in SETTINGS[device]}
    for name in setting_names or ():
        if name not in known:
            raise UserError(f"There is no setting {name} on {device}. {suggest_choice(name, known)}")
    return [setting for setting in SETTINGS[device] if not setting_names or setting.name in setting_names]


def open_base_tree(base: str, stack: ExitStack) -> Path:
    """Return the folder of the base's tree. A commit is exported into a temporary folder."""
    if has_vitascope_package(Path(base)):
        return Path(base).resolve()
    if not find_commit_hash(base):
        raise UserError(f"--base {base} is neither a commit of this repository nor a folder with src/vitascope.")
    return export_commit(base, Path(stack.enter_context(TemporaryDirectory())) / "tree")


def run_comparison(args: argparse.Namespace, stack: ExitStack) -> int:
    if args.export:
        print(f"Exported {name_tree(export_commit(args.base, args.export))} to {args.export}")
        return 0
    settings = choose_settings(choose_or_check_device(args.device), args.only)
    base = open_base_tree(args.base, stack)
    folder = (args.keep or Path(stack.enter_context(TemporaryDirectory()))).resolve()
    make_empty_folder(folder)
    workplace = Workspace(folder, args.device)
    workplace.write_data()
    verdicts = compare_trees(base, settings, workplace)
    print(summarize_verdicts(verdicts, name_tree(base)))
    return int(any(verdict.outcome != IDENTICAL for verdict in verdicts))


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.same_numbers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, metavar="COMMIT", help="a commit, or a folder with an exported tree")
    parser.add_argument("--device", choices=SETTINGS, default="cpu")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="train only these settings")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs there")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="write the commit's tree there and end")
    args = parser.parse_args()
    try:
        with ExitStack() as stack:
            code = run_comparison(args, stack)
    except UserError as error:
        parser.error(str(error))
    sys.exit(code)


if __name__ == "__main__":
    main()
