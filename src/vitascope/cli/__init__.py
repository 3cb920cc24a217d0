"""The command line: each command reads its arguments, calls one function and prints the result."""

import errno
import io
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from vitascope.errors import UserError, is_out_of_memory

if TYPE_CHECKING:
    from vitascope.cli.console import ExitCode

RENAMED_OPTIONS = {
    "--together": "--batch-runs",
    "--judge": "--split",
    "--probes": "--analysis",
    "--no-probes": "--no-analysis",
    "--most": "--max-images",
}
MAX_PATH_CHARACTERS = 100  # in an error message
PATH_ERRORS = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EROFS, errno.ENOSPC)
INTERRUPTED = 130  # exit code after Ctrl-C or SIGTERM


def main() -> None:
    """Run the command line. Ctrl-C and SIGTERM end it with exit code 130, from the first moment."""
    try:
        previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not in the main thread
        _run_command_line()
        return
    try:
        _run_command_line()
    except KeyboardInterrupt:
        print("vitascope: Interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _run_command_line() -> None:
    """Run the command line. A `UserError`, or a wrong argument, is printed as one line, with exit code 2."""
    import typer
    from typer.main import get_command

    from vitascope.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name may have characters that the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    try:
        _reject_arguments_that_are_not_utf8(sys.argv[1:])
        _reject_renamed_options(sys.argv[1:])
        sys.exit(_run_command_converting_usage_errors(get_command(app), sys.argv[1:]))
    except UserError as error:
        _print_error_and_exit(str(error))
    except typer.Abort:  # a question was answered with Ctrl-C or no input
        print("vitascope: Aborted.", file=sys.stderr)
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _print_error_and_exit(
            "The memory of this machine or of its GPU is too small. Use a smaller model, smaller images, "
            "fewer of them at once, or close other programs."
        )
    except OSError as error:
        if error.errno not in PATH_ERRORS or error.filename is None:
            raise
        path = os.fsdecode(error.filename)
        path = path if len(path) <= MAX_PATH_CHARACTERS else f"{path[:MAX_PATH_CHARACTERS]}…"
        _print_error_and_exit(f"{path}: {error.strerror}. Check the path and its permissions.")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "vitascope":
            raise
        _print_error_and_exit(f"{error.name} is not installed. Install it with: pip install {error.name}")


def _print_error_and_exit(text: str) -> NoReturn:
    print(f"vitascope: {text}", file=sys.stderr)
    sys.exit(2)


def _run_command_converting_usage_errors(command: Any, arguments: list[str]) -> "ExitCode":
    """Run the command and return the exit code. A wrong argument, option or command name raises a `UserError`."""
    try:
        exit_code = command(arguments, prog_name="vitascope", standalone_mode=False)
    except Exception as error:
        from vitascope.cli.usage_errors import convert_usage_error, is_usage_error

        if not is_usage_error(error):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: its help has been printed
            return 2
        raise convert_usage_error(error, command, arguments) from error
    return exit_code if isinstance(exit_code, int) else 0


def _reject_arguments_that_are_not_utf8(arguments: list[str]) -> None:
    """Reject arguments with bytes that are not UTF-8: such names cannot be written to reports."""
    for argument in arguments:
        if not argument.isascii() and argument.encode(errors="replace") != argument.encode(errors="surrogatepass"):
            shown = argument.encode(errors="backslashreplace").decode()
            raise UserError(
                f"The argument '{shown[:80]}' is not UTF-8. Rename the file or folder, or correct the text."
            )


def _reject_renamed_options(arguments: list[str]) -> None:
    """Reject option names of older versions and give the new name."""
    for argument in arguments:
        option = argument.partition("=")[0]
        if option in RENAMED_OPTIONS:
            raise UserError(f"{option} was renamed to {RENAMED_OPTIONS[option]}.")
