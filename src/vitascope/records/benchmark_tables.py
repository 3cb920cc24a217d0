"""Markdown tables of benchmarks: speed, scaling, faithfulness of explanations, token reduction."""

from pathlib import Path

from vitascope.draw.html import Markdown, format_markdown_table
from vitascope.number_format import format_number, format_percent
from vitascope.records.record import (
    BenchmarkRow,
    format_thousands_or_millions,
    read_benchmark_rows,
    read_record_or_benchmark_file,
)
from vitascope.run.machine import get_device_or_cpu_name


def format_library_speed_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format `make bench`: one column per benchmark, in images per second or milliseconds and × the fastest eager
    implementation of another library."""
    cells: dict[str, dict[str, str]] = {}  # [implementation][benchmark]
    for row in read_benchmark_rows(results_folder, record_names):
        benchmark = f"{row['shape']} {row['task']}"
        cells.setdefault(row["who"], {})[benchmark] = _format_speed_and_ratio_or_failure(row)
    benchmarks = list(dict.fromkeys(benchmark for row in cells.values() for benchmark in row))
    rows = [[implementation, *(row.get(name, "–") for name in benchmarks)] for implementation, row in cells.items()]
    return format_markdown_table(["implementation", *benchmarks], rows)


def format_gpu_library_speed_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format benchmarks on a GPU, one row each: Vitascope and other libraries."""
    rows: dict[tuple[str, str, int], dict[str, BenchmarkRow]] = {}  # [shape, task, batch][implementation]
    for row in read_benchmark_rows(results_folder, record_names):
        name = ", ".join(part for part in row["who"].split(", ") if part not in ("bfloat16", "float32"))
        rows.setdefault((row["shape"], row["task"], row["batch"]), {})[name] = row
    peers = ["timm", "timm, compiled", "transformers", "torchvision", "vit-pytorch"]
    lines = []
    for (shape, task, batch), row_by_name in rows.items():
        vitascope_row = row_by_name["ours, compiled, whole step" if task == "train" else "ours, fast"]
        peer_speeds = [_format_speed_or_failure(row_by_name[peer]) if peer in row_by_name else "–" for peer in peers]
        speedups = [f"×{vitascope_row[name]:.2f}" for name in ("times_timm", "times_timm_compiled")]
        fraction = "–" if task == "latency" else format_percent(vitascope_row["share_of_matrix_rate"], 0)
        speed = f"**{_format_speed_or_failure(vitascope_row)}**"
        lines.append([f"{shape} {task}, batch {batch}", speed, *speedups, fraction, *peer_speeds])
    head = ["benchmark", "ours", "× timm", "× timm compiled"]
    return format_markdown_table([*head, "fraction of the matrix-multiply rate", *peers], lines)


def format_scaling_exponent_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format the exponents with which the time and the FLOPs of a training step grow with each size."""
    rows = []
    for name in record_names:
        results = read_record_or_benchmark_file(results_folder / f"{name}.json")
        machine = get_device_or_cpu_name(results["machine"], results["device"])
        for axis, exponents in results["exponents"].items():
            sizes = [row[axis] for row in results["rows"] if row["axis"] == axis]
            size_range = f"{min(sizes)} – {max(sizes)}"
            rows.append([machine, axis, size_range, f"{exponents['milliseconds']}", f"{exponents['flops']}"])
    return format_markdown_table(["machine", "size", "range", "exponent of the time", "exponent of the FLOPs"], rows)


def format_explanation_faithfulness_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format deletion and insertion scores of each explanation method; random order is the baseline."""
    from vitascope.explain.methods import get_method_label  # imports torch

    rows = []
    for name in record_names:
        results = read_record_or_benchmark_file(results_folder / f"{name}.json")
        for row in results["rows"]:
            rank_correlation = row.get("alike_with_shuffled_weights")
            rows.append(
                [
                    f"`{results['recipe']}`, {results['images']} images",
                    get_method_label(row["method"]),
                    format_number(row["insertion"] - row["deletion"], "+z.3f"),
                    f"{row['deletion']:.3f} ± {row['deletion_error']:.3f}",
                    f"{row['insertion']:.3f} ± {row['insertion_error']:.3f}",
                    "–" if rank_correlation is None else format_number(rank_correlation, "+z.2f"),
                ]
            )
    error = "± standard error over images"
    head = ["run", "method", "insertion − deletion", f"deletion (lower is better, {error})"]
    head.append(f"insertion (higher is better, {error})")
    return format_markdown_table([*head, "rank correlation with shuffled weights"], rows)


