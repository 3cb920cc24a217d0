"""Describe this machine: versions, devices, precision and missing packages."""

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import vitascope
from vitascope.run.format_probe import bf16_speedup

NEEDED = (
    *("torch", "torchvision", "timm", "einops", "jaxtyping", "omegaconf", "typer", "rich", "safetensors"),
    *("huggingface_hub", "matplotlib", "scikit-learn", "scipy", "tensorboard"),
)


def versions() -> dict[str, str | None]:
    """Return the version of every required package; None if it is missing."""
    return {"vitascope": vitascope.__version__, "python": platform.python_version()} | {
        name: _version(name) for name in NEEDED
    }


def missing() -> list[str]:
    return [name for name, version in versions().items() if version is None]


def device_names() -> dict[str, str]:
    """Return the devices that torch can use, best first: cuda, mps, cpu."""
    import torch

    found = {}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_device_name()
    if torch.backends.mps.is_available():
        found["mps"] = f"{processor()} GPU"
    return found | {"cpu": f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"}


def machine_name(machine: dict[str, str], device: str) -> str:
    """Return the name of the device: a GPU's name, or the CPU's with its cores."""
    return re.sub(r", \d+ threads$", "", machine.get(device) or machine["cpu"])


def made_on(facts: dict[str, Any]) -> str:
    """Return the device name from a run's machine.json."""
    return machine_name(facts["machine"], facts["hardware"]["device"])


def processor() -> str:
    """Return the name of the CPU."""
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    if sys.platform == "darwin":
        told = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        return told.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def precisions() -> dict[str, str]:
    """Return the speed of each number format on the best device."""
    import torch

    if torch.cuda.is_available():
        fast = torch.cuda.get_device_capability() >= (8, 0)
        return {"bfloat16": "fast (tensor cores)" if fast else "slow: use float16", "float16": "fast with loss scaling"}
    faster = bf16_speedup()
    words = f"{faster:.1f}" if faster > 0.95 else f"slow: {faster:.2g}"
    return {"bfloat16": f"{words} times the speed of float32" if faster else "not supported by this CPU"}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def record_of_machine(commit: str | None = None) -> dict[str, Any]:
    """Return machine, versions, commit (given or from Git) and date for a record."""
    return {
        "machine": device_names() | {"system": f"{platform.system()} {platform.machine()}"},
        "versions": versions(),
        "commit": commit or current_commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def current_commit() -> str | None:
    """Return the commit of the source, with '+changes' if files were modified; None without Git."""
    try:
        _git(
            "ls-files", "--error-unmatch", Path(__file__).name
        )  # fails if the package is installed inside another repository
        commit = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changes else "")


def _git(*words: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
