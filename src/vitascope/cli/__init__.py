"""The front door: verbs that read words, call one function and print."""

import sys

from vitascope.errors import UserError


def main() -> None:
    """Run the command line; a user's mistake becomes one line and exit code 2."""
    from vitascope.cli.app import app

    try:
        app()
    except UserError as error:
        print(f"vitascope: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output has gone: not our mistake
        sys.stderr.close()
        sys.exit(0)
