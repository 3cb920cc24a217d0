"""Save and load checkpoints (resume.pt) and model weights (safetensors and config.json)."""

import io
import json
import re
import warnings
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from vitascope.errors import JSON_ERRORS, UserError, shorten_error_message
from vitascope.model.config import ModelConfig
from vitascope.run.directory import Run, check_not_run_folder, is_run_folder
from vitascope.run.files import make_folder, write_atomically, write_json
from vitascope.weights.files import read_safetensors, serialize_to_safetensors
from vitascope.weights.infer_config import check_file_is_large_enough
from vitascope.weights.model_info import ModelInfo, parse_model_info

CHECKPOINT, PREVIOUS_CHECKPOINT = "resume.pt", "resume.previous.pt"
FORMAT_MARK = "vitascope-resume-3"
MARK_WITHOUT_CHECKSUM = "vitascope-resume-2"  # of older versions
_CHECKSUM_LINE = "\nvitascope-crc32 {checksum:08x} {size:016d}\n"  # the end of the file; PyTorch skips it
_CHECKSUM_PATTERN = re.compile(rb"\nvitascope-crc32 ([0-9a-f]{8}) ([0-9]{16})\n")
_CHECKSUM_LINE_LENGTH = len(_CHECKSUM_LINE.format(checksum=0, size=0))
Checkpoint = dict[str, Any]  # keys: see TrainState.state_dict
StateDict = dict[str, Tensor]


class DamagedCheckpointError(UserError):
    """A checkpoint is incomplete, or its checksum does not match."""


class LoadedCheckpoint(NamedTuple):
    state: Checkpoint | None  # None if the run stopped before its first checkpoint, so it restarts from its seed
    note: str = ""  # for the user, if the newest checkpoint is damaged
    is_previous: bool = False


def save_checkpoint(run: Run, checkpoint: Checkpoint) -> None:
    """Write resume.pt, with a checksum. The old one becomes resume.previous.pt."""
    buffer = io.BytesIO()
    torch.save({"mark": FORMAT_MARK} | checkpoint, buffer)
    size = buffer.seek(0, io.SEEK_END)
    buffer.write(_CHECKSUM_LINE.format(checksum=zlib.crc32(buffer.getbuffer()), size=size).encode())
    write_atomically(run.get_path(CHECKPOINT), buffer.getbuffer(), run.get_path(PREVIOUS_CHECKPOINT))


def load_checkpoint(run: Run) -> LoadedCheckpoint:
    """Load the newest intact checkpoint. Nothing is changed."""
    newest, previous = run.get_path(CHECKPOINT), run.get_path(PREVIOUS_CHECKPOINT)
    if not newest.is_file():  # also after a crash between the two renames of `save_checkpoint`
        has_previous = previous.is_file()
        return LoadedCheckpoint(_read_checkpoint_file(previous) if has_previous else None, is_previous=has_previous)
    try:
        return LoadedCheckpoint(_read_checkpoint_file(newest))
    except DamagedCheckpointError:
        if not previous.is_file():
            raise
    try:
        state = _read_checkpoint_file(previous)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"{newest} and {previous.name} are damaged. Nothing was changed. To restart the run from the beginning, "
            f"move both files away and run: vitascope resume {run.path}"
        ) from error
    note = f"{newest} is damaged, so the run is resumed from the checkpoint before it, {previous.name}."
    return LoadedCheckpoint(state, note, is_previous=True)


def clean_up_checkpoints(run: Run, loaded: LoadedCheckpoint) -> None:
    """Prepare the next save: the loaded checkpoint becomes resume.pt, and partial files of a killed process go."""
    if loaded.is_previous:
        run.get_path(PREVIOUS_CHECKPOINT).replace(run.get_path(CHECKPOINT))
    for partial_file in run.path.glob(f".{CHECKPOINT}.*.part"):
        partial_file.unlink(missing_ok=True)


def _read_checkpoint_file(path: Path) -> Checkpoint:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} could not be read: {error.strerror}. Nothing was changed.") from error
    hint = f"To restart the run from the beginning, move the file away and run: vitascope resume {path.parent}"
    damaged = DamagedCheckpointError(f"{path} is damaged or not a Vitascope checkpoint. Nothing was changed. {hint}")
    has_checksum = _check_checksum(content)
    if has_checksum is False:
        raise damaged
    try:
        with warnings.catch_warnings(action="ignore"):  # about pickle protocols and TorchScript
            checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch, pickle and zipfile have errors of their own
        raise damaged from error
    mark = checkpoint.get("mark") if isinstance(checkpoint, dict) else None
    if mark == FORMAT_MARK and not has_checksum:
        raise damaged
    if mark not in (FORMAT_MARK, MARK_WITHOUT_CHECKSUM) or "identity" not in checkpoint:
        raise UserError(f"{path} was not written by this version of Vitascope. Nothing was changed. {hint}")
    return checkpoint


