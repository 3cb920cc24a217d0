"""Markdown tables of benchmark results."""

from pathlib import Path
from statistics import mean
from typing import Any

from vitascope.records.ablation import (
    MIN_SEEDS_FOR_INTERVAL,
    ResidualNoise,
    compare_arms,
    describe_mean_format,
    estimate_residual_noise,
    format_difference,
    format_mean,
)
from vitascope.records.reading import abbreviate_count, format_markdown_table, read_benchmark_rows, read_results_file
from vitascope.run.machine import get_machine_name


def format_benchmark_table(results_folder: Path, record_names: list[str]) -> str:
    """`make bench`: one column per benchmark, in images per second or milliseconds and × the fastest eager peer."""
    cells: dict[str, dict[str, str]] = {}
    for row in read_benchmark_rows(results_folder, record_names):
        race = f"{row['shape']} {row['task']}"
        cells.setdefault(row["who"], {})[race] = _format_relative_speed(row)
    races = list(dict.fromkeys(race for row in cells.values() for race in row))
    return format_markdown_table(
        ["implementation", *races], [[who, *(row.get(race, "–") for race in races)] for who, row in cells.items()]
    )


def format_gpu_benchmark_table(results_folder: Path, record_names: list[str]) -> str:
    """Benchmarks on a GPU, one row each: Vitascope and its peers."""
    rows: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in read_benchmark_rows(results_folder, record_names):
        who = ", ".join(word for word in row["who"].split(", ") if word not in ("bfloat16", "float32"))
        rows.setdefault((row["shape"], row["task"], row["batch"]), {})[who] = row
    peers = ["timm", "timm, compiled", "transformers", "torchvision", "vit-pytorch"]
    lines = []
    for (shape, task, batch), found in rows.items():
        ours = found["ours, compiled, whole step" if task == "train" else "ours, fast"]
        beside = [_format_speed(found[peer]) if peer in found else "–" for peer in peers]
        ahead = [f"×{ours[name]:.2f}" for name in ("times_timm", "times_timm_compiled")]
        share = "–" if task == "latency" else f"{ours['share_of_matrix_rate']:.0%}"
        lines.append([f"{shape} {task}, batch {batch}", f"**{_format_speed(ours)}**", *ahead, share, *beside])
    head = ["benchmark", "ours", "× timm", "× timm compiled"]
    return format_markdown_table([*head, "fraction of the matrix-multiply rate", *peers], lines)


def format_scaling_table(results_folder: Path, record_names: list[str]) -> str:
    """The exponent with which the time and the FLOPs of a training step grow with each size."""
    rows = []
    for name in record_names:
        said = read_results_file(results_folder / f"{name}.json")
        for axis, told in said["exponents"].items():
            sizes = [row[axis] for row in said["rows"] if row["axis"] == axis]
            machine = get_machine_name(said["machine"], said["device"])
            rows.append([machine, axis, f"{min(sizes)} – {max(sizes)}", f"{told['milliseconds']}", f"{told['flops']}"])
    return format_markdown_table(["machine", "size", "range", "exponent of the time", "exponent of the FLOPs"], rows)


def format_faithfulness_table(results_folder: Path, record_names: list[str]) -> str:
    """Deletion and insertion scores of each explanation method; random order is the baseline."""
    rows = []
    for name in record_names:
        said = read_results_file(results_folder / f"{name}.json")
        for row in said["rows"]:
            alike = row.get("alike_with_shuffled_weights")
            rows.append(
                [
                    f"`{said['recipe']}`, {said['images']} images",
                    row["method"],
                    f"{row['insertion'] - row['deletion']:+.3f}",
                    f"{row['deletion']:.3f} ± {row['deletion_error']:.3f}",
                    f"{row['insertion']:.3f} ± {row['insertion_error']:.3f}",
                    "–" if alike is None else f"{alike:+.2f}",
                ]
            )
    error = "± standard error over images"
    head = ["run", "method", "insertion − deletion", f"deletion (lower is better, {error})"]
    head.append(f"insertion (higher is better, {error})")
    return format_markdown_table([*head, "rank correlation with shuffled weights"], rows)


