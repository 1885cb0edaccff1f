# SPDX-License-Identifier: Apache-2.0
"""Generates the gRPC modules of src/vgpu_plugin/_proto/*.proto into a folder. Needs grpcio-tools.

setup.py runs this program for wheels and the Makefile runs it for the source tree, so that both get the same code.
"""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
PROTOS = ("deviceplugin", "podresources", "admin", "plugin_registration", "dra_v1", "dra_v1beta1", "dra_health")


def generate(out: Path) -> None:
    """Writes <out>/vgpu_plugin/_proto/<name>_pb2.py, .pyi and _pb2_grpc.py."""
    from grpc_tools import protoc

    out.mkdir(parents=True, exist_ok=True)
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    command = [
        "protoc",
        f"-I{SOURCE}",
        f"-I{well_known}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
    ]
    command += [str(SOURCE / "vgpu_plugin" / "_proto" / f"{name}.proto") for name in PROTOS]
    if protoc.main(command) != 0:
        raise SystemExit(f"protoc could not generate from {SOURCE}/vgpu_plugin/_proto; its message is above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
