"""The front door: verbs that read words, call one function and print."""

import io
import sys

from vitascope.errors import UserError


def main() -> None:
    """Run the command line; a user's mistake becomes one line and exit code 2."""
    from vitascope.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that a terminal cannot show must not end the program
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except UserError as error:
        print(f"vitascope: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "vitascope":
            raise
        print(
            f"vitascope: {error.name} is not installed. Try: pip install {error.name}",
            file=sys.stderr,
        )
        sys.exit(2)
