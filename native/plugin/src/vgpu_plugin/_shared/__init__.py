# SPDX-License-Identifier: Apache-2.0
"""The shared core: the files of plugins/module_utils, which Ansible's modules and the node programs have in common.

A wheel carries copies (setup.py makes them); a source tree reads the originals. The shared modules import each other
relatively, because Ansible and this package import them under different names.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

_here = Path(__file__).resolve().parent
if not (_here / "config").is_dir():
    __path__.append(str(_here.parents[4] / "plugins" / "module_utils"))

if TYPE_CHECKING:  # This is only for mypy. At run time Python finds these modules by __path__.

    def __getattr__(name: str) -> Any: ...
