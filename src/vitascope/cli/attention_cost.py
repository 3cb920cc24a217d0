"""`vitascope anatomy --measure`: measure and draw the cost of attention over the number of tokens."""

from dataclasses import asdict
from pathlib import Path

from vitascope.cli import numbers
from vitascope.cli.tables import console, table
from vitascope.draw.look import save
from vitascope.model.attention_cost import (
    LABELS,
    THEORY,
    WAYS,
    Cost,
    describe_fit,
    draw_costs,
    exponents,
    measure_attention,
    token_counts,
)
from vitascope.model.config import ModelConfig


def measure_and_draw(config: ModelConfig, out: Path, *, quiet: bool) -> dict[str, object]:
    """Measure and draw the cost, print it unless `quiet`, and return the values for --json."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    counts = token_counts(config.num_heads, device)
    costs = measure_attention(config.num_heads, config.head_width, counts, device)
    fits = exponents(costs)
    figure = draw_costs(costs, f"{config.num_heads} heads of width {config.head_width}")
    save(figure, out)
    if not quiet:
        _print(costs, fits)
        print(f"Figure: {out}")
    return {"costs": [asdict(cost) for cost in costs], "exponents": fits, "device": device, "picture": str(out)}


def _print(costs: list[Cost], fits: dict[str, dict[str, float]]) -> None:
    columns = ["tokens", *[f"{LABELS[way]}: {what}" for way in WAYS for what in ("time", "memory")]]
    rows = []
    for tokens in sorted({cost.tokens for cost in costs}):
        cells = {cost.way: cost for cost in costs if cost.tokens == tokens}
        rows.append([str(tokens), *[text for way in WAYS for text in _cells(cells[way])]])
    fitted = [f"tokens^{fits[way][field]:.2f}" for way in WAYS for field in ("seconds", "peak_bytes")]
    rows.append(["fitted growth", *fitted])
    console().print(
        table(
            "Measured cost of attention on this machine (forward pass, batch size 1)", columns, rows, right=set(columns)
        )
    )
    print(f"Fitted growth: {describe_fit(costs)} {THEORY}")


def _cells(cost: Cost) -> tuple[str, str]:
    return numbers.duration(cost.seconds), numbers.size(cost.peak_bytes)
