"""`vitascope doctor`: tell whether this machine is ready."""

import typer

from vitascope.run import machine


def doctor() -> None:
    """Versions, devices, precision, and what is missing."""
    print("Versions")
    for name, version in machine.versions().items():
        print(f"  {name:<16} {version or 'missing'}")
    lacking = machine.missing()
    if "torch" not in lacking:
        print("Devices (the first is used)")
        for name, words in machine.device_names().items():
            print(f"  {name:<16} {words}")
        print("Precision")
        for name, words in machine.precisions().items():
            print(f"  {name:<16} {words}")
    if lacking:
        print(f"Missing: {', '.join(lacking)}. Install with: pip install {' '.join(lacking)}")
        raise typer.Exit(1)
    print("All that Vitascope needs is here.")
