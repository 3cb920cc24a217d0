"""Describe this machine and measure it: versions, devices, missing packages, speed of number formats, wall-clock time.

Some virtual machines list CPU instructions and then stop a program that uses them, so the caller must not try them.
Wall-clock seconds count from the operating system's start of this process, for the first run it works on.
"""

import os
import platform
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NotRequired, TypedDict

import vitascope
from vitascope.errors import format_count

if TYPE_CHECKING:
    from vitascope.run.directory import Run

TIMEOUT_SECONDS = 60
NUM_ROUNDS = 12
NumberFormat = Literal["int8", "bfloat16"]
ProbeTask = Literal["train", "inference"]
MAX_SLOWDOWN = 3  # times slower than float32: stop after two rounds
REQUIRED_PACKAGES = (
    *("torch", "torchvision", "timm", "einops", "jaxtyping", "omegaconf", "typer", "rich", "safetensors"),
    *("huggingface_hub", "matplotlib", "scikit-learn", "scipy", "tensorboard"),
)
DeviceType = Literal["cuda", "mps", "cpu"]


class MachineInfo(TypedDict):
    """The machine, versions and commit behind a result."""

    machine: dict[str, str]  # device type -> name; system
    versions: dict[str, str | None]
    commit: str | None
    date: str


class RunMachineInfo(MachineInfo):
    """The content of a run's machine.json."""

    hardware: dict[str, Any]  # device, precision, compiled, captured, …
    data_hash: str
    whole_data_hash: NotRequired[str | None]
    training_images: NotRequired[int]
    validation_images: NotRequired[int]
    resumed: NotRequired[list[MachineInfo]]
    wall_seconds: NotRequired[float]


def get_package_versions() -> dict[str, str | None]:
    """Return the version of every required package; None if it is missing."""
    return {"vitascope": vitascope.__version__, "python": platform.python_version()} | {
        name: _find_package_version(name) for name in REQUIRED_PACKAGES
    }


def list_missing_packages() -> list[str]:
    return [name for name, version in get_package_versions().items() if version is None]


def get_device_names_by_type() -> dict[str, str]:
    """Return the devices that torch can use, best first: cuda, mps, cpu."""
    import torch

    names = {}
    if torch.cuda.is_available():
        names["cuda"] = torch.cuda.get_device_name()
    if torch.backends.mps.is_available():
        names["mps"] = f"{get_cpu_name()} GPU"
    cores, threads = format_count(os.cpu_count() or 1, "core"), format_count(torch.get_num_threads(), "thread")
    return names | {"cpu": f"{get_cpu_name()}, {cores}, {threads}"}


def get_device_or_cpu_name(names_by_device: dict[str, str], device: str) -> str:
    """Return the name of the device: a GPU's name, or the CPU's with its cores."""
    return re.sub(r", \d+ threads?$", "", names_by_device.get(device) or names_by_device["cpu"])


def get_run_device_name(machine_info: RunMachineInfo) -> str:
    """Return the device name from a run's machine.json."""
    return get_device_or_cpu_name(machine_info["machine"], machine_info["hardware"]["device"])


def get_cpu_name() -> str:
    """Return the name of the CPU."""
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        return process.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def measure_and_describe_precision_speeds() -> dict[str, str]:
    """Return the speed of each number format on the best device."""
    import torch

    if torch.cuda.is_available():
        fast = torch.cuda.get_device_capability() >= (8, 0)
        return {"bfloat16": "fast (tensor cores)" if fast else "slow: use float16", "float16": "fast with loss scaling"}
    speedup = measure_median_bf16_speedup()
    text = f"{speedup:.1f}" if speedup > 0.95 else f"slow: {speedup:.2g}"
    return {"bfloat16": f"{text} times the speed of float32" if speedup else "not supported by this CPU"}


