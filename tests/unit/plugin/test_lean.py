# SPDX-License-Identifier: Apache-2.0
"""What the program does not load: each in a process of its own, for a module that was imported stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .conftest import PLUGIN

AS_MAIN = """
import sys
sys.path[:0] = {path!r}
from vgpu_plugin import lean
{lean}
import vgpu_plugin.daemon, vgpu_plugin.gpus
heavy = ("_hashlib", "_ssl", "asyncio", "yaml", "http.client", "google.protobuf.json_format")
print([one for one in heavy if one in sys.modules])
{after}
"""
LEAN = "lean.without_openssl(); lean.without_asyncio()"


def said(lean: str, after: str = "") -> list[str]:
    path = [one for one in sys.path if "vgpu" in one or "native" in one] + [str(PLUGIN / "src")]
    script = AS_MAIN.format(path=path, lean=lean, after=after)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def test_what_is_not_needed_is_not_loaded():
    assert said(LEAN) == ["[]"]


def test_it_would_be_loaded_otherwise():
    (found,) = said("")
    assert "_ssl" in found
    assert "_hashlib" in found
    assert "asyncio" in found


@pytest.mark.parametrize(
    "after",
    [
        "import ssl; print(ssl.create_default_context().verify_mode.name)",
        "import hashlib; print(hashlib.sha256(b'').hexdigest()[:8] == 'e3b0c442' and 'CERT_REQUIRED')",
        "import asyncio; asyncio.run(asyncio.sleep(0)); print('CERT_REQUIRED')",
        "from vgpu_plugin import kube_api; print(kube_api.Access('https://x').context().verify_mode.name)",
    ],
)
def test_what_needs_it_later_has_it(after):
    assert said(LEAN, after)[1] == "CERT_REQUIRED"


def test_python_without_digests_of_its_own_keeps_those_of_openssl():
    """As Fedora and RHEL build it (--with-builtin-hashlib-hashes=blake2)."""
    lacks = "sys.modules.update(dict.fromkeys(['_md5', '_sha1', '_sha2', '_sha256', '_sha512', '_sha3']))"
    after = "import hashlib; print(hashlib.sha256(b'').hexdigest()[:8])"
    assert said(f"{lacks}; {LEAN}", after)[1] == "e3b0c442"


def test_servers_are_quiet():
    """By grpc's own name for it: a release that names it otherwise makes an idle program dearer, and this fail."""
    look = "import grpc._server as s; print(s._DEALLOCATED_SERVER_CHECK_PERIOD_S)"
    assert said(LEAN, look)[1] == "1.0"
    assert said(f"{LEAN}; lean.with_quiet_servers()", look)[1] == "60.0"
