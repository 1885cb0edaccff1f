# SPDX-License-Identifier: Apache-2.0
"""The node configuration as this program uses it, and a refusal of what it cannot carry out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from . import handover
from ._shared import node_config, slices
from .errors import Fatal
from .gpus import Gpu


@dataclass(frozen=True)
class Settings:
    """``config`` is node.yaml; the rest is read out of it once."""

    path: Path
    sha256: str
    config: dict[str, Any]

    @property
    def vcuda(self) -> dict[str, Any]:
        return slices.vcuda_of(self.config) or {}

    @property
    def shared(self) -> bool:
        """Whether slices are limited by the library; else containers get whole GPUs."""
        return slices.vcuda_of(self.config) is not None

    @property
    def resource(self) -> str:
        return str(node_config.resource_name(self.config))

    @property
    def library_root(self) -> Path:
        return Path(self.vcuda.get("libraryRoot", node_config.LIBRARY_ROOT))

    @property
    def merge(self) -> bool:
        return bool(self.vcuda.get("multiSlice", "distinct") == "merge")

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
    def driver_root(self) -> Path:
        return Path(self.flags.get("nvidiaDriverRoot") or "/")

    @property
    def dev_root(self) -> Path:
        return Path(self.flags.get("nvidiaDevRoot") or self.driver_root)

    @property
    def strategies(self) -> tuple[str, ...]:
        """deviceListStrategy as a tuple; it may be ``("auto",)``."""
        strategy = self.plugin_flags.get("deviceListStrategy", "auto")
        return (strategy,) if isinstance(strategy, str) else tuple(strategy)

    def hand_over(self, host_root: Path, can_cdi: bool) -> handover.HandOver:
        """How containers are told their GPUs; ``can_cdi``: whether the driver's files were found, for CDI to name."""
        strategies, reason = self.strategies, "as configured"
        if strategies == ("auto",):
            chosen, reason = handover.choose(host_root)
            if chosen == handover.CDI_CRI and not can_cdi:
                chosen, reason = handover.ENVVAR, f"{reason}, but no libcuda.so.1 is found on this host"
            strategies = (chosen,)
        return handover.HandOver(
            strategies,
            self.plugin_flags.get("deviceIDStrategy") or "uuid",
            bool(self.plugin_flags.get("passDeviceSpecs")),
            self.plugin_flags.get("cdiAnnotationPrefix") or handover.ANNOTATION_PREFIX,
            self.dev_root,
            reason,
        )

    def limit_flags(self, gpus: list[Gpu]) -> dict[str, Any]:
        """The part of a limits file that does not depend on the slices, in the keys of layouts.pack_limits."""
        vcuda = self.vcuda
        shares = [slices.share_of(gpu.facts(), self.config) for gpu in gpus]
        return {
            "count_context": bool(vcuda.get("countContext", True)),
            "oom_killer": bool(vcuda.get("oomKiller", False)),
            "oversubscribe": any(share is not None and Fraction(share.memory_scaling) > 1 for share in shares),
            "core_policy": "disable" if vcuda.get("disableCoreLimit") else vcuda.get("corePolicy", "default"),
            "log_level": int(vcuda.get("logLevel", 1)),
        }


def load(path: Path) -> Settings:
    """Reads and checks the file. Raises Fatal with every fault in it."""
    try:
        raw = path.read_bytes()
    except OSError as fault:
        raise Fatal(f"{path}: {fault.strerror}; the role device_plugin writes it") from None
    try:
        config = node_config.load(raw.decode("utf-8", "replace"), str(path))
    except node_config.ConfigError as fault:
        raise Fatal(str(fault)) from None
    refuse_unavailable(path, config)
    return Settings(path, hashlib.sha256(raw).hexdigest(), config)


def refuse_unavailable(path: Path, config: dict[str, Any]) -> None:
    """Valid settings that this version does not carry out are refused; ignoring them would leave GPUs unlimited."""
    sharing = config.get("sharing") or {}
    for mode in ("timeSlicing", "mps"):
        if mode in sharing:
            raise Fatal(f"{path}: sharing.{mode} is not available in this version; use sharing.vcuda")
    if (sharing.get("vcuda") or {}).get("sliceSizing", "equal") != "equal":
        raise Fatal(f"{path}: sharing.vcuda.sliceSizing: requested is not available in this version; use equal")
    flags = config.get("flags") or {}
    if flags.get("migStrategy", "none") != "none":
        raise Fatal(f"{path}: flags.migStrategy: {flags['migStrategy']} is not available in this version; use none")
    strategy = (flags.get("plugin") or {}).get("deviceListStrategy", "auto")
    if not isinstance(strategy, str) and (not strategy or "auto" in strategy):
        raise Fatal(
            f"{path}: flags.plugin.deviceListStrategy: auto stands alone, found {strategy}; name one or the other"
        )


def make_slices(gpus: list[Gpu], settings: Settings) -> list[slices.Slice]:
    """The slices of this host. Raises Fatal where the configuration cannot be carried out on these GPUs."""
    facts = [gpu.facts() for gpu in gpus]
    faults = [one for one in slices.findings_for(facts, settings.config) if one.level == "error"]
    if faults:
        raise Fatal("; ".join(f"{settings.path}: {fault}" for fault in faults))
    return list(slices.slices_for(facts, settings.config))