def _find_package_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def collect_machine_info(commit: str | None = None) -> MachineInfo:
    """Return machine, versions, commit (given or from Git) and date for a record."""
    return {
        "machine": get_device_names_by_type() | {"system": f"{platform.system()} {platform.machine()}"},
        "versions": get_package_versions(),
        "commit": commit or find_commit_and_mark_changes(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def find_commit_and_mark_changes() -> str | None:
    """Return the commit of the source, with '+changes' if files were modified; None without Git."""
    try:
        # This fails if the package is installed inside another repository.
        _run_git("ls-files", "--error-unmatch", Path(__file__).name)
        commit = _run_git("rev-parse", "HEAD")
        changes = _run_git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changes else "")


def _run_git(*args: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@cache
def measure_bf16_training_speedup() -> float:
    """Return the speed-up of bfloat16 in training; 0 if it does not work."""
    return _measure_speedup_in_subprocess("bfloat16", "train")


def measure_median_bf16_speedup(num_runs: int = 3) -> float:
    """Return the median speed-up of several runs, because a single run on a busy machine can be far off."""
    return median(_measure_speedup_in_subprocess("bfloat16", "train") for _ in range(num_runs))


@cache
def measure_inference_speedup(number_format: NumberFormat, embed_dim: int, num_threads: int) -> float:
    """Return the speed-up of int8 or bfloat16 at inference for this width; 0 if it does not work."""
    return _measure_speedup_in_subprocess(number_format, "inference", str(embed_dim), str(num_threads))


def _measure_speedup_in_subprocess(*args: str) -> float:
    """Run this file with these arguments and return the speed-up that it prints; 0 if it fails."""
    try:
        process = subprocess.run(
            [sys.executable, __file__, *args], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
        )
        return float(process.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0.0


def _measure_linear_layer_speedup(
    number_format: NumberFormat, task: ProbeTask, embed_dim: int = 256, num_threads: int = 0
) -> float:
    """Time a linear layer in float32 and in the other format; return the median ratio of the times."""
    import torch

    if num_threads:
        torch.set_num_threads(num_threads)
    float32_layer, tokens = torch.nn.Linear(embed_dim, 4 * embed_dim), torch.randn(2048, embed_dim)
    if task == "train":
        bf16_layer, bf16_tokens = torch.nn.Linear(embed_dim, 4 * embed_dim).bfloat16(), tokens.bfloat16()
        steps = [lambda: float32_layer(tokens).sum().backward(), lambda: bf16_layer(bf16_tokens).sum().backward()]
    elif number_format == "int8":
        from vitascope.model.precision import Int8Linear

        int8_layer = Int8Linear(float32_layer)
        steps = [lambda: float32_layer(tokens), lambda: int8_layer(tokens)]
    else:
        bf16_layer = torch.nn.Linear(embed_dim, 4 * embed_dim).bfloat16()
        steps = [lambda: float32_layer(tokens), lambda: bf16_layer(tokens.bfloat16()).float()]
    times: list[list[float]] = [[], []]
    with torch.set_grad_enabled(task == "train"):
        for round_index in range(NUM_ROUNDS):
            if round_index > 1 and min(times[1]) > MAX_SLOWDOWN * min(times[0]):
                break
            for run_step, step_times in zip(steps, times, strict=True):  # alternate, so that both have the same noise
                start = time.perf_counter()
                run_step()
                step_times.append(time.perf_counter() - start)
    # The median of paired rounds: a disturbance affects both steps of a round.
    return median(float32 / other for float32, other in zip(*times, strict=True))


Task = Literal["train", "evaluate"]
TRAIN, EVALUATE = "train", "evaluate"
CLOCK_TOLERANCE_SECONDS = 0.05  # seconds by which the operating system's clocks may disagree
_import_time = time.monotonic()


class StartedTask(NamedTuple):
    task: Task
    run_path: Path


_started_tasks: list[StartedTask] = []  # in the order in which this process began them


def record_task_start_in_this_process(task: Task, run: "Run") -> None:
    """Record that this process works on a run. Call it before `measure_process_wall_seconds_if_alone`."""
    _started_tasks.append(StartedTask(task, run.path.resolve()))


def measure_process_wall_seconds_if_alone(run: "Run") -> float | None:
    """Return the seconds since the process started; None if they include other work than this run's.

    Other work is another run, the same task twice, or an interactive session."""
    tasks = [task for task, path in _started_tasks if path == run.path.resolve()]
    is_alone = len(tasks) == len(_started_tasks) and tasks in ([TRAIN], [EVALUATE], [TRAIN, EVALUATE])
    return measure_seconds_since_process_start() if is_alone and not hasattr(sys, "ps1") else None


def is_trained_by_this_process(run: "Run") -> bool:
    """Return whether this process trained the run, so that its wall-clock seconds include the training."""
    return StartedTask(TRAIN, run.path.resolve()) in _started_tasks


def measure_seconds_since_process_start() -> float | None:
    """Return the seconds since this process started; None if the operating system does not report its start."""
    seconds = _try_to_read_linux_process_seconds() if sys.platform == "linux" else None
    seconds = _try_to_read_psutil_process_seconds() if seconds is None else seconds
    is_possible = seconds is not None and seconds >= time.monotonic() - _import_time - CLOCK_TOLERANCE_SECONDS
    return seconds if is_possible else None


def _try_to_read_linux_process_seconds() -> float | None:
    """Read /proc/self/stat: field 22 is the start in clock ticks since boot. Field 2, in brackets, may have spaces."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _try_to_read_psutil_process_seconds() -> float | None:
    """Use psutil, which is optional."""
    try:
        return time.time() - import_module("psutil").Process().create_time()
    except (ImportError, OSError):
        return None


if __name__ == "__main__":
    number_format, task, *sizes = sys.argv[1:]
    print(_measure_linear_layer_speedup(number_format, task, *map(int, sizes)))  # pyright: ignore[reportArgumentType]
