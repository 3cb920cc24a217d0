"""This machine in words and numbers: versions, devices, precision, what is missing."""

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
    """Every package Vitascope needs, and its version; None where it is missing."""
    return {"vitascope": vitascope.__version__, "python": platform.python_version()} | {
        name: _version(name) for name in NEEDED
    }


def missing() -> list[str]:
    return [name for name, version in versions().items() if version is None]


def device_names() -> dict[str, str]:
    """The devices torch can use, best first: cuda, mps, cpu."""
    import torch

    found = {}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_device_name()
    if torch.backends.mps.is_available():
        found["mps"] = f"{processor()} GPU"
    return found | {"cpu": f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"}


def machine_name(machine: dict[str, str], device: str) -> str:
    """The device that computed: a GPU's name, or the CPU's with its cores (not its threads, which anyone may set)."""
    return re.sub(r", \d+ threads$", "", machine.get(device) or machine["cpu"])


def made_on(facts: dict[str, Any]) -> str:
    """The same of what a run wrote in machine.json."""
    return machine_name(facts["machine"], facts["hardware"]["device"])


def processor() -> str:
    """The CPU's name, as far as the system tells."""
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
    """What each number format means on the best device here."""
    import torch

    if torch.cuda.is_available():
        fast = torch.cuda.get_device_capability() >= (8, 0)
        return {"bfloat16": "fast (tensor cores)" if fast else "slow: use float16", "float16": "fast with loss scaling"}
    faster = bf16_speedup()
    words = f"{faster:.1f}" if faster > 0.95 else f"slow here, {faster:.2g}"
    return {"bfloat16": f"{words} times float32's speed" if faster else "does not work on this CPU"}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def record_of_machine(commit: str | None = None) -> dict[str, Any]:
    """What a record must say of where it came from: machine, versions, commit (given, or asked of git), date."""
    return {
        "machine": device_names() | {"system": f"{platform.system()} {platform.machine()}"},
        "versions": versions(),
        "commit": commit or current_commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def current_commit() -> str | None:
    """The source tree's commit, '+changes' where files differ from it; None where there is no git."""
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # installed inside somebody else's checkout: not ours
        commit = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changes else "")


def _git(*words: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