def format_attention_map_cost(results_folder: Path, record_names: list[str]) -> str:
    """The cost of all attention maps as a multiple of an unfused forward pass."""
    return "; ".join(
        str(read_results_file(results_folder / f"{name}.json")["times_a_written_out_forward"]) for name in record_names
    )


def format_pretrained_table(results_folder: Path, record_names: list[str]) -> str:
    """From scratch and from pretrained weights (`python -m benchmarks.pretrained`)."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in read_benchmark_rows(results_folder, record_names):
        groups.setdefault((row["data"], row["arm"]), []).append(row)
    lines = []
    for (data, arm), rows in groups.items():
        first = 100 * mean(row["first_epoch_train_accuracy"] for row in rows)
        times = [f"{mean(row[name] for row in rows):.0f}" for name in ("seconds", "cold_seconds")]
        grid, gflops = "×".join(map(str, rows[0]["grid"])), f"{rows[0]['flops'] / 1e9:.2f}"
        score = f"**{_format_column_mean(rows, 'accuracy')}**"
        lines.append([data, arm, grid, gflops, str(rows[0]["epochs"]), str(len(rows)), f"{first:.0f} %", score, *times])
    head = ["data", "start", "grid", "GFLOPs per image", "epochs", "seeds", "training accuracy, first epoch"]
    explained = describe_mean_format(map(len, groups.values()))
    return format_markdown_table([*head, f"accuracy ({explained})", "seconds", "cold"], lines)


def format_small_data_table(results_folder: Path, record_names: list[str]) -> str:
    """The effect of each change (`python -m benchmarks.small_data`) against the first arm of the record."""
    lines, counts = [], []
    for name in record_names:
        for arm in compare_arms(read_benchmark_rows(results_folder, [name])):
            worth = format_difference(arm.differences, arm.ci_half_width, 100) or "–"
            size, seeds, score = arm.rows[0]["parameters"], len(arm.rows), _format_column_mean(arm.rows, "accuracy")
            counts.append(seeds)
            lines.append(
                [arm.name, abbreviate_count(size), str(seeds), score, arm.baseline_name or "–", worth, arm.verdict]
            )
    head = ["model", "parameters", "seeds", f"accuracy ({describe_mean_format(counts)})", "compared with"]
    return format_markdown_table(
        [*head, "difference in points, seed by seed (± its 95 % confidence interval)", "verdict"], lines
    )


def format_speedrun_table(results_folder: Path, record_names: list[str]) -> str:
    """The effect of each part of a fast recipe (`python -m benchmarks.speedrun`) on accuracy and seconds, seed by seed,
    with confidence intervals from the noise pooled over all arms."""
    rows, lines = read_benchmark_rows(results_folder, record_names), []
    parts = [
        (key, estimate_residual_noise(rows, key), factor)
        for key, factor in (("accuracy", 100.0), ("steady_seconds", 1.0))
    ]
    for arm in compare_arms(rows):
        known = {row["seed"]: row for row in rows if row["arm"] == arm.baseline_name}
        pairs = [(row, known[row["seed"]]) for row in arm.rows if row["seed"] in known]
        points, more = (
            _format_pooled_difference([row[key] - other[key] for row, other in pairs], noise, factor) if pairs else "–"
            for key, noise, factor in parts
        )
        score, seconds = f"{100 * arm.mean_accuracy:.2f} %", f"{mean(row['steady_seconds'] for row in arm.rows):.1f}"
        lines.append([arm.name, str(len(arm.rows)), score, seconds, arm.baseline_name or "–", points, more])
    head = ["change", "seeds", "mean accuracy", "seconds", "compared with"]
    pooled = "± 95 % confidence interval from the noise of all rows"
    return format_markdown_table([*head, f"difference in points ({pooled})", "difference in seconds (same)"], lines)


def format_tuning_table(results_folder: Path, record_names: list[str]) -> str:
    """Runs of different length and size (`python -m benchmarks.speedrun --called`)."""
    lines = []
    for arm in compare_arms(read_benchmark_rows(results_folder, record_names)):
        row, seconds = arm.rows[0], mean(row["steady_seconds"] for row in arm.rows)
        score, learnt = f"{100 * arm.mean_accuracy:.2f} %", f"{mean(row['train_accuracy'] for row in arm.rows):.1%}"
        seen, speed = abbreviate_count(row["images_seen"]), f"{mean(row['images_per_second'] for row in arm.rows):,.0f}"
        lines.append([arm.name, str(row["tokens"]), seen, speed, f"{seconds:.1f}", str(len(arm.rows)), learnt, score])
    head = ["run", "tokens", "images seen", "images/s", "seconds", "seeds"]
    return format_markdown_table([*head, "training accuracy", "mean held-out accuracy"], lines)


def _format_pooled_difference(differences: list[float], noise: ResidualNoise | None, scale: float) -> str:
    error = f" ± {scale * noise.compute_ci_half_width(len(differences)):.2f}" if noise and len(differences) > 1 else ""
    return f"{scale * mean(differences):+.2f}{error}"


def format_batched_runs_table(results_folder: Path, record_names: list[str]) -> str:
    """Many small models trained in one batch (`python -m benchmarks.together`)."""
    lines = []
    for row in read_benchmark_rows(results_folder, record_names):
        speed, step = f"{row['images_per_second']:,}", f"{row['milliseconds_a_step']:.2f}"
        compiled = "yes" if row["compiled"] else "no"
        lines.append([str(row["models"]), compiled, speed, step, f"{row['tflops']:.0f}", f"{row['cold_seconds']:.0f}"])
    return format_markdown_table(
        ["models in one batch", "compiled", "images/s", "ms per step", "TFLOP/s", "first epoch (s)"], lines
    )


def format_token_reduction_table(results_folder: Path, record_names: list[str]) -> str:
    """Token merging and dropping at inference (`python -m benchmarks.fewer_tokens`)."""
    rows = read_benchmark_rows(results_folder, record_names)
    judged = ["same_answers"] + (["accuracy"] if all("accuracy" in row for row in rows) else [])
    lines = [
        [
            row["way"].replace("_", " "),
            str(row["per_block"]),
            str(row["tokens_at_the_end"]),
            f"{row['gflops']:.2f}",
            f"×{row['times_as_fast']:.2f}",
            *(f"{row[name]:.1%}" for name in judged),
        ]
        for row in rows
    ]
    head = ["method", "tokens removed per block", "tokens at the end", "GFLOPs", "speed"]
    head += ["same predictions", "accuracy"][: len(judged)]
    return format_markdown_table(head, lines)


def format_image_size_table(results_folder: Path, record_names: list[str]) -> str:
    """What models do with an image of another size than their own (`python -m benchmarks.odd_size`)."""
    lines = []
    for row in read_benchmark_rows(results_folder, record_names):
        grid = "–" if row["grid"] is None else "×".join(map(str, row["grid"]))
        seen = f"{row['pixels_seen']:.1%}" if "pixels_seen" in row else "–"
        lines.append(
            [row["who"], f"{row['image']}×{row['image']}", row["answer"], grid, seen, str(row.get("gflops", "–"))]
        )
    return format_markdown_table(
        ["model", "image size", "result", "grid", "pixels that affect the result", "GFLOPs"], lines
    )


def _format_speed(benchmark_row: dict[str, Any]) -> str:
    if "broken" in benchmark_row:
        return benchmark_row["broken"]
    if benchmark_row["task"] == "latency":
        return f"{benchmark_row['milliseconds']:.2f} ms (p99 {benchmark_row['p99_milliseconds']:.2f})"
    return f"{benchmark_row['images_per_second']:,.0f}"


def _format_relative_speed(benchmark_row: dict[str, Any]) -> str:
    if "broken" in benchmark_row:
        return benchmark_row["broken"]
    speed = (
        f"{benchmark_row['milliseconds']:.1f} ms"
        if benchmark_row["task"] == "latency"
        else f"{benchmark_row['images_per_second']:,.0f}"
    )
    return f"{speed} (×{benchmark_row['times_fastest_peer']:.2f})"


def format_target_accuracy_table(results_folder: Path, record_names: list[str]) -> str:
    """When a sheet's target accuracy was reached (`python -m benchmarks.first_runs`, one seed each)."""
    rows = []
    for name in record_names:
        machine = read_results_file(results_folder / f"{name}.json")["machine"]
        for row in read_benchmark_rows(results_folder, [name]):
            passed, device = row.get("bar_passed_after_seconds"), row["hardware"]["device"]
            compiled = "compiled" if row["hardware"]["compiled"] else "not compiled"
            overhead = "–" if device == "cpu" else f"{row['overhead']:.1%}"  # on a shared CPU it is noise
            rows.append(
                [
                    f"`{row['recipe']}`",
                    f"{get_machine_name(machine, device)}, {compiled}",
                    abbreviate_count(row["images_seen"]),
                    f"{row['bar']:.2%}",
                    "not reached" if passed is None else f"{passed:.1f}",
                    f"{row['test_accuracy']:.2%}",
                    f"{row['images_per_second']:,.0f}",
                    overhead,
                    name,
                ]
            )
    head = ["recipe", "machine", "images seen", "target", "seconds to target", "final test accuracy", "images/s"]
    return format_markdown_table([*head, "overhead of the training loop", "record"], rows)


