# SPDX-License-Identifier: Apache-2.0
"""The node configuration (node.yaml) in the form that this program uses. Settings that the program cannot carry out are
refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from .._shared.config import node_config, sharing, slices
from .._shared.config.sharing import Piece
from ..errors import Fatal
from ..inject import handover
from ..node.gpus import Gpu
from . import options
from .options import Option


@dataclass(frozen=True)
class Settings:
    """The settings of the node. ``config`` is the parsed node.yaml; each property returns one setting."""

    path: Path
    sha256: str
    config: dict[str, Any]
    warnings: tuple[str, ...] = ()

    def refuse_impossible(self, has_api: bool) -> None:
        """Raises Fatal for valid settings that cannot take effect; ignoring them would leave GPUs unlimited."""
        sections = self.config.get("sharing") or {}
        if self.claims and not has_api:
            text = "flags.allocation: dra reads claims from the API server; give --kubeconfig"
            raise Fatal(f"{self.path}: {text}")
        if self.requested and not has_api:
            text = "sharing.vcuda.sliceSizing: requested reads the sizes of pods from the API server; give --kubeconfig"
            raise Fatal(f"{self.path}: {text}")
        if sections.get("mps") and not self.flags.get("mpsRoot"):
            text = "sharing.mps needs flags.mpsRoot, the folder of the MPS daemons' pipes, such as /run/nvidia/mps"
            raise Fatal(f"{self.path}: {text}")
        strategies = self.strategies
        if strategies != ("auto",) and (not strategies or "auto" in strategies):
            text = f"auto must be the only strategy, found {', '.join(strategies) or 'nothing'}; leave it out"
            raise Fatal(f"{self.path}: flags.plugin.deviceListStrategy: {text}")

    @property
    def vcuda(self) -> dict[str, Any]:
        return slices.vcuda_of(self.config) or {}

    @property
    def resource(self) -> str:
        return str(node_config.resource_name(self.config))

    @property
    def library_root(self) -> Path:
        # The folder of libvgpu, our library in the containers. It also contains the program that sets the driver's
        # memory limit for a container, so it is also needed on a node where libvgpu limits no slices.
        root = self.vcuda.get("libraryRoot") or self.plugin_flags.get("libraryRoot")
        return Path(root or node_config.LIBRARY_ROOT)

    @property
    def merge(self) -> bool:
        return bool(self.vcuda.get("multiSlice", "distinct") == "merge")

    @property
    def watch(self) -> str:
        """The policy for a process that uses a GPU without the library's limits: only report it, or kill it."""
        return str(self.vcuda.get("watch", "report"))

    @property
    def memory_enforcement(self) -> str:
        """What enforces the memory limits, as configured: ``auto``, ``driver`` or ``library``."""
        return str(self.plugin_flags.get("memoryEnforcement", "auto"))

    @property
    def sharing(self) -> str:
        """The sharing mode: one of the values of vgpu_sharing. If node.yaml has several sections below ``sharing``, the
        first one in the order ``vcuda``, ``mps``, ``timeSlicing`` counts.
        """
        sections = self.config.get("sharing") or {}
        names = (("vcuda", sharing.VCUDA), ("mps", sharing.MPS), ("timeSlicing", sharing.TIME_SLICING))
        return next((mode for section, mode in names if section in sections), sharing.NONE)

    @property
    def requested(self) -> bool:
        """Whether containers get the size that their pod requested, instead of an equal slice."""
        return bool(self.vcuda.get("sliceSizing", "equal") == "requested")

    @property
    def claims(self) -> bool:
        """Whether pods get GPUs by claims (Dynamic Resource Allocation) instead of the device plugin."""
        return bool(self.flags.get("allocation", "device-plugin") == "dra")

    @property
    def legacy_preferred(self) -> bool:
        """Whether this program spreads slices, for a kubelet that cannot ask for a preference."""
        return bool(self.vcuda.get("legacyPreferred", False))

    @property
    def fail_on_init_error(self) -> bool:
        return bool((self.config.get("flags") or {}).get("failOnInitError", True))

    @property
    def flags(self) -> dict[str, Any]:
        return self.config.get("flags") or {}

    @property
    def plugin_flags(self) -> dict[str, Any]:
        return self.flags.get("plugin") or {}

    @property
    def packed(self) -> bool:
        return bool(self.plugin_flags.get("sharedDevicesAllocationPolicy") == "packed")

    @property
    def driver_root(self) -> Path:
        return Path(self.flags.get("nvidiaDriverRoot") or "/")

    @property
    def dev_root(self) -> Path:
        return Path(self.flags.get("nvidiaDevRoot") or self.driver_root)

    @property
    def strategies(self) -> tuple[str, ...]:
        """The configured values of deviceListStrategy; ``("auto",)`` leaves the choice to this program."""
        strategy = self.plugin_flags.get("deviceListStrategy", "auto")
        return (strategy,) if isinstance(strategy, str) else tuple(strategy)

    def hand_over(self, host_root: Path, can_cdi: bool) -> handover.HandOver:
        """Returns how containers get their GPUs. ``can_cdi``: whether CDI (Container Device Interface) is possible,
        because the driver's files were found on this host.
        """
        strategies, reason, follow = self.strategies, "as configured", None
        if strategies == ("auto",):
            chosen, reason = handover.choose(host_root)
            if chosen == handover.CDI_CRI and not can_cdi:
                chosen, reason = handover.ENVVAR, f"{reason}, but no libcuda.so.1 is found on this host"
            strategies = (chosen,)
            follow = None if chosen == handover.CDI_CRI else host_root
        return handover.HandOver(
            strategies,
            self.plugin_flags.get("deviceIDStrategy") or "uuid",
            bool(self.plugin_flags.get("passDeviceSpecs")),
            self.plugin_flags.get("cdiAnnotationPrefix") or handover.ANNOTATION_PREFIX,
            self.dev_root,
            reason,
            follow,
        )

    def limit_flags(self, gpus: list[Gpu]) -> dict[str, Any]:
        """Returns the fields of a limits file (which the library in a container reads) that are equal for all slices,
        with the keys of abi.files.pack_limits.
        """
        vcuda = self.vcuda
        shares = [slices.share_of(gpu.facts(), self.config) for gpu in gpus]
        return {
            "count_context": bool(vcuda.get("countContext", True)),
            "oom_killer": bool(vcuda.get("oomKiller", False)),
            "oversubscribe": any(share is not None and Fraction(share.memory_scaling) > 1 for share in shares),
            "core_policy": "disable" if vcuda.get("disableCoreLimit") else vcuda.get("corePolicy", "default"),
            "log_level": int(vcuda.get("logLevel", 1)),
        }


