"""A command in a process of its own that is killed at a known moment, so that no test waits for another process."""

import os
import signal
import subprocess
import sys

KILLED = """
import os, signal, sys
from vitascope.training import loop
finish_epoch = loop.finish_epoch

def finish_epoch_and_die(session, *args):
    record = finish_epoch(session, *args)
    if session.epoch == {epoch} and {when}:
        os.kill(os.getpid(), signal.SIGKILL)
    return record

loop.finish_epoch = finish_epoch_and_die
from vitascope.cli import main
main()
"""


def kill_after_epoch(epoch: int, *words: str, when: str = "True") -> None:
    """Run `vitascope WORDS`; SIGKILL when the epoch's line is written and its state is not saved yet."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = KILLED.format(epoch=epoch, when=when)
    done = subprocess.run([sys.executable, "-c", code, *words], env=environment, stdout=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