def format_pretraining_table(results_folder: Path, record_names: list[str]) -> str:
    """Accuracy by the fraction of the labels and the initial weights (`python -m benchmarks.pretraining`)."""
    rows = [row for row in read_benchmark_rows(results_folder, record_names) if row["kind"] == "fine-tuned"]
    shares = sorted({row["labels"] for row in rows})
    lines, counts = [], []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = {share: [row for row in rows if (row["arm"], row["labels"]) == (arm, share)] for share in shares}
        counts += [len(found) for found in own.values() if found]
        lines.append([arm, *(_format_mean_and_seeds(own[share]) for share in shares)])
    return format_markdown_table(
        [f"accuracy ({describe_mean_format(counts)})", *(f"{share:.0%} of the labels" for share in shares)], lines
    )


def format_feature_probe_table(results_folder: Path, record_names: list[str]) -> str:
    """Accuracy of frozen features by k-nearest neighbours and by a linear probe."""
    rows = [row for row in read_benchmark_rows(results_folder, record_names) if row["kind"] == "features"]
    lines, counts = [], []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        counts.append(len(own))
        seconds = f"{mean(row['seconds'] for row in own):.0f}"
        lines.append(
            [
                arm,
                str(own[0]["epochs"]),
                str(len(own)),
                _format_column_mean(own, "knn"),
                _format_column_mean(own, "linear"),
                seconds,
            ]
        )
    head = [
        "features",
        "epochs",
        "seeds",
        f"k-nearest neighbours ({describe_mean_format(counts)})",
        "linear probe (same)",
    ]
    return format_markdown_table([*head, "seconds (with compilation)"], lines)


def _format_column_mean(rows: list[dict[str, Any]], column: str) -> str:
    return format_mean([row[column] for row in rows])


def _format_mean_and_seeds(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "–"
    seeds = f" ({len(rows)} seeds)" if len(rows) >= MIN_SEEDS_FOR_INTERVAL else ""
    return _format_column_mean(rows, "accuracy") + seeds
