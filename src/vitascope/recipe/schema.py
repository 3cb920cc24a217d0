"""The schema of a recipe: what can be set, with its defaults; torch-free."""

from dataclasses import dataclass, field

from vitascope.model.config import ModelConfig


@dataclass(frozen=True)
class Recipe:
    """Everything a run is made of."""

    model: ModelConfig = field(default_factory=ModelConfig)