def _check_checksum(content: bytes) -> bool | None:
    """Return whether the checksum matches; None if there is none."""
    line = _CHECKSUM_PATTERN.fullmatch(content[-_CHECKSUM_LINE_LENGTH:])
    if line is None:
        return None
    body = memoryview(content)[:-_CHECKSUM_LINE_LENGTH]
    return len(body) == int(line[2]) and zlib.crc32(body) == int(line[1], 16)


LAST_WEIGHTS, BEST_WEIGHTS = "model.safetensors", "best.safetensors"
SNAPSHOTS_FOLDER = "kept"  # folder of the weight snapshots (train.weight_snapshots)


def save_model_info(run: Run, model_info: ModelInfo) -> None:
    write_json(run.get_path("config.json"), model_info.as_dict())


def save_weights(path: Path, weights: StateDict) -> None:
    """Write a safetensors file with a checksum in its metadata. The same weights give the same bytes."""
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in weights.items()}
    write_atomically(path, serialize_to_safetensors(weights))


def save_model_folder(folder: Path, model_info: ModelInfo, weights: StateDict) -> None:
    """Save a model folder for `weights=FOLDER`, `vitascope.open_model` and every command."""
    check_not_run_folder(folder)
    make_folder(folder)
    write_json(folder / "config.json", model_info.as_dict())
    save_weights(folder / LAST_WEIGHTS, weights)


def read_model_info(run: Run) -> ModelInfo:
    path = run.get_path("config.json")
    if not path.is_file():
        raise UserError(
            f"{run.path} has no config.json: training never started. Start it with: vitascope resume {run.path}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *JSON_ERRORS) as error:
        raise UserError(f"{path} is incomplete ({type(error).__name__}). Restore the file, or train again.") from error
    return parse_model_info(config, str(path))


def load_run_weights_into_model(model: nn.Module, run: Run, *, use_best_epoch: bool = False) -> None:
    """Load the weights of the last epoch, or of the best epoch on validation images."""
    load_weights_file_into_model(model, _find_weights_file(run, use_best_epoch=use_best_epoch))


def check_run_weights_are_large_enough(run: Run, config: ModelConfig, *, use_best_epoch: bool = False) -> None:
    """Compare the model's size with the weights file before the model is built, because config.json may be damaged."""
    check_file_is_large_enough(_find_weights_file(run, use_best_epoch=use_best_epoch), config)


def _find_weights_file(run: Run, *, use_best_epoch: bool) -> Path:
    path = run.get_path(BEST_WEIGHTS if use_best_epoch else LAST_WEIGHTS)
    if not path.is_file():
        problem = _describe_missing_weights(run, path.name)
        if use_best_epoch and run.is_finished:
            raise UserError(f"{problem}. data.validation was 0, so no best epoch exists.")
        raise UserError(
            f"{problem}. Resume it with: vitascope resume {run.path}{_format_newest_finished_run_hint(run)}"
        )
    return path


def _describe_missing_weights(run: Run, file_name: str) -> str:
    """Return that the run is not finished, with its epochs; that the file is missing if all epochs are done."""
    rows, num_epochs = run.metrics, run.recipe.train.epochs
    epochs_done = rows[-1]["epoch"] if rows else 0
    if run.is_finished or epochs_done >= num_epochs:
        return f"{run.path} has no {file_name}"
    return f"{run.path} is not finished ({epochs_done} of {num_epochs} epochs)"


def _format_newest_finished_run_hint(run: Run) -> str:
    """Return a hint to the newest finished run of the same recipe."""
    weights_paths = run.path.resolve().parent.glob(f"*/{LAST_WEIGHTS}")
    finished = sorted(path.parent for path in weights_paths if is_run_folder(path.parent))
    return f", or use a finished run: {run.path.parent / finished[-1].name}" if finished else ""


def load_weights_file_into_model(model: nn.Module, path: Path) -> None:
    try:
        with warnings.catch_warnings(action="error"):  # about complex numbers
            model.load_state_dict(read_safetensors(path))
    except (SafetensorError, RuntimeError, UserWarning) as error:
        raise UserError(
            f"{path} is incomplete or does not match its config.json: {shorten_error_message(error)}"
        ) from error
    if broken := next((name for name, value in model.state_dict().items() if not value.isfinite().all()), None):
        raise UserError(f"{path}: {broken} contains NaN or infinite values, so the weights cannot be used.")
