"""Records of benchmarks -> Markdown tables."""

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from vitascope.records.arms import Noise, arms_of, noise_of
from vitascope.records.reading import markdown, millions, read_file, rows_of
from vitascope.run.machine import machine_name


def bench(folder: Path, names: list[str]) -> str:
    """`make bench`'s races, a column each: images a second (a single image: milliseconds), × the fastest eager peer."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows_of(folder, names):
        race = f"{row['shape']} {row['task']}"
        cells.setdefault(row["who"], {})[race] = _speed(row)
    races = list(dict.fromkeys(race for row in cells.values() for race in row))
    return markdown(["", *races], [[who, *(row.get(race, "–") for race in races)] for who, row in cells.items()])


def races(folder: Path, names: list[str]) -> str:
    """A GPU's races, a row each: what `vitascope` itself runs, beside the peers."""
    rows: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in rows_of(folder, names):
        who = ", ".join(word for word in row["who"].split(", ") if word not in ("bfloat16", "float32"))
        rows.setdefault((row["shape"], row["task"], row["batch"]), {})[who] = row
    peers = ["timm", "timm, compiled", "transformers", "torchvision", "vit-pytorch"]
    lines = []
    for (shape, task, batch), found in rows.items():
        ours = found["ours, compiled, whole step" if task == "train" else "ours, fast"]
        beside = [_bare_speed(found[peer]) if peer in found else "–" for peer in peers]
        ahead = [f"×{ours[name]:.2f}" for name in ("times_timm", "times_timm_compiled")]
        share = "–" if task == "latency" else f"{ours['share_of_matrix_rate']:.0%}"
        lines.append([f"{shape} {task}, batch {batch}", f"**{_bare_speed(ours)}**", *ahead, share, *beside])
    return markdown(["race", "ours", "× timm", "× timm compiled", "of the matrix rate", *peers], lines)


def growth(folder: Path, names: list[str]) -> str:
    """With which power of each size the time of a training step grows, beside its FLOPs."""
    rows = []
    for name in names:
        said = read_file(folder / f"{name}.json")
        for axis, told in said["exponents"].items():
            sizes = [row[axis] for row in said["rows"] if row["axis"] == axis]
            machine = machine_name(said["machine"], said["device"])
            rows.append([machine, axis, f"{min(sizes)} – {max(sizes)}", f"{told['milliseconds']}", f"{told['flops']}"])
    return markdown(["on", "size", "from – to", "time ~ size^", "FLOPs ~ size^"], rows)


def faithfulness(folder: Path, names: list[str]) -> str:
    """How faithful each explanation is, by deletion and insertion; random order is what it must beat."""
    rows = []
    for name in names:
        said = read_file(folder / f"{name}.json")
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
    head = ["run", "method", "insertion − deletion", "deletion (low is good)", "insertion (high is good)"]
    return markdown([*head, "alike with shuffled weights"], rows)


def cost(folder: Path, names: list[str]) -> str:
    """How many times a written-out forward pass all maps cost."""
    return "; ".join(str(read_file(folder / f"{name}.json")["times_a_written_out_forward"]) for name in names)


