"""Open the data set that a DataConfig names: a published data set, a folder, or an .npz file."""

from dataclasses import replace
from pathlib import Path

from vitascope.data.config import DataConfig
from vitascope.data.data_root import find_first_existing, resolve_data_root
from vitascope.data.dataset import DataSource, ImageSize
from vitascope.data.sources.arrays import open_builtin_digits, open_npz_data_source
from vitascope.data.sources.folder import open_image_folder
from vitascope.data.sources.named import PUBLISHED_DATASETS, open_or_download_published_dataset
from vitascope.errors import UserError, suggest_choice


def resolve_paths_in_data_config(config: DataConfig) -> DataConfig:
    """Resolve relative paths and the data root, so that the setting is valid in every working directory."""
    if config.name == "digits":
        return config
    if config.name in PUBLISHED_DATASETS:
        return replace(config, root=str(resolve_data_root(config.root).resolve()))
    return replace(config, name=str(_resolve_path_as_given_or_under_root(config).resolve()))


def check_data_name_exists(config: DataConfig) -> None:
    """Raise an error if no data set has this name. The data itself is not read."""
    if (
        config.name != "digits"
        and config.name not in PUBLISHED_DATASETS
        and not _resolve_path_as_given_or_under_root(config).exists()
    ):
        kind = "file" if Path(config.name).suffix else "folder"
        suggestion = suggest_choice(config.name, ["digits", *PUBLISHED_DATASETS])
        places = dict.fromkeys((str(Path.cwd()), str(resolve_data_root(config.root))))
        raise UserError(
            f"There is no data set and no {kind} named '{config.name}' in {' or '.join(places)}. {suggestion} "
            f"To use your own data, set data.name to the path of the {kind}."
        )


def open_data_source(
    config: DataConfig, image_size: ImageSize, num_channels: int, *, must_be_trainable: bool = True
) -> DataSource:
    """Open the data set. Images of a folder are converted to `image_size` and `num_channels`.

    With `must_be_trainable=False`, a single class or a test split alone is accepted."""
    if config.name == "digits":
        return open_builtin_digits()
    if config.name in PUBLISHED_DATASETS:
        return open_or_download_published_dataset(config.name, resolve_data_root(config.root), download=config.download)
    path = _resolve_path_as_given_or_under_root(config)
    if path.is_dir():
        return open_image_folder(path, image_size, num_channels, config, min_classes=2 if must_be_trainable else 1)
    if path.is_file() and path.suffix == ".npz":
        return open_npz_data_source(path, must_be_trainable=must_be_trainable)
    check_data_name_exists(config)
    raise UserError(f"data.name={config.name} is neither a folder of class folders nor an .npz file.")


def _resolve_path_as_given_or_under_root(config: DataConfig) -> Path:
    """Return `name` as a path, or the folder or file of that name under the data root."""
    path = Path(config.name).expanduser()
    return path if path.exists() else find_first_existing([resolve_data_root(config.root) / config.name]) or path
