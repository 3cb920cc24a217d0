"""`make audit`: licences of the pinned packages, and their known vulnerabilities if the package index lists them.

The exit code is 1 if a pinned version has a known vulnerability, or an installed version is not the pinned one.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageMetadata, PackageNotFoundError, metadata
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

from benchmarks.race import REPOSITORY_FOLDER

TIMEOUT_SECONDS = 10
NO_LICENCE = "no licence information"


class Package(NamedTuple):
    """A package and its pinned version."""

    name: str
    version: str


class LicenceReport(NamedTuple):
    packages_by_licence: dict[str, list[str]]
    not_installed: list[str]  # such as packages for other operating systems
    other_versions: list[str]  # installed in another version than the pinned one


def read_pinned_packages(lock_path: Path) -> list[Package]:
    lines = lock_path.read_text(encoding="utf-8").splitlines()
    return [Package(*line.split(";")[0].strip().split("==")) for line in lines if "==" in line]


def collect_licences(
    packages: Iterable[Package], read_metadata: Callable[[str], PackageMetadata] = metadata
) -> LicenceReport:
    """Read the licences of the installed packages."""
    by_licence: dict[str, list[str]] = defaultdict(list)
    not_installed, versions = [], defaultdict[str, list[str]](list)
    installed_versions: dict[str, str] = {}
    for name, version in packages:
        try:
            content = read_metadata(name)
        except PackageNotFoundError:
            not_installed.append(name)
            continue
        if name not in versions:  # a name has one line for each Python version
            by_licence[find_licence(content)].append(name)
        versions[name].append(version)
        installed_versions[name] = content["Version"].partition("+")[0]
    others = [
        f"{name} {installed_versions[name]} (pinned: {' or '.join(pinned)})"
        for name, pinned in versions.items()
        if installed_versions[name] not in pinned
    ]
    return LicenceReport(dict(by_licence), not_installed, others)


def find_licence(content: PackageMetadata) -> str:
    """Return the licence expression, else the licence classifiers, else the first line of the licence field."""
    values = {key: (content.get_all(key) or [""]) for key in ("License-Expression", "License", "Classifier")}
    classifiers = [text.rpartition(" :: ")[2] for text in values["Classifier"] if text.startswith("License :: ")]
    first_line = next(iter(values["License"][0].strip().splitlines()), "")
    return values["License-Expression"][0] or ", ".join(classifiers) or first_line[:60] or NO_LICENCE


def find_index_url_if_any() -> str | None:
    """Return the address of the package index that pip uses; None if pip has none."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if configured:
        return re.sub(r"/simple/?$", "/pypi", configured)
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        return None
    return PyPI.pypi_url


def find_vulnerabilities(packages: Sequence[Package], index_url: str) -> list[str]:
    """Ask the index for the advisories of each pinned version. An index that has none raises an OSError."""
    found = []
    for name, version in packages:
        try:
            with urlopen(f"{index_url}/{name}/{version}/json", timeout=TIMEOUT_SECONDS) as reply:
                advisories = json.load(reply)["vulnerabilities"]
        except HTTPError as error:
            if error.code == 404 and name != packages[0].name:  # a version that the index no longer has
                continue
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise OSError("the index lists no advisories") from error
        found += [f"{name} {version}: {entry['id']}" for entry in advisories if not entry.get("withdrawn")]
    return found


def print_licences(report: LicenceReport) -> None:
    by_size = sorted(report.packages_by_licence.items(), key=lambda entry: (entry[0] == NO_LICENCE, -len(entry[1])))
    print("Licences of the pinned packages")
    for licence, names in by_size:
        print(f"  {licence}: {', '.join(names)}")
    if report.not_installed:
        print(f"Not installed here, so not read: {', '.join(report.not_installed)}")
    if report.other_versions:
        print(f"Installed in another version than the pinned one: {', '.join(report.other_versions)}")


def check_vulnerabilities(packages: Sequence[Package]) -> int:
    """Print the known vulnerabilities, or 'not checked' and the reason; return their number."""
    index_url = find_index_url_if_any()
    try:
        if index_url is None:
            raise OSError("pip has no package index")
        found = find_vulnerabilities(packages, index_url)
    except OSError as error:
        print(f"Known vulnerabilities: not checked ({getattr(error, 'reason', None) or error})")
        return 0
    print(f"Known vulnerabilities: {'; '.join(found) or 'none'} ({len(packages)} pinned versions)")
    return len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lock", type=Path, default=REPOSITORY_FOLDER / "requirements.lock")
    packages = read_pinned_packages(parser.parse_args().lock)
    report = collect_licences(packages)
    print_licences(report)
    sys.exit(bool(check_vulnerabilities(packages)) or bool(report.other_versions))


if __name__ == "__main__":
    main()
