"""Check that runs may be combined into one record."""

from collections.abc import Iterable
from typing import Any

from vitascope.errors import UserError
from vitascope.records.settings import differing
from vitascope.records.track import published, stage_before
from vitascope.run.directory import Run
from vitascope.run.machine import made_on

NEEDED = ("machine", "hardware", "versions", "commit", "date", "data_hash")


def facts_of(run: Run) -> dict[str, Any]:
    """The machine, versions and commit that the run itself stored."""
    if not run.finished:
        raise UserError(f"{run.path} is not finished. Resume it with: vitascope resume {run.path}")
    if not run.metrics:
        raise UserError(f"{run.path} has no metrics.jsonl, so its training time is unknown. Train it again.")
    if (company := run.metrics[-1].get("together", 1)) > 1:
        raise UserError(
            f"{run.path} was trained in one batch of {company} runs, so its own time is unknown. Train it alone."
        )
    said = run.machine
    if missing := [key for key in NEEDED if key not in said]:
        raise UserError(f"{run.path}/machine.json has no {missing[0]}, so the run cannot be recorded. Train it again.")
    for later in said.get("resumed", []):
        if any(later[key] != said[key] for key in ("machine", "commit", "versions")):
            raise UserError(
                f"{run.path} was resumed on another machine, at another commit or with other versions. Train it again."
            )
    return said


def check_one_thing(runs: list[Run], facts: list[dict[str, Any]], commit: str | None) -> None:
    """Runs in one record may differ only in their seed."""
    seeds = [run.recipe.train.seed for run in runs]
    if repeated := [seed for seed in set(seeds) if seeds.count(seed) > 1]:
        raise UserError(f"Seed {repeated[0]} is given more than once. A record has one run per seed.")
    stages = [stage for run in runs if (stage := stage_before(run))]
    for recipes in ([published(run) for run in runs], [stage.recipe for stage in stages]):
        if other := [key for key in differing(recipes) if key != "train.seed"] if recipes else []:
            raise UserError(f"The runs differ in {', '.join(other[:4])}. A record is one recipe with several seeds.")
    check_same("machines", [made_on(fact) for fact in facts])
    check_same("commits", [str(fact["commit"]) for fact in facts])
    check_same("versions of torch", [str(fact["versions"].get("torch")) for fact in facts])
    for what in ("precision", "compiled", "captured"):
        check_same(f"values of {what}", [str(fact["hardware"].get(what)) for fact in facts])
    check_same("numbers of images seen", [str(run.metrics[-1]["images_seen"]) for run in runs])
    check_same("training images", [str(fact.get("whole_data_hash")) for fact in facts])
    own = facts[0]["commit"]
    if own and commit and own != commit:
        raise UserError(f"--commit {commit[:12]}: the runs were made at commit {own[:12]}. Leave --commit out.")


def check_same(what: str, values: Iterable[str]) -> None:
    different = list(dict.fromkeys(values))
    if len(different) > 1:
        raise UserError(f"The runs have different {what}: {different[0]} and {different[1]}. Record them separately.")
