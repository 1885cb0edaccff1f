# SPDX-License-Identifier: Apache-2.0
"""Write the bill of materials (CycloneDX 1.6, JSON) of an artefact's folder prebuilt/.

Each wheel is a component with its version, licence, package URL and SHA-256. Each archive of libvgpu.so is a component
too, without a package URL. A wheel that has the same bytes for several platforms is one component with several paths.
The same files give the same bytes: the serial number follows from the components, and the time is fixed.
"""

from __future__ import annotations

import hashlib
import json
import uuid
import zipfile
from collections.abc import Iterator
from datetime import datetime, timezone
from email.message import Message
from email.parser import Parser
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

NAME = "sbom.cdx.json"
OURS = "Apache-2.0"


class SbomError(ValueError):
    """Raised if a file of the folder is neither a wheel nor an archive of the library; the text names the file."""


def write(prebuilt: Path, version: str, built: datetime) -> Path:
    """Writes ``prebuilt``/sbom.cdx.json for the collection of ``version``; returns its path. Raises SbomError."""
    root = Component(
        type=ComponentType.APPLICATION,
        name="vgpu.fleet",
        version=version,
        bom_ref="vgpu.fleet",
        licenses=[LicenseFactory().make_from_string(OURS)],
    )
    bom = Bom()
    bom.metadata.component = root
    bom.metadata.timestamp = built.astimezone(timezone.utc)
    found = list(components(prebuilt))
    for one in found:
        bom.components.add(one)
    bom.register_dependency(root, found)
    digests = sorted(str(one.bom_ref.value) for one in found)
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps([version, *digests]))
    target = prebuilt / NAME
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)
    target.write_text(text + "\n", encoding="utf-8")
    return target


def components(prebuilt: Path) -> Iterator[Component]:
    """Yields a component for each different file content. Its bom-ref is the SHA-256, its properties are the paths."""
    paths: dict[str, list[Path]] = {}
    for path in sorted(one for one in prebuilt.rglob("*") if one.is_file() and one.name != NAME):
        paths.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), []).append(path)
    for digest, files in paths.items():
        first = files[0]
        if first.suffix == ".whl":
            component = wheel(first)
        elif first.name.startswith("vcuda-") and first.name.endswith(".tar.gz"):
            component = library(first)
        else:
            raise SbomError(f"{first}: expected a wheel or an archive of the library; remove the file and build again")
        component.bom_ref.value = digest
        component.hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=digest))
        for path in files:
            component.properties.add(Property(name="vgpu.fleet:path", value=path.relative_to(prebuilt).as_posix()))
        yield component


def wheel(path: Path) -> Component:
    """Returns the component of a wheel, with name, version and licence from its METADATA."""
    with zipfile.ZipFile(path) as bundle:
        (name,) = (one for one in bundle.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(bundle.read(name).decode(), headersonly=True)
    stated = licence(metadata)
    return Component(
        type=ComponentType.LIBRARY,
        name=metadata["Name"],
        version=metadata["Version"],
        purl=PackageURL("pypi", name=metadata["Name"], version=metadata["Version"]),
        licenses=[LicenseFactory().make_from_string(stated)] if stated else [],
    )


def licence(metadata: Message) -> str:
    """Returns the licence: the licence expression, or the first line of the free text, or the last part of the first
    classifier.
    """
    stated = metadata["License-Expression"] or str(metadata["License"] or "").strip().partition("\n")[0]
    classifiers = [one for one in metadata.get_all("Classifier", []) if one.startswith("License ::")]
    return str(stated or (classifiers[0].split(" :: ")[-1] if classifiers else ""))


def library(path: Path) -> Component:
    """Returns the component of the library's archive. Its file name is vcuda-VERSION-DIGEST-ARCH.tar.gz, which
    ``module_utils/library/build.py`` defines.
    """
    _name, version, digest, arch = path.name[: -len(".tar.gz")].split("-")
    return Component(
        type=ComponentType.LIBRARY,
        name="libvgpu.so",
        version=f"{version}+{digest}.{arch}",
        licenses=[LicenseFactory().make_from_string(OURS)],
    )
