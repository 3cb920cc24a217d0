"""Describe this machine: versions, devices, precision and missing packages."""

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import vitascope
from vitascope.errors import format_count
from vitascope.run.format_probe import measure_median_bf16_speedup

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
    resumed: NotRequired[list[MachineInfo]]
    wall_seconds: NotRequired[float]


def get_package_versions() -> dict[str, str | None]:
    """Return the version of every required package; None if it is missing."""
    return {"vitascope": vitascope.__version__, "python": platform.python_version()} | {
        name: _get_package_version(name) for name in REQUIRED_PACKAGES
    }


def list_missing_packages() -> list[str]:
    return [name for name, version in get_package_versions().items() if version is None]


def get_device_names() -> dict[str, str]:
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


def describe_precision_speeds() -> dict[str, str]:
    """Return the speed of each number format on the best device."""
    import torch

    if torch.cuda.is_available():
        fast = torch.cuda.get_device_capability() >= (8, 0)
        return {"bfloat16": "fast (tensor cores)" if fast else "slow: use float16", "float16": "fast with loss scaling"}
    speedup = measure_median_bf16_speedup()
    text = f"{speedup:.1f}" if speedup > 0.95 else f"slow: {speedup:.2g}"
    return {"bfloat16": f"{text} times the speed of float32" if speedup else "not supported by this CPU"}


def _get_package_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def collect_machine_info(commit: str | None = None) -> MachineInfo:
    """Return machine, versions, commit (given or from Git) and date for a record."""
    return {
        "machine": get_device_names() | {"system": f"{platform.system()} {platform.machine()}"},
        "versions": get_package_versions(),
        "commit": commit or get_current_commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def get_current_commit() -> str | None:
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