def pretrained(folder: Path, names: list[str]) -> str:
    """From scratch against pretrained weights (`python -m benchmarks.pretrained`), the mean over seeds."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows_of(folder, names):
        groups.setdefault((row["data"], row["arm"]), []).append(row)
    lines = []
    for (data, arm), rows in groups.items():
        scores = [100 * row["accuracy"] for row in rows]
        spread = f" ± {stdev(scores):.2f}" if len(scores) > 1 else ""
        first = 100 * mean(row["first_epoch_train_accuracy"] for row in rows)
        times = [f"{mean(row[name] for row in rows):.0f}" for name in ("seconds", "cold_seconds")]
        grid, gflops = "×".join(map(str, rows[0]["grid"])), f"{rows[0]['flops'] / 1e9:.2f}"
        score = f"**{mean(scores):.2f}{spread} %**"
        lines.append([data, arm, grid, gflops, str(rows[0]["epochs"]), str(len(rows)), f"{first:.0f} %", score, *times])
    head = ["data", "start", "grid", "GFLOPs an image", "epochs", "seeds", "right in the first epoch", "accuracy"]
    return markdown([*head, "seconds", "cold"], lines)


def small_data(folder: Path, names: list[str]) -> str:
    """What each change was worth (`python -m benchmarks.small_data`), every record's first arm is its plain one."""
    lines = []
    for name in names:
        for arm in arms_of(rows_of(folder, [name])):
            row, spread = arm.rows[0], "" if arm.spread is None else f" ± {100 * arm.spread:.2f}"
            worth = "–" if arm.gain is None else f"{100 * arm.gain:+.2f}"
            worth += "" if arm.half is None else f" ± {100 * arm.half:.2f}"
            score = f"{100 * arm.accuracy:.2f}{spread} %"
            lines.append(
                [arm.name, millions(row["parameters"]), str(len(arm.rows)), score, arm.base or "–", worth, arm.verdict]
            )
    return markdown(["model", "parameters", "seeds", "accuracy", "against", "points", ""], lines)


def speedrun(folder: Path, names: list[str]) -> str:
    """What each part of a fast recipe is worth (`python -m benchmarks.speedrun`): points and seconds against the recipe
    as it is, or the bundle it is added to, seed by seed, with their standard errors by the noise of all arms."""
    rows, lines = rows_of(folder, names), []
    parts = [(key, noise_of(rows, key), factor) for key, factor in (("accuracy", 100.0), ("steady_seconds", 1.0))]
    for arm in arms_of(rows):
        known = {row["seed"]: row for row in rows if row["arm"] == arm.base}
        pairs = [(row, known[row["seed"]]) for row in arm.rows if row["seed"] in known]
        points, more = (
            _mean_and_error([row[key] - other[key] for row, other in pairs], noise, factor) if pairs else "–"
            for key, noise, factor in parts
        )
        score, seconds = f"{100 * arm.accuracy:.2f} %", f"{mean(row['steady_seconds'] for row in arm.rows):.1f}"
        lines.append([arm.name, str(len(arm.rows)), score, seconds, arm.base or "–", points, more])
    return markdown(["change", "seeds", "accuracy", "seconds", "against", "points", "seconds more or less"], lines)


def tuning(folder: Path, names: list[str]) -> str:
    """Ways of different length and size side by side (`python -m benchmarks.speedrun --called`)."""
    lines = []
    for arm in arms_of(rows_of(folder, names)):
        row, seconds = arm.rows[0], mean(row["steady_seconds"] for row in arm.rows)
        score, learnt = f"{100 * arm.accuracy:.2f} %", f"{mean(row['train_accuracy'] for row in arm.rows):.1%}"
        seen, speed = millions(row["images_seen"]), f"{mean(row['images_per_second'] for row in arm.rows):,.0f}"
        lines.append([arm.name, str(row["tokens"]), seen, speed, f"{seconds:.1f}", str(len(arm.rows)), learnt, score])
    head = ["run", "tokens", "images seen", "images/s", "seconds", "seeds"]
    return markdown([*head, "right while learning", "accuracy, held back"], lines)


def _mean_and_error(values: list[float], noise: Noise | None, factor: float) -> str:
    error = f" ± {factor * noise.error(len(values)):.2f}" if noise and len(values) > 1 else ""
    return f"{factor * mean(values):+.2f}{error}"


def together(folder: Path, names: list[str]) -> str:
    """Many small models as one computation (`python -m benchmarks.together`)."""
    lines = []
    for row in rows_of(folder, names):
        speed, step = f"{row['images_per_second']:,}", f"{row['milliseconds_a_step']:.2f}"
        compiled = "yes" if row["compiled"] else "no"
        lines.append([str(row["models"]), compiled, speed, step, f"{row['tflops']:.0f}", f"{row['cold_seconds']:.0f}"])
    return markdown(["models", "compiled", "images/s", "ms a step of all", "TFLOP/s", "first epoch, s"], lines)


