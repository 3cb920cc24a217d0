"""Format numbers for tables, sentences, captions and pages: "98.67 %", "−0.052". JSON and CSV stay plain."""

MINUS_SIGN = "−"


def format_percent(fraction: float | None, num_decimals: int = 1) -> str:
    """Format a fraction as a percentage, such as "98.7 %"; None becomes a dash."""
    return "–" if fraction is None else f"{format_number(100 * fraction, f'z.{num_decimals}f')} %"


def format_number(value: float, format_spec: str) -> str:
    """Format a number with a typographic minus sign. `format_spec` is Python's, such as "+z.2f"."""
    return format(value, format_spec).replace("-", MINUS_SIGN)


def format_rough_duration(seconds: float) -> str:
    """Return a duration as text: about 40 seconds, about 2 minutes, about 1.5 hours."""
    if seconds < 90:
        return f"about {max(10, round(seconds, -1)):.0f} seconds"
    if seconds < 5400:
        return f"about {max(2, round(seconds / 60))} minutes"
    return f"about {seconds / 3600:.1f} hours"
