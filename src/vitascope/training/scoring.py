"""Score the model that is being trained: in eval mode, and back in its own mode afterwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from vitascope.data.dataset import Dataset, UInt8Images
from vitascope.data.preprocessing import Preprocessing
from vitascope.inference.hardware import InferenceHardware
from vitascope.inference.scoring import Score, compute_logits, compute_outputs, score_logits
from vitascope.shapes import Images


@contextmanager
def set_eval_mode_temporarily(model: nn.Module) -> Iterator[None]:
    """Switch the model to eval mode inside this context."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def score_model(model: nn.Module, dataset: Dataset, preprocessing: Preprocessing, hardware: InferenceHardware) -> Score:
    """Return the loss and accuracy of a model on a data set."""
    with set_eval_mode_temporarily(model):
        return score_logits(compute_logits(model, dataset, preprocessing, hardware), dataset.labels.cpu())


def compute_outputs_in_eval_mode(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    images: UInt8Images | Dataset,
    preprocess: Callable[[UInt8Images], Images],
    hardware: InferenceHardware,
) -> Tensor:
    """Return the outputs of `forward` for all images, in eval mode, as float32 on the CPU."""
    with set_eval_mode_temporarily(model):
        return compute_outputs(model, forward, images, preprocess, hardware)
