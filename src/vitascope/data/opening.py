"""DataConfig -> Source: by name, by folder, or by .npz file."""

from dataclasses import replace
from pathlib import Path

from vitascope.data.config import DataConfig
from vitascope.data.digits import digits
from vitascope.data.folder import folder
from vitascope.data.named import NAMED, named
from vitascope.data.npz import npz
from vitascope.data.places import data_root, first_existing
from vitascope.data.source import Source
from vitascope.errors import UserError, did_you_mean


def settled(config: DataConfig) -> DataConfig:
    """Resolve relative paths and the data root, so that the setting is valid in every working directory."""
    if config.name == "digits":
        return config
    if config.name in NAMED:
        return replace(config, root=str(data_root(config.root).resolve()))
    return replace(config, name=str(_place(config).resolve()))


def check_known(config: DataConfig) -> None:
    """Raise an error if no data set has this name. The data itself is not read."""
    if config.name != "digits" and config.name not in NAMED and not _place(config).exists():
        known = ["digits", *NAMED]
        raise UserError(f"There is no data set '{config.name}'. {did_you_mean(config.name, known)} A path works too.")


def open_source(config: DataConfig, size: tuple[int, int], channels: int, *, to_train: bool = True) -> Source:
    """Open the data set; images of a folder are converted to `size` and `channels`. With `to_train=False` a single
    class, or a test split alone, is enough."""
    if config.name == "digits":
        return digits()
    if config.name in NAMED:
        return named(config.name, data_root(config.root), download=config.download)
    path = _place(config)
    if path.is_dir():
        return folder(path, size, channels, strict=config.strict, fewest=2 if to_train else 1)
    if path.is_file() and path.suffix == ".npz":
        return npz(path, to_train=to_train)
    check_known(config)
    raise UserError(f"data.name={config.name} is neither a folder of class folders nor an .npz file.")


def _place(config: DataConfig) -> Path:
    """A path, or a folder or file of that name under the data root."""
    path = Path(config.name).expanduser()
    return path if path.exists() else first_existing([data_root(config.root) / config.name]) or path
