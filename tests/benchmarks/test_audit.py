"""The audit names licences, packages without one, and known vulnerabilities if the index lists them."""

import json
from email.message import Message
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from benchmarks import audit
from benchmarks.audit import NO_LICENCE, Package, check_vulnerabilities, collect_licences, read_pinned_packages


def test_the_lock_is_read_without_markers(tmp_path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("einops==0.8.2\nanyio==4.16.0 ; sys_platform != 'emscripten'\n")
    assert read_pinned_packages(lock) == [Package("einops", "0.8.2"), Package("anyio", "4.16.0")]


def read_fake_metadata(name: str) -> Message:
    if name == "absent":
        raise PackageNotFoundError
    fields = {
        "one": [("License-Expression", "MIT")],
        "two": [("License", "long text\nmore"), ("Classifier", "License :: OSI Approved :: BSD License")],
        "three": [("License", "Apache 2.0\nmore text")],
        "four": [("Classifier", "Topic :: Software Development")],
    }
    content = Message()
    for key, value in [("Version", "1.0+cpu"), *fields[name]]:
        content[key] = value
    return content


def test_licences_packages_without_one_and_other_versions_are_named() -> None:
    packages = [Package(name, "1.0") for name in ("one", "two", "three", "absent")]
    packages += [Package("four", "2.0"), Package("four", "3.0")]
    report = collect_licences(packages, read_fake_metadata)
    expected = {"MIT": ["one"], "BSD License": ["two"], "Apache 2.0": ["three"], NO_LICENCE: ["four"]}
    assert report.packages_by_licence == expected
    assert report.not_installed == ["absent"] and report.other_versions == ["four 1.0 (pinned: 2.0 or 3.0)"]


def serve_advisories(folder: Path, advisories: dict[str, object]) -> str:
    for name, content in advisories.items():
        path = folder / name / "1.0" / "json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))
    return folder.as_uri()


def test_known_vulnerabilities_are_named(tmp_path, monkeypatch, capsys) -> None:
    entries = [{"id": "PYSEC-1", "withdrawn": None}, {"id": "PYSEC-2", "withdrawn": "2026-01-01"}]
    url = serve_advisories(tmp_path, {"good": {"vulnerabilities": []}, "bad": {"vulnerabilities": entries}})
    monkeypatch.setattr(audit, "find_index_url_if_any", lambda: url)
    assert check_vulnerabilities([Package("good", "1.0")]) == 0
    assert check_vulnerabilities([Package("good", "1.0"), Package("bad", "1.0")]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("Known vulnerabilities: none (1 ") and "bad 1.0: PYSEC-1 (2 " in out[1]


def test_an_index_without_advisories_is_said_to_be_unchecked(tmp_path, monkeypatch, capsys) -> None:
    for url in (None, tmp_path.as_uri(), serve_advisories(tmp_path / "x", {"good": {"info": {}}})):
        monkeypatch.setattr(audit, "find_index_url_if_any", lambda url=url: url)
        assert check_vulnerabilities([Package("good", "1.0")]) == 0
        assert "not checked (" in capsys.readouterr().out
