"""Freed memory is kept: touching a large block again costs no new pages."""

import subprocess
import sys

import pytest

CODE = """
import resource, torch
from vitascope.inference.hardware import set_malloc_to_keep_memory
kept = {ask} and set_malloc_to_keep_memory()
for _ in range(3):
    torch.zeros(16_000_000)
counts = []
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(16_000_000)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(counts), kept)  # the least: a system may take idle pages back at any time
"""


def faults(ask: bool) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", CODE.format(ask=ask)], capture_output=True, text=True, check=True)
    count, kept = done.stdout.split()
    return int(count), kept


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_large_blocks_are_used_again_instead_of_being_faulted_in_anew() -> None:
    asked, kept = faults(True)
    if kept != "True":
        pytest.skip("this C library cannot be asked")
    assert asked < faults(False)[0] / 10
