"""Format numbers with units: 5.3 M, 1.3 G, 24.0 KiB, 1.2 ms."""


def count(number: float) -> str:
    """Format with decimal units, for parameters and FLOPs."""
    return _scaled(number, 1000, ["", " k", " M", " G", " T", " P"])


def size(number: float) -> str:
    """Format with binary units, for memory."""
    return _scaled(number, 1024, [" B", " KiB", " MiB", " GiB", " TiB"])


def duration(seconds: float) -> str:
    """Format a time, from microseconds to minutes."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (120, 1, "s")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 60:.3g} min"


def percent(share: float | None, places: int = 1) -> str:
    """Format a fraction as a percentage; None becomes a dash."""
    return "–" if share is None else f"{share:.{places}%}"


def _scaled(number: float, step: int, units: list[str]) -> str:
    index = 0
    while abs(number) >= step and index < len(units) - 1:
        number, index = number / step, index + 1
    return f"{number:.0f}{units[index]}" if index == 0 else f"{number:.2f}{units[index]}"
