# SPDX-License-Identifier: Apache-2.0
"""Tests the bill of materials (SBOM) of a folder with wheels: it must list every file, with the name, version and
licence that the file itself contains.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILT = datetime(1980, 1, 1, tzinfo=timezone.utc)


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import sbom as found
    finally:
        sys.path.pop(0)
    return found


def wheel(path: Path, *headers: str) -> None:
    path.parent.mkdir(exist_ok=True)
    name, version = path.name.split("-")[:2]
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {name}",
        f"Version: {version}",
        *headers,
        "",
        "License: of the body",
    ]
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr(zipfile.ZipInfo(f"{name}-{version}.dist-info/METADATA"), "\n".join(lines))


def written(sbom: ModuleType, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sbom.write(folder, "1.2.3", BUILT).read_text())
    return found


# columns: headers in the METADATA of a wheel; expected licences of the component (None: unknown)
LICENCES = [
    ((), None),
    (("License: MIT",), [{"license": {"id": "MIT"}}]),
    (
        ("License: An own licence", "Classifier: Topic :: Software"),
        [{"license": {"name": "An own licence"}}],
    ),
    (("License-Expression: Apache-2.0 OR MIT", "License: BSD"), [{"expression": "Apache-2.0 OR MIT"}]),
    (("Classifier: License :: OSI Approved :: BSD License",), [{"license": {"name": "BSD License"}}]),
    (("License: MIT License\n        Permission is hereby granted", ""), [{"license": {"name": "MIT License"}}]),
]


@pytest.mark.parametrize(("headers", "expected"), LICENCES)
def test_wheel_has_a_licence_entry(sbom: ModuleType, tmp_path: Path, headers: tuple[str, ...], expected: Any) -> None:
    wheel(tmp_path / "grpcio-1.85.1-py3-none-any.whl", *headers)
    (component,) = written(sbom, tmp_path)["components"]
    assert component.get("licenses") == expected
    assert (component["name"], component["version"], component["purl"]) == (
        "grpcio",
        "1.85.1",
        "pkg:pypi/grpcio@1.85.1",
    )


def test_every_file_has_its_digest_and_paths(sbom: ModuleType, tmp_path: Path) -> None:
    wheel(tmp_path / "pyyaml-6.0.3-py3-none-any.whl")
    wheel(tmp_path / "scheduler" / "pyyaml-6.0.3-py3-none-any.whl")
    wheel(tmp_path / "scheduler" / "idna-3.20-py3-none-any.whl")
    (tmp_path / "vcuda-1.2.3-0123456789ab-x86_64.tar.gz").write_bytes(b"archive")
    found = written(sbom, tmp_path)
    files = {path for path in tmp_path.rglob("*") if path.is_file() and path.name != "sbom.cdx.json"}
    listed = {
        tmp_path / one["value"]: component["hashes"]
        for component in found["components"]
        for one in component["properties"]
    }
    assert listed == {
        path: [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}] for path in files
    }
    # Both folders contain the same wheel, which must be listed as one component.
    assert sorted(one["name"] for one in found["components"]) == ["idna", "libvgpu.so", "pyyaml"]
    (root,) = (one for one in found["dependencies"] if one["ref"] == "vgpu.fleet")
    assert sorted(root["dependsOn"]) == sorted(one["bom-ref"] for one in found["components"])
    assert (found["metadata"]["component"]["version"], found["specVersion"]) == ("1.2.3", "1.6")


def test_equal_files_give_equal_archives(sbom: ModuleType, tmp_path: Path) -> None:
    wheel(tmp_path / "idna-3.20-py3-none-any.whl")
    first = sbom.write(tmp_path, "1.2.3", BUILT).read_bytes()
    assert sbom.write(tmp_path, "1.2.3", BUILT).read_bytes() == first
    assert sbom.write(tmp_path, "1.2.4", BUILT).read_bytes() != first


def test_schema_of_cyclonedx_accepts_the_bill(sbom: ModuleType, tmp_path: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    for number, (headers, _expected) in enumerate(LICENCES):
        wheel(tmp_path / f"package{number}-1.0-py3-none-any.whl", *headers)
    text = sbom.write(tmp_path, "1.2.3", BUILT).read_text()
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    # An invalid document must be refused; otherwise a validator that accepts everything would pass this test.
    assert validator.validate_str(text.replace('"application"', '"no such type"')) is not None


@pytest.mark.parametrize("name", ["notes.txt", "other-1.0.tar.gz"])
def test_an_unknown_file_is_refused_by_name(sbom: ModuleType, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(sbom.SbomError, match=f"{name}: expected a wheel or an archive of the library"):
        sbom.write(tmp_path, "1.2.3", BUILT)
