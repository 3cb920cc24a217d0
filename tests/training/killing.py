"""Interrupt a training after an epoch: kill it in another process, or raise KeyboardInterrupt in this one."""

import os
import signal
import subprocess
import sys

import pytest

from vitascope.training import loop

KILLED = """
import os, signal, sys
from vitascope.training import loop
finish_epoch = loop.log_epoch_and_keep_best

def finish_epoch_and_die(state, *args):
    record = finish_epoch(state, *args)
    if state.epoch == {epoch} and {when}:
        os.kill(os.getpid(), signal.SIGKILL)
    return record

loop.log_epoch_and_keep_best = finish_epoch_and_die
from vitascope.cli import main
main()
"""


def kill_after_epoch(epoch: int, *args: str, when: str = "True") -> None:
    """Run `vitascope ARGS`; send SIGKILL when the epoch's line is written and its state is not saved yet."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = KILLED.format(epoch=epoch, when=when)
    process = subprocess.run([sys.executable, "-c", code, *args], env=environment, stdout=subprocess.DEVNULL)
    assert process.returncode == -signal.SIGKILL


def interrupt_after_one_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make training raise KeyboardInterrupt when its second epoch ends."""
    log_epoch_and_keep_best = loop.log_epoch_and_keep_best

    def log_one_epoch(state, *rest):
        if state.epoch == 2:
            raise KeyboardInterrupt
        return log_epoch_and_keep_best(state, *rest)

    monkeypatch.setattr(loop, "log_epoch_and_keep_best", log_one_epoch)
