"""`vitascope doctor`: check whether this machine is ready."""

import typer

from vitascope.run import machine


def doctor() -> None:
    """Check this machine: versions, devices, precision and missing packages."""
    print("Versions")
    for name, version in machine.versions().items():
        print(f"  {name:<16} {version or 'missing'}")
    lacking = machine.missing()
    if "torch" not in lacking:
        print("Devices (the first is the default)")
        for name, words in machine.device_names().items():
            print(f"  {name:<16} {words}")
        print("Precision")
        for name, words in machine.precisions().items():
            print(f"  {name:<16} {words}")
    if lacking:
        print(f"Missing: {', '.join(lacking)}. Install with: pip install {' '.join(lacking)}")
        raise typer.Exit(1)
    print("All required packages are installed.")
