"""Bit flips in checkpoints and weights, full disks, concurrent resumes, and clocks that jump."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.faults.counts import Attack, FaultCounts, classify_outcome, shorten_outcome
from benchmarks.faults.processes import (
    Outcome,
    run_forked_command,
    start_forked_command,
    start_new_command,
)
from benchmarks.faults.runs import (
    TRAIN,
    TRAIN_WITH_ALL_STATE,
    check_success,
    copy_run,
    find_run,
    is_same_result,
    make_interrupted_run,
    read_fingerprint,
    train_reference,
)

FAKETIME_PATTERN = "usr/lib/*/faketime/libfaketimeMT.so.1"
CLOCK_JUMPS = ("-4000d", "-1d", "-3600", "+3600", "+1d", "+4000d")


def is_resumed_identically(run_path: Path, outcome: Outcome, reference: dict[str, Any]) -> bool:
    return classify_outcome(outcome) == "completed" and is_same_result(lambda: read_fingerprint(run_path), reference)


def flip_bits_in_checkpoints(attack: Attack) -> list[FaultCounts]:
    """Flip one bit of resume.pt, and in every fourth try also one bit of resume.previous.pt."""
    result = "The checkpoint is named as damaged. The one before it gives the same weights and metrics."
    one = FaultCounts("one bit of resume.pt flipped", result)
    result = "Refused in a sentence. Nothing is changed."
    both = FaultCounts("one bit of resume.pt and one of resume.previous.pt flipped", result)
    reference = train_reference(attack.folder / "reference", TRAIN_WITH_ALL_STATE)
    interrupted = make_interrupted_run(attack.folder, TRAIN_WITH_ALL_STATE)
    for index, folder in enumerate(attack.list_tries()):
        run_path, counts = copy_run(interrupted, folder), both if index % 4 == 3 else one
        description = f"bit {flip_random_bit(attack, run_path / 'resume.pt')}"
        if counts is both:
            flip_random_bit(attack, run_path / "resume.previous.pt")
        outcome = run_forked_command(("resume", str(run_path)), folder)
        if counts is both or outcome.exit_code:
            if counts.count_outcome(outcome, description) == "completed":  # resumed silently
                counts.completed, counts.lost = counts.completed - 1, counts.lost + 1
        else:
            is_recovered = is_resumed_identically(run_path, outcome, reference.fingerprint)
            is_named = "resume.pt is damaged" in outcome.output
            counts.count_recovery(is_recovered and is_named, f"{description}: {shorten_outcome(outcome)}")
        shutil.rmtree(folder)
    return [one, both]


def flip_bits_in_weights(attack: Attack) -> list[FaultCounts]:
    """Flip one bit of model.safetensors. An accepted file must give the same probabilities as the intact one."""
    from benchmarks.faults.inputs import write_digit_image

    result = "Refused in a sentence. Completed: the bit was not part of a tensor, and the probabilities are the same."
    counts = FaultCounts("one bit of model.safetensors flipped", result)
    run = train_reference(attack.folder / "reference")
    image = write_digit_image(attack.folder / "image.png")
    command = ("predict", "run", str(image), "--json")
    shutil.copytree(run.path, attack.folder / "whole" / "run")
    expected = run_forked_command(command, attack.folder / "whole")
    check_success(expected)
    for folder in attack.list_tries():
        shutil.copytree(run.path, folder / "run")
        bit = flip_random_bit(attack, folder / "run" / "model.safetensors")
        outcome = run_forked_command(command, folder)
        kind = counts.count_outcome(outcome, f"bit {bit}")
        if kind == "completed" and outcome.output != expected.output:
            counts.completed, counts.lost = counts.completed - 1, counts.lost + 1
            counts.add_example(f"lost: bit {bit} changes the probabilities")
        shutil.rmtree(folder)
    return [counts]


def flip_random_bit(attack: Attack, path: Path) -> int:
    content = bytearray(path.read_bytes())
    bit = attack.rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return bit


def fill_disk(attack: Attack) -> list[FaultCounts]:
    """Train on a disk that is too small, make it larger, and resume."""
    reference = train_reference(attack.folder / "reference", TRAIN_WITH_ALL_STATE)
    size = sum(path.stat().st_size for path in reference.path.iterdir())
    with mount_small_disk(attack.folder / "probe", size) as can_mount:
        way = "a tmpfs" if can_mount else "a limit on the size of a file"
    result = "Train ends with a sentence. After space is made, `vitascope resume` gives the same result."
    counts = FaultCounts(f"disk full in train ({way})", result)
    for folder in attack.list_tries():
        num_bytes = int(size * attack.rng.uniform(0.05, 0.95))
        with mount_small_disk(folder, num_bytes) as is_mounted:
            outcome = run_forked_command(TRAIN_WITH_ALL_STATE, folder, None if is_mounted else num_bytes // 4)
            if is_mounted:
                _mount(folder, 50 * size, "remount,")
            error = "" if classify_outcome(outcome) == "refused" else shorten_outcome(outcome)
            run_path = find_run(folder)
            again = TRAIN_WITH_ALL_STATE if run_path is None else ("resume", str(run_path))
            outcome = run_forked_command(again, folder)
            run_path = find_run(folder)
            is_recovered = run_path is not None and is_resumed_identically(run_path, outcome, reference.fingerprint)
            description = f"{num_bytes} bytes: {error or shorten_outcome(outcome)}"
            counts.count_recovery(is_recovered and not error, description)
    return [counts]


@contextmanager
def mount_small_disk(folder: Path, num_bytes: int) -> Iterator[bool]:
    """Mount a tmpfs of this size on the folder, if this is allowed; yield whether it is."""
    folder.mkdir(parents=True, exist_ok=True)
    is_mounted = _mount(folder, num_bytes)
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


def _mount(folder: Path, num_bytes: int, option: str = "") -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"{option}size={num_bytes}", "tmpfs", str(folder)]
    with suppress(OSError):
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    return False


def resume_concurrently(attack: Attack) -> list[FaultCounts]:
    result = "One process resumes with the same result; the other exits with code 2 and names the process."
    counts = FaultCounts("two `resume` of one run at once", result)
    reference = train_reference(attack.folder / "reference")
    interrupted = make_interrupted_run(attack.folder)
    for folder in attack.list_tries():
        run_path = copy_run(interrupted, folder)
        processes = [start_forked_command(("resume", str(run_path)), folder) for _ in range(2)]
        outcomes = [process.wait() for process in processes]
        finished = [outcome for outcome in outcomes if outcome.exit_code == 0]
        refused = [outcome for outcome in outcomes if classify_outcome(outcome) == "refused"]
        is_late = any("already finished" in outcome.output for outcome in finished)  # after the end of the other
        is_one_refused = len(finished) == 1 and "is used by process" in "".join(outcome.errors for outcome in refused)
        is_same = is_same_result(lambda run_path=run_path: read_fingerprint(run_path), reference.fingerprint)
        counts.count_recovery(is_same and (is_one_refused or is_late), "; ".join(map(shorten_outcome, outcomes)))
        shutil.rmtree(folder)
    return [counts]


def make_clock_jump(attack: Attack) -> list[FaultCounts]:
    """Let the clock jump while a run is trained, kill it, and resume it with a clock that jumped again."""
    result = "`vitascope resume` gives the same weights and metrics."
    counts = FaultCounts("the clock jumps by an hour to 11 years, with SIGKILL", result)
    library = next(iter(sorted(Path("/").glob(FAKETIME_PATTERN))), None)
    if library is None:
        counts.skipped = "libfaketime is not installed (Debian package faketime)"
        return [counts]
    reference = train_reference(attack.folder / "reference")
    for folder in attack.list_tries():
        clock = folder / "clock"
        clock.write_text("+0\n")
        environment = {"LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(clock)}
        environment |= {"FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        process = start_new_command(TRAIN, folder, environment)
        while not list(folder.glob("runs/*/*/resume.pt")) and not _has_ended(process.pid):
            time.sleep(0.005)
        clock.write_text(f"{attack.rng.choice(CLOCK_JUMPS)}\n")
        time.sleep(attack.rng.uniform(0, 0.5))
        process.kill_after(0)
        clock.write_text(f"{attack.rng.choice(CLOCK_JUMPS)}\n")
        run_path = find_run(folder)
        outcome = start_new_command(("resume", str(run_path)), folder, environment).wait()
        is_recovered = run_path is not None and is_resumed_identically(run_path, outcome, reference.fingerprint)
        counts.count_recovery(is_recovered, shorten_outcome(outcome))
    return [counts]


def _has_ended(pid: int) -> bool:
    """Whether this child process has ended; it can still be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
