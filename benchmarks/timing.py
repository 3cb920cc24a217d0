"""Calls -> seconds, in turns: on a noisy machine every contender meets the same noise."""

import statistics
import time
from collections.abc import Callable


def seconds_in_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Each round times every call once, in alternating order; the first call of each is thrown away."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
    return times


def ratio(theirs: list[float], ours: list[float]) -> float:
    """How many times faster ours is: the median over rounds of their time over ours."""
    return statistics.median(their / our for their, our in zip(theirs, ours, strict=True))
