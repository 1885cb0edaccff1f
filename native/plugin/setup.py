# SPDX-License-Identifier: Apache-2.0
"""Adds files to the wheel that the source tree has only once: generated gRPC code, the shared core, and the version."""

from __future__ import annotations

import ast
import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
CORE = HERE.parents[1] / "plugins" / "module_utils"
# The version as in folder names and Status, e.g. 0.1.0-1f2e3d4c5b6a; in the wheel's name it is 0.1.0+1f2e3d4c5b6a.
VERSION = os.environ.get("VGPU_PLUGIN_VERSION", "0.0.0-source")

# Leaves out programs that would fail with an ImportError: nodes do not have the packages of vgpu_scheduler, and the
# scheduler's image does not have gRPC.
PARTS = os.environ.get("VGPU_PLUGIN_PARTS", "all")
if PARTS not in ("node", "scheduler", "all"):
    raise SystemExit(f'VGPU_PLUGIN_PARTS is "{PARTS}"; expected node, scheduler or all')
FOLDERS = sorted((HERE / "src" / "vgpu_plugin").glob("*/__init__.py"))
PACKAGES = ["vgpu_plugin", *(f"vgpu_plugin.{one.parent.name}" for one in FOLDERS)]
PROGRAMS = []
if PARTS != "scheduler":
    PACKAGES.append("vgpu_kubectl")
    PROGRAMS += ["kubectl-vgpu = vgpu_kubectl.main:main", "kubectl_complete-vgpu = vgpu_kubectl.completion:main"]
    PROGRAMS += ["vgpu-device-plugin = vgpu_plugin.main:main", "vgpuctl = vgpu_plugin.ctl.main:main"]
    PROGRAMS.append("vgpu-node-setup = vgpu_plugin.node_setup:main")
if PARTS != "node":
    PACKAGES.append("vgpu_scheduler")
    PROGRAMS.append("vgpu-scheduler = vgpu_scheduler.main:main")

# A temporary build folder: one in the tree would keep deleted source files, and pack them.
SCRATCH = tempfile.mkdtemp(prefix="vgpu-plugin-build-")
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)


def shared() -> list[str]:
    """Returns the modules of the core that our packages import."""
    found = set()
    for path in (HERE / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
            if "_shared" in parts[:-1]:
                base = ".".join(parts[parts.index("_shared") + 1 :])
                found.update([base] if source(base).exists() else [f"{base}.{alias.name}" for alias in node.names])
    return sorted(found)


def closure(names: list[str]) -> list[str]:
    """Returns the modules and all modules of the core that they import, by their relative imports."""
    found: list[str] = []
    open_names = list(names)
    while open_names:
        name = open_names.pop()
        if name in found:
            continue
        found.append(name)
        for node in ast.walk(ast.parse(source(name).read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            if node.level:
                # One dot is the module's own package, two dots are the core.
                parts = name.split(".")[: -node.level] + (node.module.split(".") if node.module else [])
                base = ".".join(parts)
                open_names += [base] if source(base).exists() else [f"{base}.{alias.name}" for alias in node.names]
            elif (node.module or "").startswith("ansible"):
                raise SystemExit(f"{source(name)} imports {node.module}; the shared core may only import relatively")
    return sorted(found)


def source(name: str) -> Path:
    """Returns the file of a module of the core: host/files.py for ``host.files``."""
    return CORE / (name.replace(".", "/") + ".py")


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        package = Path(self.build_lib) / "vgpu_plugin"
        sys.path.insert(0, str(HERE / "tools"))
        import generate_proto

        generate_proto.generate(Path(self.build_lib))
        for name in closure(shared()):
            target = package / "_shared" / source(name).relative_to(CORE)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source(name), target)
        (package / "VERSION").write_text(VERSION + "\n")


setup(
    packages=PACKAGES,
    entry_points={"console_scripts": PROGRAMS},
    version=VERSION.replace("-", "+", 1),
    cmdclass={"build_py": BuildPy},
    options={"build": {"build_base": SCRATCH}, "egg_info": {"egg_base": SCRATCH}},
)
