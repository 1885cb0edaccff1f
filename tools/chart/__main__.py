# SPDX-License-Identifier: Apache-2.0
"""Writes the Helm chart and the Kustomize bases. `make chart` runs this program; docs/chart.md describes their use."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "native" / "plugin" / "src")]

import images  # noqa: E402

from chart import schema, templates, values  # noqa: E402
from plugins.module_utils.config import variables as table  # noqa: E402
from plugins.module_utils.kube import chart_manifests, device_plugin_manifests  # noqa: E402

NAME = "vgpu-fleet"
KUBE_SCHEDULER = "registry.k8s.io/kube-scheduler"
# Maps each value to its comment in values.yaml.
ABOUT = {
    "image": "Image of the device plugin, library and arbiter. `make images` builds it; push it to your registry",
    "imagePullPolicy": "Set Never if the image was loaded on each node",
    "imagePullSecrets": "Names of secrets in the release's namespace",
    "nodeSelector": "Nodes that share their GPUs. Nodes with vgpu.fleet/device-plugin=absent lose our files",
    "tolerations": "Tolerations in addition to those for nvidia.com/gpu and CriticalAddonsOnly",
    "kubeletDir": "The kubelet's folder on each node",
    "libraryRoot": "Folder of the library's versions on each node. Set another one if /usr/local is read-only",
    "environment": "Additional environment variables of the plugin",
    "options": "Command-line options of the plugin, such as --log-format=json",
    "scheduler": "Scheduler for pods that request memory and cores. Needs vgpu_slice_sizing: requested",
}
NOTES = f"""\
Nodes that match nodeSelector get slices. By default these are the nodes with this label:

  kubectl label node NODE {device_plugin_manifests.NODE_LABEL}={device_plugin_manifests.LABEL_VALUE}
  kubectl -n {{{{ .Release.Namespace }}}} rollout status daemonset/{device_plugin_manifests.NAME}
  kubectl describe node NODE | grep nvidia.com/

Before `helm uninstall`, remove our files from the nodes. Afterwards nothing removes them.

  kubectl label node NODE {device_plugin_manifests.NODE_LABEL}={chart_manifests.ABSENT} --overwrite
  kubectl -n {{{{ .Release.Namespace }}}} wait daemonset/{chart_manifests.REMOVAL} \\
    --for=jsonpath='{{.status.numberReady}}'=1 --timeout=5m
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chart", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".build" / "chart")
    parser.add_argument("--registry", default="localhost", help="registry in the images' names (default: localhost)")
    parser.add_argument(
        "--namespace", default="kube-system", help="namespace of the Kustomize bases (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    names = values.Images(*images.names(given.registry))
    write(given.out / NAME, helm(names))
    write(given.out / "kustomize", kustomize(names, given.namespace))
    print(f"{given.out / NAME}\n{given.out / 'kustomize'}")
    return 0


def write(folder: Path, files: dict[str, str]) -> None:
    """Replaces the folder by one with exactly these files. ``files`` maps the path in the folder to the text."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def helm(names: values.Images) -> dict[str, str]:
    """Returns the files of the Helm chart, a map from path to text."""
    version = images.collection_version()
    about = {
        "apiVersion": "v2",
        "name": NAME,
        "description": "Slices of NVIDIA GPUs with limited memory and compute time, for nodes that have only a driver",
        "type": "application",
        "version": version,
        "appVersion": names.plugin.rpartition(":")[2],
        # The chart contains ValidatingAdmissionPolicies, which are generally available from 1.30.
        "kubeVersion": ">=1.30.0-0",
        "home": "https://github.com/vgpu-fleet/vgpu.fleet",
        "icon": "https://raw.githubusercontent.com/vgpu-fleet/vgpu.fleet/main/docs/fleet.png",
    }
    return {
        "Chart.yaml": templates.HEAD + yaml.safe_dump(about, sort_keys=False, width=1000),
        "values.yaml": values_text(names),
        "values.schema.json": json.dumps(schema.of_values(), indent=1) + "\n",
        "templates/_helpers.tpl": templates.HELPERS,
        "templates/node.yaml": templates.node_template(),
        "templates/scheduler.yaml": templates.scheduler_template(),
        "templates/NOTES.txt": NOTES,
    }


def values_text(names: values.Images) -> str:
    lines = [templates.HEAD, "# docs/chart.md has examples; values.schema.json checks every value.\n"]
    for name, value in values.defaults(names).items():
        if name == "variables":
            lines.append("\n# Group variables, by the names of docs/variables.md. The list shows the defaults.\n")
            lines += [f"#   {line}\n" for line in variable_lines()]
        else:
            lines.append(f"\n# {ABOUT[name]}.\n")
        lines.append(yaml.safe_dump({name: value}, sort_keys=False, width=1000))
    return "".join(lines)


def variable_lines() -> list[str]:
    chosen = {name: one for name, one in table.VARIABLES.items() if name not in values.NOT_IN_A_CHART}
    shown = {name: f"{name}: {json.dumps(one.default)}" for name, one in chosen.items() if one.default is not None}
    shown.update({name: f"{name}:" for name, one in chosen.items() if one.default is None})
    width = max(len(one) for one in shown.values())
    return [f"{shown[name]:{width}}  # {one.about}" for name, one in chosen.items()]


def kustomize(names: values.Images, namespace: str) -> dict[str, str]:
    """Returns the files of two Kustomize bases: the device plugin with default values, and the scheduler."""
    wanted = values.defaults(names)
    wanted["scheduler"]["kubeSchedulerImage"] = KUBE_SCHEDULER
    node = [one for one in values.node_objects(wanted, namespace) if one["kind"] != "ConfigMap"]
    # Kustomize adds a digest of the variables to the ConfigMap's name, so changed variables restart the pods.
    generator: dict[str, Any] = {"name": chart_manifests.VARIABLES, "namespace": namespace}
    generator["files"] = [chart_manifests.VARIABLES_FILE]
    generator["options"] = {"labels": {"app.kubernetes.io/name": device_plugin_manifests.NAME}}
    return {
        "node/kustomization.yaml": kustomization(["objects.yaml"], configMapGenerator=[generator]),
        "node/objects.yaml": as_yaml(node),
        f"node/{chart_manifests.VARIABLES_FILE}": values.compact(wanted["variables"]) + "\n",
        "scheduler/kustomization.yaml": kustomization(["objects.yaml"]),
        "scheduler/objects.yaml": as_yaml(values.scheduler_objects(wanted, namespace)),
    }


def kustomization(resources: list[str], **more: Any) -> str:
    content = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources, **more}
    return templates.HEAD + yaml.safe_dump(content, sort_keys=False)


def as_yaml(objects: list[dict[str, Any]]) -> str:
    parts = (yaml.dump(one, Dumper=templates.Lines, sort_keys=False, width=1 << 20) for one in objects)
    return templates.HEAD + "".join("---\n" + one for one in parts)


if __name__ == "__main__":
    sys.exit(main())
