# SPDX-License-Identifier: Apache-2.0
"""Writes values.schema.json, the JSON Schema of the chart's values. The types of group variables come from the
collection's table of variables (config/variables.py).

The schema is stricter than the table in one point: it refuses a number or a boolean in quotes. It does not check
relations between values; the pod that writes node.yaml checks these.
"""

from __future__ import annotations

from typing import Any

# The scheduler's schema uses the classes of this package. The same classes, imported under another package name, would
# be different classes, so isinstance() would not recognise the scheduler's values.
from vgpu_plugin._shared.config import kinds
from vgpu_plugin._shared.config import variables as schema
from vgpu_scheduler.settings import SCHEMA as SCHEDULER

from chart.values import NOT_IN_A_CHART

DRAFT = "http://json-schema.org/draft-07/schema#"
# A decimal number above 0.
ABOVE_ZERO = r"^([0-9]{0,8}[1-9][0-9]{0,8}(\.[0-9]{1,12})?|[0-9]{1,9}\.[0-9]{0,11}[1-9][0-9]{0,11})$"
PATH = {"type": "string", "pattern": r"^(/[-._a-zA-Z0-9]+)+$"}
IMAGE = {"type": "string", "pattern": r"^[^\s{}\"']+$"}
WORDS = {"type": "array", "items": {"type": "string", "pattern": r"^--"}}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
TOLERATIONS = {"type": "array", "items": {"type": "object"}}
NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"


def of(kind: kinds.Kind) -> dict[str, Any]:
    """Returns the JSON Schema of one kind of value. Raises TypeError for a kind that this function does not know."""
    if isinstance(kind, schema.NamedConfig):
        fields = kind.record().fields
        return of(kinds.Record({key: one for key, one in fields.items() if key not in schema.ONLY_FOR_THE_HOST}))
    if isinstance(kind, kinds.Int):
        return {"type": "integer", "minimum": kind.low, "maximum": kind.high}
    if isinstance(kind, kinds.Bool):
        return {"type": "boolean"}
    if isinstance(kind, kinds.Scaling):
        return {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": ABOVE_ZERO}]}
    if isinstance(kind, kinds.Choice):
        return {"enum": list(kind.words)}
    if isinstance(kind, kinds.Text):
        return {"type": "string", **({"pattern": pattern(kind)} if kind.pattern else {})}
    if isinstance(kind, kinds.Either):
        return {"anyOf": [of(one) for one in kind.kinds]}
    if isinstance(kind, kinds.ListOf):
        return {"type": "array", "items": of(kind.kind)}
    if isinstance(kind, kinds.Record):
        return _record(kind)
    if isinstance(kind, kinds.Mapping):
        return {"type": "object", "propertyNames": of(kind.key), "additionalProperties": of(kind.item)}
    raise TypeError(f"tools/chart/schema.py does not know {type(kind).__name__}; describe it there")


def pattern(kind: kinds.Text) -> str:
    """Returns the pattern for JSON Schema, where $ matches only the end of the text and \\Z does not exist."""
    assert kind.pattern is not None
    return kind.pattern.pattern.replace("\\Z", "$")


def _record(kind: kinds.Record) -> dict[str, Any]:
    out: dict[str, Any] = {
        "type": "object",
        "properties": {key: of(one) for key, one in kind.fields.items()},
        "additionalProperties": False,
    }
    if kind.required:
        out["required"] = list(kind.required)
    if kind.at_least_one:
        out["minProperties"] = 1
    return out


def variables() -> dict[str, Any]:
    """Returns the schema of the group variables that a chart may set."""
    properties = {}
    for name, variable in schema.VARIABLES.items():
        if name in NOT_IN_A_CHART:
            continue
        found = of(variable.kind)
        if name == "vgpu_sharing":
            # The other values of vgpu_sharing need changes on the host, such as a MIG geometry or the MPS daemon.
            found = {"enum": list(schema.BY_LABEL)}
        properties[name] = {"description": variable.about, **found}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def of_values() -> dict[str, Any]:
    """Returns the whole schema of values.yaml."""
    config = {key: kind for key, kind in SCHEDULER.fields.items() if key != "resourceNames"}
    scheduler = {
        "enabled": {"type": "boolean"},
        "image": IMAGE,
        "kubeSchedulerImage": {"type": "string", "pattern": r"^[^\s{}\"']*$"},
        "replicas": {"type": "integer", "minimum": 1},
        "nodeSelector": TEXTS,
        "tolerations": TOLERATIONS,
        "metricsNamespaces": {"type": "array", "minItems": 1, "items": {"type": "string", "pattern": NAME}},
        "options": WORDS,
        "config": of(kinds.Record(config)),
    }
    properties = {
        "image": IMAGE,
        "imagePullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
        "imagePullSecrets": {"type": "array", "items": {"type": "string"}},
        "nodeSelector": {**TEXTS, "minProperties": 1},
        "tolerations": TOLERATIONS,
        "kubeletDir": PATH,
        "libraryRoot": PATH,
        "environment": TEXTS,
        "options": WORDS,
        "variables": variables(),
        "scheduler": {
            "type": "object",
            "properties": scheduler,
            "additionalProperties": False,
            # All keys are required, because in Helm a null removes the default of a key.
            "required": list(scheduler),
            "if": {"properties": {"enabled": {"const": True}}},
            "then": {"properties": {"kubeSchedulerImage": {"minLength": 1}}},
        },
        # Helm adds this key if the chart is a subchart.
        "global": {"type": "object"},
    }
    required = [name for name in properties if name != "global"]
    return {
        "$schema": DRAFT,
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