def format_attention_map_cost_factors(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format the cost of all attention maps as a multiple of an unfused forward pass."""
    return "; ".join(
        str(read_record_or_benchmark_file(results_folder / f"{name}.json")["times_a_written_out_forward"])
        for name in record_names
    )


def format_batched_training_speed_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format the speed of many small models trained in one batch (`python -m benchmarks.together`)."""
    lines = []
    for row in read_benchmark_rows(results_folder, record_names):
        speed, step = f"{row['images_per_second']:,}", f"{row['milliseconds_a_step']:.2f}"
        compiled = "yes" if row["compiled"] else "no"
        lines.append([str(row["models"]), compiled, speed, step, f"{row['tflops']:.0f}", f"{row['cold_seconds']:.0f}"])
    return format_markdown_table(
        ["models in one batch", "compiled", "images/s", "ms per step", "TFLOP/s", "first epoch (s)"], lines
    )


def format_token_merging_and_dropping_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format token merging and dropping at inference (`python -m benchmarks.fewer_tokens`)."""
    rows = read_benchmark_rows(results_folder, record_names)
    quality_columns = ["same_answers"] + (["accuracy"] if all("accuracy" in row for row in rows) else [])
    lines = [
        [
            row["way"].replace("_", " "),
            str(row["per_block"]),
            str(row["tokens_at_the_end"]),
            f"{row['gflops']:.2f}",
            f"×{row['times_as_fast']:.2f}",
            *(format_percent(row[name]) for name in quality_columns),
        ]
        for row in rows
    ]
    head = ["method", "tokens removed per block", "tokens at the end", "GFLOPs", "speed"]
    head += ["same predictions", "accuracy"][: len(quality_columns)]
    return format_markdown_table(head, lines)


def format_result_at_other_image_sizes_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format what models do with an image of another size than their own (`python -m benchmarks.odd_size`)."""
    lines = []
    for row in read_benchmark_rows(results_folder, record_names):
        grid = "–" if row["grid"] is None else "×".join(map(str, row["grid"]))
        pixels = format_percent(row["pixels_seen"]) if "pixels_seen" in row else "–"
        size, gflops = f"{row['image']}×{row['image']}", str(row.get("gflops", "–"))
        lines.append([row["who"], size, row["answer"], grid, pixels, gflops])
    return format_markdown_table(
        ["model", "image size", "result", "grid", "pixels that affect the result", "GFLOPs"], lines
    )


def format_fault_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format what happens after each kind of fault (`python -m benchmarks.faults`)."""
    counted = ("tries", "recovered", "refused", "completed", "lost")
    lines = []
    for row in read_benchmark_rows(results_folder, record_names):
        failures = sum(row[name] for name in ("tracebacks", "hangs", "wrong_exit_codes"))
        numbers = (
            ["skipped"] + ["–"] * 5 if row["skipped"] else [*(f"{row[name]:,}" for name in counted), f"{failures:,}"]
        )
        lines.append([row["fault"], numbers[0], row["skipped"] or row["result"], *numbers[1:]])
    head = ["fault", "tries", "what happens", "recovered", "refused", "completed", "**lost**"]
    return format_markdown_table([*head, "traceback, hang or wrong exit code"], lines)


def _format_speed_or_failure(benchmark_row: BenchmarkRow) -> str:
    if "broken" in benchmark_row:
        return benchmark_row["broken"]
    if benchmark_row["task"] == "latency":
        return f"{benchmark_row['milliseconds']:.2f} ms (p99 {benchmark_row['p99_milliseconds']:.2f})"
    return f"{benchmark_row['images_per_second']:,.0f}"


def _format_speed_and_ratio_or_failure(benchmark_row: BenchmarkRow) -> str:
    if "broken" in benchmark_row:
        return benchmark_row["broken"]
    speed = (
        f"{benchmark_row['milliseconds']:.1f} ms"
        if benchmark_row["task"] == "latency"
        else f"{benchmark_row['images_per_second']:,.0f}"
    )
    return f"{speed} (×{benchmark_row['times_fastest_peer']:.2f})"


def format_seconds_to_target_accuracy_table(results_folder: Path, record_names: list[str]) -> Markdown:
    """Format when a sheet's target accuracy was reached (`python -m benchmarks.first_runs`, one seed each)."""
    rows = []
    for name in record_names:
        machine = read_record_or_benchmark_file(results_folder / f"{name}.json")["machine"]
        for row in read_benchmark_rows(results_folder, [name]):
            seconds, device = row.get("bar_passed_after_seconds"), row["hardware"]["device"]
            compiled = "compiled" if row["hardware"]["compiled"] else "not compiled"
            overhead = "–" if device == "cpu" else format_percent(row["overhead"])  # on a shared CPU it is noise
            rows.append(
                [
                    f"`{row['recipe']}`",
                    f"{get_device_or_cpu_name(machine, device)}, {compiled}",
                    format_thousands_or_millions(row["images_seen"]),
                    format_percent(row["bar"], 2),
                    "not reached" if seconds is None else f"{seconds:.1f}",
                    format_percent(row["test_accuracy"], 2),
                    f"{row['images_per_second']:,.0f}",
                    overhead,
                    name,
                ]
            )
    head = ["recipe", "machine", "images seen", "target", "seconds to target", "final test accuracy", "images/s"]
    return format_markdown_table([*head, "overhead of the training loop", "record"], rows)