def load(path: Path, chosen: list[tuple[Option, str, str]] | None = None, has_api: bool = False) -> Settings:
    """Reads node.yaml, applies flags and environment variables, and checks the result. ``has_api``: whether an API
    server is configured. Raises Fatal with all errors.
    """
    try:
        raw = path.read_bytes()
    except OSError as fault:
        raise Fatal(f"{path}: {fault.strerror}; the role device_plugin writes it") from None
    config = parse(raw.decode("utf-8", "replace"), path)
    places = options.apply(config, chosen or []) if isinstance(config, dict) else {}
    try:
        clean, warnings = node_config.check(config, str(path))
    except node_config.ConfigError as fault:
        findings = [f"{path}: {one}{_said(one.path, places)}" for one in fault.findings]
        raise Fatal("; ".join(findings)) from None
    settings = Settings(path, hashlib.sha256(raw).hexdigest(), clean, tuple(f"{path}: {one}" for one in warnings))
    settings.refuse_impossible(has_api)
    return settings


def _said(place: str, places: dict[str, str]) -> str:
    return f" (set by {places[place]})" if place in places else ""


def parse(text: str, path: Path) -> Any:
    """Parses JSON, which our role writes, or YAML, which people and NVIDIA's tools write. Raises Fatal."""
    try:
        return json.loads(text, parse_float=str)  # Numbers are kept as text, so that a scaling factor keeps its digits.
    except RecursionError:
        raise Fatal(f"{path}: text: nested too deeply to be a configuration") from None
    except ValueError as fault:
        finding = fault
    # yaml is imported only here, because its import takes longer than reading a JSON file.
    import yaml

    class Loader(yaml.SafeLoader):
        """Keeps numbers with a decimal point as text, so that a scaling factor keeps its digits."""

    Loader.add_constructor("tag:yaml.org,2002:float", lambda _loader, node: node.value)
    try:
        config = yaml.load(text, Loader)
    except RecursionError:
        raise Fatal(f"{path}: text: nested too deeply to be a configuration") from None
    except yaml.YAMLError as fault:
        where = " ".join(str(fault).split())
        raise Fatal(f"{path}: text: not valid JSON: {finding}; nor YAML: {where}") from None
    if not isinstance(config, dict):
        raise Fatal(f"{path}: text: not valid JSON: {finding}; nor a YAML mapping")
    return config


def make_slices(gpus: list[Gpu], settings: Settings) -> list[Piece]:
    """Returns the slices of this host's GPUs. Raises Fatal if the configuration does not fit these GPUs."""
    pieces, findings = sharing.pieces_for([gpu.facts() for gpu in gpus], settings.config)
    faults = [one for one in findings if one.level == "error"]
    if faults:
        raise Fatal("; ".join(f"{settings.path}: {fault}" for fault in faults))
    return pieces
