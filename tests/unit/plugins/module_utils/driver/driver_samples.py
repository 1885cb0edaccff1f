# SPDX-License-Identifier: Apache-2.0
"""Sample data for the tests of the driver: hosts (os-release, kernel name), PCI ids of GPU models, and a simulated
machine on which the driver's setup runs.
"""

from __future__ import annotations

from ansible_collections.vgpu.fleet.plugins.module_utils.driver import choice as driver_choice
from ansible_collections.vgpu.fleet.plugins.module_utils.driver.setup import Desired, Setup
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Host
from doubles.host import Machine

# Operating systems. columns: ID, ID_LIKE, VERSION_ID and PRETTY_NAME of /etc/os-release, name of the kernel
HOSTS = {
    "debian12": ("debian", "", "12", "Debian GNU/Linux 12 (bookworm)", "6.1.0-37-amd64"),
    "debian12cloud": ("debian", "", "12", "Debian GNU/Linux 12 (bookworm)", "6.1.0-37-cloud-amd64"),
    "debian12rt": ("debian", "", "12", "Debian GNU/Linux 12 (bookworm)", "6.1.0-37-rt-amd64"),
    "debian13": ("debian", "", "13", "Debian GNU/Linux 13 (trixie)", "6.12.43+deb13-amd64"),
    "debian11": ("debian", "", "11", "Debian GNU/Linux 11 (bullseye)", "5.10.0-35-amd64"),
    "ubuntu20": ("ubuntu", "debian", "20.04", "Ubuntu 20.04.6 LTS", "5.4.0-216-generic"),
    "ubuntu22": ("ubuntu", "debian", "22.04", "Ubuntu 22.04.5 LTS", "5.15.0-153-generic"),
    "ubuntu22hwe": ("ubuntu", "debian", "22.04", "Ubuntu 22.04.5 LTS", "6.8.0-84-generic"),
    "ubuntu24": ("ubuntu", "debian", "24.04", "Ubuntu 24.04.3 LTS", "6.8.0-84-generic"),
    "ubuntu24new": ("ubuntu", "debian", "24.04", "Ubuntu 24.04.4 LTS", "7.0.0-44-generic"),
    "ubuntu26": ("ubuntu", "debian", "26.04", "Ubuntu 26.04 LTS", "7.0.0-44-generic"),
    "ubuntu24aws": ("ubuntu", "debian", "24.04", "Ubuntu 24.04.3 LTS", "6.8.0-1035-aws"),
    "rhel8": ("rhel", "fedora", "8.10", "Red Hat Enterprise Linux 8.10 (Ootpa)", "4.18.0-553.el8_10.x86_64"),
    "rocky8": ("rocky", "rhel centos fedora", "8.10", "Rocky Linux 8.10", "4.18.0-553.el8_10.x86_64"),
    "rhel9": ("rhel", "fedora", "9.6", "Red Hat Enterprise Linux 9.6 (Plow)", "5.14.0-570.12.1.el9_6.x86_64"),
    "rocky9": ("rocky", "rhel centos fedora", "9.6", "Rocky Linux 9.6", "5.14.0-570.12.1.el9_6.x86_64"),
    "rocky10": ("rocky", "rhel centos fedora", "10.0", "Rocky Linux 10.0", "6.12.0-55.12.1.el10_0.x86_64"),
    "rhel10": ("rhel", "fedora", "10.0", "Red Hat Enterprise Linux 10.0", "6.12.0-55.12.1.el10_0.x86_64"),
    "sles15": ("sles", "suse", "15.6", "SUSE Linux Enterprise Server 15 SP6", "6.4.0-150600.23.60-default"),
    "fedora": ("fedora", "", "42", "Fedora Linux 42", "6.14.0-63.fc42.x86_64"),
}
K80, M60, P100, V100, T4, A100, A30 = "0x102d", "0x13f2", "0x15f8", "0x1db4", "0x1eb8", "0x20b0", "0x20b7"
L4, H100, H200, GH200, B200, GTX1080TI, NEW = "0x27b8", "0x2330", "0x2335", "0x2342", "0x2901", "0x1b06", "0x9999"
NO_DRIVER = {"loaded_version": None, "nouveau": False, "secure_boot": False, "signing_key": None, "in_use": []}


def state(host, gpus=(T4,), driver=None, arch="x86_64", nvswitches=0):
    name, like, version, pretty, kernel = HOSTS[host]
    return {
        "os": {"id": name, "id_like": like, "version_id": version, "name": pretty, "kernel": kernel, "arch": arch},
        "pci_gpus": [{"address": f"0000:{n:02x}:00.0", "device": gpu} for n, gpu in enumerate(gpus)],
        "nvswitches": nvswitches,
        "driver": {**NO_DRIVER, **(driver or {})},
        "nvml": {"driver_version": None},
    }


def chosen(host, gpus=(T4,), driver=None, arch="x86_64", nvswitches=0, **wanted):
    return driver_choice.choose(state(host, gpus, driver, arch, nvswitches), wanted)


BLACKLIST = "/etc/modprobe.d/vgpu-nouveau.conf"
RECORD = "/var/lib/vgpu/baseline/setup.json"
DESIRED = Desired(
    files={BLACKLIST: "blacklist nouveau\n"},
    initramfs=["update-initramfs", "-u", "-k", "all"],
    modules=["nvidia", "nvidia_uvm"],
    services=["nvidia-persistenced.service"],
    record=RECORD,
)
PERSISTENCED, FABRIC = "nvidia-persistenced.service", "nvidia-fabricmanager.service"
GRIDD, CONF, TOKEN = "nvidia-gridd.service", "/etc/nvidia/gridd.conf", "/etc/nvidia/token.tok"


class DriverHost(Machine):
    def setup(self, state: str = "present", check: bool = False, desired: Desired = DESIRED) -> Setup:
        run = Setup(desired, Host(str(self.root), run=self.run), check)
        getattr(run, state)()
        return run
