"""Freed memory stays with the program: on Linux, large tensors would otherwise be given back and faulted in anew.

glibc takes every block above a threshold straight from the system and gives it back when it is freed. A model's
activations are such blocks, so each step pays for touching millions of new pages; a forward pass of 256×8 on a thousand
images took 1.6 times as long (docs/experiments.md). Other systems' allocators keep freed memory by themselves.
"""

import ctypes
import sys
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
NEVER = 2**31 - 1


@cache
def keep_freed_memory() -> bool:
    """For the whole process, once; True where it could be asked for."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has none
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, NEVER)) and bool(mallopt(M_TRIM_THRESHOLD, NEVER))
