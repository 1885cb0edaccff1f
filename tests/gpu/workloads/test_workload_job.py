# SPDX-License-Identifier: Apache-2.0
"""Checks job.yaml against the types of the Kubernetes client, which come from the API server's OpenAPI document.

Each field must be known and have the right type, and no required field may be missing.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

HERE = Path(__file__).resolve().parent
PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object}


def build(kind: str, value: Any, path: str) -> Any:
    """Converts a manifest's value to the Kubernetes client's object. Raises ValueError with the field's path."""
    listed, mapped = re.fullmatch(r"List\[(.+)\]", kind), re.fullmatch(r"Dict\[str, (.+)\]", kind)
    if listed:
        if not isinstance(value, list):
            raise ValueError(f"{path}: expected a list, found {value!r}")
        return [build(listed[1], one, f"{path}[{number}]") for number, one in enumerate(value)]
    if mapped:
        if not isinstance(value, dict):
            raise ValueError(f"{path}: expected a mapping, found {value!r}")
        return {name: build(mapped[1], one, f"{path}.{name}") for name, one in value.items()}
    if kind in PLAIN:
        if kind == "str" and ".limits." in path and isinstance(value, int):
            return str(value)  # The API accepts a number as a quantity, but the client's type is str.
        if not isinstance(value, PLAIN[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise ValueError(f"{path}: expected {kind}, found {value!r}")
        return value
    maker = getattr(client, kind)
    names = {wire: name for name, wire in maker.attribute_map.items()}
    strangers = sorted(set(value) - set(names))
    if strangers:
        raise ValueError(f"{path}.{strangers[0]}: {kind} has no such field")
    fields = {
        names[wire]: build(maker.openapi_types[names[wire]], one, f"{path}.{wire}") for wire, one in value.items()
    }
    try:
        return maker(**fields)
    except ValueError as fault:
        raise ValueError(f"{path}: {' '.join(str(fault).split())}") from None


def job() -> dict[str, Any]:
    return dict(yaml.safe_load((HERE / "job.yaml").read_text()))


def test_job_is_valid_for_the_api() -> None:
    made = build("V1Job", job(), "job")
    # Converted back, the object equals the manifest, so no field was lost.
    written = job()
    limits = written["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    limits.update({name: str(value) for name, value in limits.items()})
    assert client.ApiClient().sanitize_for_serialization(made) == written
    assert (made.api_version, made.kind) == ("batch/v1", "Job")
    # Rules that the API server checks in addition to the types.
    assert made.spec.template.spec.restart_policy in ("Never", "OnFailure")
    names = [one.name for one in made.spec.template.spec.volumes]
    assert {mount.name for mount in made.spec.template.spec.containers[0].volume_mounts} <= set(names)


# columns: path of a field in job.yaml, invalid value; expected words of the error message
@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (["spec", "backofLimit"], 0, r"job.spec.backofLimit: V1JobSpec has no such field"),
        (["spec", "backoffLimit"], "none", r"job.spec.backoffLimit: expected int, found 'none'"),
        (["spec", "template", "spec", "containers"], {}, r"containers: expected a list"),
        (
            ["spec", "template", "spec", "containers", 0, "name"],
            None,
            r"containers\[0\].name: expected str, found None",
        ),
        (["spec", "template", "spec", "containers", 0, "resources", "limit"], {}, "V1ResourceRequirements has no such"),
        (["spec", "template", "spec", "volumes", 0, "configmap"], {}, "V1Volume has no such field"),
    ],
)
def test_invalid_job_is_found(place: list[Any], value: Any, words: str) -> None:
    wrong = copy.deepcopy(job())
    at: Any = wrong
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    with pytest.raises(ValueError, match=words):
        build("V1Job", wrong, "job")


@pytest.mark.parametrize("field", ["name", "mountPath"])
def test_missing_required_field_is_found(field: str) -> None:
    wrong = copy.deepcopy(job())
    del wrong["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0][field]
    with pytest.raises(ValueError, match=rf"volumeMounts\[0\]: .*{field}.* Field required"):
        build("V1Job", wrong, "job")
