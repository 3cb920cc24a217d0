"""Report each item of a loop before it is processed."""

from collections.abc import Callable, Iterator, Sequence

StepReporter = Callable[[str], None]


def iterate_and_report(
    report_step: StepReporter, items: Sequence[str], action: str, format_item: Callable[[str], str] = str
) -> Iterator[str]:
    """Yield the items; before each, report for example "Drawing image 1 of 2: cat"."""
    for number, item in enumerate(items, start=1):
        report_step(f"{action} {number} of {len(items)}: {format_item(item)}")
        yield item
