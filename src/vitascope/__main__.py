"""`python -m vitascope` is the command `vitascope`."""

from vitascope.cli import main

if __name__ == "__main__":
    main()
