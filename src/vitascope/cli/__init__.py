"""The command line: each command reads its arguments, calls one function and prints the result."""

import io
import sys

from vitascope.errors import UserError

RENAMED_OPTIONS = {
    "--together": "--batch-runs",
    "--judge": "--split",
    "--probes": "--analysis",
    "--no-probes": "--no-analysis",
    "--most": "--max-images",
}


def main() -> None:
    """Run the command line. A `UserError` is printed as one line, with exit code 2."""
    from vitascope.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name may have characters that the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    try:
        _reject_renamed_options(sys.argv[1:])
        app()
    except UserError as error:
        print(f"vitascope: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "vitascope":
            raise
        print(
            f"vitascope: {error.name} is not installed. Install it with: pip install {error.name}",
            file=sys.stderr,
        )
        sys.exit(2)


def _reject_renamed_options(arguments: list[str]) -> None:
    """Reject option names of older versions and give the new name."""
    for argument in arguments:
        option = argument.partition("=")[0]
        if option in RENAMED_OPTIONS:
            raise UserError(f"{option} was renamed to {RENAMED_OPTIONS[option]}.")