def fewer_tokens(folder: Path, names: list[str]) -> str:
    """Merging and dropping at inference (`python -m benchmarks.fewer_tokens`)."""
    rows = rows_of(folder, names)
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
    head = ["", "in each block", "tokens at the end", "GFLOPs", "speed", *(name.replace("_", " ") for name in judged)]
    return markdown(head, lines)


def odd_size(folder: Path, names: list[str]) -> str:
    """What models do with an image of another size than theirs (`python -m benchmarks.odd_size`)."""
    lines = []
    for row in rows_of(folder, names):
        grid = "–" if row["grid"] is None else "×".join(map(str, row["grid"]))
        seen = f"{row['pixels_seen']:.1%}" if "pixels_seen" in row else "–"
        lines.append(
            [row["who"], f"{row['image']}×{row['image']}", row["answer"], grid, seen, str(row.get("gflops", "–"))]
        )
    return markdown(["model", "image", "what comes", "grid", "pixels its answer depends on", "GFLOPs"], lines)


def _bare_speed(row: dict[str, Any]) -> str:
    if "broken" in row:
        return row["broken"]
    if row["task"] == "latency":
        return f"{row['milliseconds']:.2f} ms (p99 {row['p99_milliseconds']:.2f})"
    return f"{row['images_per_second']:,.0f}"


def _speed(row: dict[str, Any]) -> str:
    if "broken" in row:
        return row["broken"]
    speed = f"{row['milliseconds']:.1f} ms" if row["task"] == "latency" else f"{row['images_per_second']:,.0f}"
    return f"{speed} (×{row['times_fastest_peer']:.2f})"


def bars(folder: Path, names: list[str]) -> str:
    """When a sheet's bar was passed (`python -m benchmarks.first_runs`, one seed each)."""
    rows = []
    for name in names:
        machine = read_file(folder / f"{name}.json")["machine"]
        for row in rows_of(folder, [name]):
            passed, device = row.get("bar_passed_after_seconds"), row["hardware"]["device"]
            compiled = "compiled" if row["hardware"]["compiled"] else "not compiled"
            overhead = "–" if device == "cpu" else f"{row['overhead']:.1%}"  # on a shared CPU it is noise
            rows.append(
                [
                    f"`{row['recipe']}`",
                    f"{machine_name(machine, device)}, {compiled}",
                    millions(row["images_seen"]),
                    f"{row['bar']:.2%}",
                    "not passed" if passed is None else f"{passed:.1f}",
                    f"{row['test_accuracy']:.2%}",
                    f"{row['images_per_second']:,.0f}",
                    overhead,
                    name,
                ]
            )
    head = ["recipe", "on", "images seen", "bar", "passed after, s", "test accuracy at the end", "images/s"]
    return markdown([*head, "loop's overhead", "record"], rows)


def pretraining(folder: Path, names: list[str]) -> str:
    """Accuracy over the share of the labels, from each start (`python -m benchmarks.pretraining`)."""
    rows = [row for row in rows_of(folder, names) if row["kind"] == "fine-tuned"]
    shares = sorted({row["labels"] for row in rows})
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = {share: [row for row in rows if (row["arm"], row["labels"]) == (arm, share)] for share in shares}
        lines.append([arm, *(_mean_of(own[share], "accuracy") for share in shares)])
    return markdown(["", *(f"{share:.0%} of the labels" for share in shares)], lines)


def features(folder: Path, names: list[str]) -> str:
    """What frozen features are worth, by their neighbours and by a linear probe."""
    rows = [row for row in rows_of(folder, names) if row["kind"] == "features"]
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        seconds = f"{mean(row['seconds'] for row in own):.0f}"
        lines.append(
            [arm, str(own[0]["epochs"]), str(len(own)), _mean_of(own, "knn"), _mean_of(own, "linear"), seconds]
        )
    return markdown(
        ["features", "epochs", "seeds", "nearest neighbours", "linear probe", "seconds, with compiling"], lines
    )


def _mean_of(rows: list[dict[str, Any]], name: str) -> str:
    if not rows:
        return "–"
    values = [100 * row[name] for row in rows]
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f} %" if len(values) > 1 else " %")
