"""`python -m benchmarks.faithfulness RUN --name NAME`: faithfulness of the explanation methods on test images."""

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.__main__ import RESULTS_FOLDER
from vitascope import open_model
from vitascope.evaluation.eval_data import load_eval_data
from vitascope.explain import METHODS, correlate_with_shuffled_weights, measure_faithfulness
from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import collect_machine_info


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    classifier = open_model(args.run)
    model, run = classifier.model, classifier.run
    split = load_eval_data(run, classifier.info, "test", None).samples  # explained, not used for an accuracy
    some = split.select_evenly(args.images)
    images, start = classifier.preprocessing(some.images), time.perf_counter()
    rows: list[dict[str, Any]] = [
        asdict(row) for row in measure_faithfulness(model, images, on_method_start=lambda name: print(name, flush=True))
    ]
    for row in rows:
        if row["method"] in METHODS:
            row["alike_with_shuffled_weights"] = correlate_with_shuffled_weights(model, images, row["method"])
    record = {
        "name": f"explain-{args.name}",
        "command": f"python -m benchmarks.faithfulness RUN --name {args.name} --images {args.images}",
        "recipe": run.recipe.name,
        "epochs": run.recipe.train.epochs,
        "images": args.images,
        "seconds": round(time.perf_counter() - start, 1),
        "rows": rows,
    } | collect_machine_info(args.commit)
    out = args.out or RESULTS_FOLDER / f"explain-{args.name}.json"
    make_folder(out.parent)
    write_json(out, record)
    for row in rows:
        print(f"{row['method']:<22} deletion {row['deletion']:.3f}  insertion {row['insertion']:.3f}")
    print(f"Record: {out}")


if __name__ == "__main__":
    main()
