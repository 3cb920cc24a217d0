"""Store the temperature that was fitted on a run's validation images, and read it for predictions."""

from dataclasses import asdict, dataclass

from vitascope.errors import UserError, format_count
from vitascope.run.directory import ExternalWeightsRun, Run
from vitascope.run.files import read_json_object_or_empty, write_json

TEMPERATURE_FILE = "temperature.json"


@dataclass(frozen=True)
class RunTemperature:
    """The result of fitting a temperature on a run's validation images. 1: no temperature lowers their loss."""

    value: float
    fitted_on: int  # validation images
    loss: float  # on the validation images, without scaling
    scaled_loss: float  # on the validation images, with logits / value

    @property
    def description(self) -> str:
        return f"temperature {self.value:.2f}, fitted on {format_count(self.fitted_on, 'validation image')}"


def store_run_temperature_if_possible(
    run: Run, weights_label: str, num_views: int, temperature: RunTemperature
) -> bool:
    """Store the temperature of these weights and views. Return False for a run without write access, and for one that
    is not finished, because its best weights can still change."""
    if isinstance(run, ExternalWeightsRun) or not run.is_finished:
        return False
    path = run.get_path(TEMPERATURE_FILE)
    stored = read_json_object_or_empty(path) | {_make_key(weights_label, num_views): asdict(temperature)}
    try:
        write_json(path, stored)
    except UserError:
        return False
    return True


def find_run_temperature(run: Run, weights_label: str, num_views: int) -> RunTemperature | None:
    """Return the stored temperature of these weights and views; None if none was fitted."""
    if isinstance(run, ExternalWeightsRun):
        return None
    fields = read_json_object_or_empty(run.get_path(TEMPERATURE_FILE)).get(_make_key(weights_label, num_views))
    try:
        temperature = RunTemperature(**fields)  # pyright: ignore[reportCallIssue]
        return temperature if temperature.value > 0 else None
    except TypeError:  # missing or damaged
        return None


def get_temperature_value_or_1(temperature: RunTemperature | None) -> float:
    return 1.0 if temperature is None else temperature.value


def describe_unscaled_probabilities(temperature: RunTemperature | None) -> str:
    """Return a sentence for outputs that do not apply the run's temperature; empty if it changes nothing."""
    if get_temperature_value_or_1(temperature) == 1:
        return ""
    return (
        "Probabilities are before temperature scaling; predict divides the logits by the run's temperature "
        f"{get_temperature_value_or_1(temperature):.2f}."
    )


def _make_key(weights_label: str, num_views: int) -> str:
    return f"{weights_label}, views={num_views}"
