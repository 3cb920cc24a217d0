"""`python -m benchmarks.faithfulness RUN --name NAME`: faithfulness of the explanation methods on test images."""

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.__main__ import RESULTS
from vitascope import load
from vitascope.evaluation.choosing import choose
from vitascope.explain import METHODS, measure, survives_random_weights
from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import record_of_machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    model = load(asked.run)
    split = choose(model.run, model.facts, "test", None).images  # explained, not used for an accuracy
    some = split.evenly(asked.images)
    images, start = model.facts.preparation(some.images), time.perf_counter()
    rows: list[dict[str, Any]] = [
        asdict(row) for row in measure(model, images, told=lambda name: print(name, flush=True))
    ]
    for row in rows:
        if row["method"] in METHODS:
            row["alike_with_shuffled_weights"] = survives_random_weights(model, images, row["method"])
    record = {
        "name": f"explain-{asked.name}",
        "command": f"python -m benchmarks.faithfulness RUN --name {asked.name} --images {asked.images}",
        "recipe": model.run.recipe.name,
        "epochs": model.run.recipe.train.epochs,
        "images": asked.images,
        "seconds": round(time.perf_counter() - start, 1),
        "rows": rows,
    } | record_of_machine(asked.commit)
    out = asked.out or RESULTS / f"explain-{asked.name}.json"
    make_folder(out.parent)
    write_json(out, record)
    for row in rows:
        print(f"{row['method']:<22} deletion {row['deletion']:.3f}  insertion {row['insertion']:.3f}")
    print(f"Record: {out}")


if __name__ == "__main__":
    main()
