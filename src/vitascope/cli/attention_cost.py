"""`vitascope anatomy --measure`: measure and draw the cost of attention over the number of tokens."""

from dataclasses import asdict
from pathlib import Path

from vitascope.cli.console import create_console, create_table, format_bytes, format_duration
from vitascope.draw.style import save_figure
from vitascope.model.attention_cost import (
    IMPLEMENTATIONS,
    LABELS,
    THEORY,
    AttentionCost,
    choose_token_counts,
    describe_fitted_token_range,
    draw_attention_costs,
    fit_exponents_by_implementation,
    measure_attention_costs,
)
from vitascope.model.config import ModelConfig


def measure_and_draw_attention_cost(config: ModelConfig, figure_path: Path, *, quiet: bool) -> dict[str, object]:
    """Measure and draw the cost, print it unless `quiet`, and return the values for --json."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    counts = choose_token_counts(config.num_heads, device)
    costs = measure_attention_costs(config.num_heads, config.head_width, counts, device)
    fits = fit_exponents_by_implementation(costs)
    figure = draw_attention_costs(costs, f"{config.num_heads} heads of width {config.head_width}")
    save_figure(figure, figure_path)
    if not quiet:
        _print_cost_table(costs, fits)
        print(f"Figure: {figure_path}")
    return {"costs": [asdict(cost) for cost in costs], "exponents": fits, "device": device, "picture": str(figure_path)}


def _print_cost_table(costs: list[AttentionCost], fitted_exponents: dict[str, dict[str, float]]) -> None:
    columns = ["tokens", *[f"{LABELS[name]}: {cost}" for name in IMPLEMENTATIONS for cost in ("time", "memory")]]
    rows = []
    for tokens in sorted({cost.tokens for cost in costs}):
        cells = {cost.way: _format_time_and_memory(cost) for cost in costs if cost.tokens == tokens}
        rows.append([str(tokens), *[text for name in IMPLEMENTATIONS for text in cells[name]]])
    fitted = [
        f"tokens^{fitted_exponents[name][field]:.2f}" for name in IMPLEMENTATIONS for field in ("seconds", "peak_bytes")
    ]
    rows.append(["fitted growth", *fitted])
    create_console().print(
        create_table(
            "Measured cost of attention on this machine (forward pass, batch size 1)",
            columns,
            rows,
            right_aligned=set(columns),
        )
    )
    print(f"Fitted growth: {describe_fitted_token_range(costs)} {THEORY}")


def _format_time_and_memory(cost: AttentionCost) -> tuple[str, str]:
    return format_duration(cost.seconds), format_bytes(cost.peak_bytes)
