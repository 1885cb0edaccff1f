# SPDX-License-Identifier: Apache-2.0
"""Generated gRPC code of the .proto files next to this file.

A wheel carries the generated modules. In a source tree, ``make -C native/plugin`` generates them in
native/build/plugin.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

_here = Path(__file__).resolve().parent
if not (_here / "deviceplugin_pb2.py").exists():
    _generated = _here.parents[3] / "build" / "plugin" / "vgpu_plugin" / "_proto"
    if not (_generated / "deviceplugin_pb2.py").exists():
        raise ImportError(f"{_generated} contains no generated gRPC code; run: make -C native/plugin proto")
    __path__.append(str(_generated))

if TYPE_CHECKING:  # This is only for mypy. At run time Python finds these modules by __path__.

    def __getattr__(name: str) -> Any: ...
