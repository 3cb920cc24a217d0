"""Look up which kernel is fastest for a shape: in this machine's own measurements, then in the table that ships.

`kernel_choices.json` beside this file is that table. `python -m benchmarks.kernel_table` measures it on a GPU.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from torch.torch_version import TorchVersion

from vitascope.data.places import cache_folder
from vitascope.errors import UserError
from vitascope.run.files import make_folder, read_json, write_json

SHIPPED = Path(__file__).with_name("kernel_choices.json")
Choices = dict[str, str]  # a key's text -> the fastest kernel's name
TEXT = re.compile(
    r"(?P<gpu>.+), torch (?P<torch_version>\S+): (?P<layer>.+), (?P<shape>\d+(?:×\d+)*), (?P<dtype>\S+), "
    r"(?P<task>training|inference), of (?P<kernels>\S*)"
)


@dataclass(frozen=True)
class KernelKey:
    """What a measurement depends on. Its text form is the key in JSON files."""

    gpu: str
    torch_version: str
    layer: str  # the module's class and the settings that change its kernels
    shape: tuple[int, ...]  # of the tokens
    dtype: str
    task: str  # training or inference
    kernels: tuple[str, ...]  # those that were compared: a new kernel needs a new measurement

    def __str__(self) -> str:
        machine, shape = f"{self.gpu}, torch {self.torch_version}", "×".join(map(str, self.shape))
        return f"{machine}: {self.layer}, {shape}, {self.dtype}, {self.task}, of {'/'.join(self.kernels)}"

    @classmethod
    def parse(cls, text: str) -> "KernelKey | None":
        """The key of a text form; None where the text is none."""
        match = TEXT.fullmatch(text)
        if match is None:
            return None
        shape = tuple(int(size) for size in match["shape"].split("×"))
        names = {name: match[name] for name in ("gpu", "torch_version", "layer", "dtype", "task")}
        return cls(**names, shape=shape, kernels=tuple(match["kernels"].split("/")))


def find_kernel(key: KernelKey) -> str | None:
    """The fastest kernel's name; None where nobody has measured this GPU and shape, or only other kernels."""
    own, shipped = read_own_choices(), read_choices(SHIPPED)
    found = (own.get(str(key)), shipped.get(str(key)), _find_for_other_torch(key, shipped))
    return next((name for name in found if name in key.kernels), None)


def _find_for_other_torch(key: KernelKey, choices: Choices) -> str | None:
    """From the newest torch version with which this GPU and shape were measured."""
    parsed = {known: name for text, name in choices.items() if (known := KernelKey.parse(text))}
    same = {TorchVersion(known.torch_version): name for known, name in parsed.items() if _is_same_work(known, key)}
    return same[max(same)] if same else None


def _is_same_work(one: KernelKey, other: KernelKey) -> bool:
    return replace(one, torch_version=other.torch_version) == other


def read_choices(path: Path) -> Choices:
    """Empty where the file is missing or torn."""
    return {key: name for key, name in read_json(path).items() if isinstance(name, str)}


def read_own_choices() -> Choices:
    """This machine's own measurements."""
    return read_choices(own_file())


def add_own_choice(key: KernelKey, kernel: str) -> None:
    """Remember a measurement for the next run; where the file cannot be written, it is made again."""
    try:
        make_folder(own_file().parent)
        write_json(own_file(), read_own_choices() | {str(key): kernel})
    except UserError:
        pass


def own_file() -> Path:
    return cache_folder() / "kernels.json"
