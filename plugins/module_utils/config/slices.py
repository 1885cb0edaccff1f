# SPDX-License-Identifier: Apache-2.0
"""Computes the slices (equal shares) of a host's GPUs under a node configuration.

K is the split count, S the memory scaling and C the cores scaling. N GPUs of M MiB give N*K slices. Each slice has
floor(M*S/K) MiB and min(100, floor(100*C/K)) % of the SMs. Numbers are exact: scalings are read from their decimal text
and computed as fractions. A result of 0 is an error, because later steps read 0 as "no limit".

A GPU is a mapping ``{index, uuid, model, memory_mib}``; the configuration is node.yaml as ``node_config`` reads it.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, NamedTuple, Sequence

from .kinds import Finding, decimal_text, error, warning

MIB = 1 << 20

# Maps a GPU model to the greatest split count K that documents on GPU sharing advise for it.
ADVISED_SPLIT = (("GTX 1080 Ti", 5), ("RTX 2080 Ti", 5), ("T4", 7), ("A100", 15))

# Suffixes that name a different model. For example, a GTX 1080 Ti is no GTX 1080.
MODEL_SUFFIXES = ("ti", "super")


# If claims (Dynamic Resource Allocation) choose their own sizes, a part of each GPU's memory is never allocated, so
# that the isolation check can use it. This part is RESERVE_MIB, but at most the memory divided by RESERVE_PART.
RESERVE_MIB, RESERVE_PART = 1024, 16


class SliceError(ValueError):
    """A configuration cannot be applied to a GPU."""


class Share(NamedTuple):
    """Holds how one GPU is split, after exceptions (settings for some of the GPUs) were applied; ``exception`` is the
    index of the exception that matched.
    """

    split_count: int
    memory_scaling: str
    cores_scaling: str
    exception: int | None


def mib(total_bytes: int) -> int:
    """Returns M, the memory in whole MiB, from NVML's total."""
    return int(total_bytes) // MIB


def model_matches(pattern: str, model: str) -> bool:
    """Returns whether the model name that a user wrote ("T4", "V100-16GB") fits the model that NVML names ("Tesla
    V100-SXM2-16GB").

    The words of the pattern must occur in this order in the name; words are whole, so that T4 is not T400.
    """
    wanted = re.findall(r"[a-z0-9]+", pattern.lower())
    words = re.findall(r"[a-z0-9]+", model.lower())
    position = 0
    for word in wanted:
        if word not in words[position:]:
            return False
        position = words.index(word, position) + 1
    return bool(wanted) and not (position < len(words) and words[position] in MODEL_SUFFIXES)


def matches(match: dict[str, Any], gpu: dict[str, Any]) -> bool:
    """Returns whether a GPU meets every condition of an exception."""
    if "index" in match and int(match["index"]) != int(gpu["index"]):
        return False
    if "uuid" in match and str(match["uuid"]).lower() != str(gpu["uuid"]).lower():
        return False
    return "model" not in match or model_matches(str(match["model"]), str(gpu.get("model") or ""))


def vcuda_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the section ``sharing.vcuda`` of a node configuration, None if the node does not share in this mode."""
    return (config.get("sharing") or {}).get("vcuda")


def share_of(gpu: dict[str, Any], config: dict[str, Any]) -> Share | None:
    """Returns how a GPU is split, None if the node does not share by vcuda. Each key of the first matching exception
    overrides the node's value. Cores scaling defaults to the K of the same GPU, which means no limit.
    """
    vcuda = vcuda_of(config)
    if vcuda is None:
        return None
    chosen: dict[str, Any] = {}
    position = None
    for n, exception in enumerate(vcuda.get("devices") or []):
        if matches(exception.get("match") or {}, gpu):
            chosen, position = exception, n
            break
    split = int(chosen.get("splitCount", vcuda.get("splitCount", 2)))
    memory = chosen.get("memoryScaling", vcuda.get("memoryScaling", "1.0"))
    cores = chosen.get("coresScaling", vcuda.get("coresScaling"))
    return Share(split, _scaling(memory), str(split) if cores is None else _scaling(cores), position)


def claimable_mib(gpu: dict[str, Any], share: Share, requested: bool) -> int:
    """Returns how many MiB of a GPU all claims (Dynamic Resource Allocation) together may use. Raises SliceError."""
    slice_mib, _percent = size_of(gpu, share)
    if not requested:
        return slice_mib * share.split_count
    total = int(int(gpu["memory_mib"]) * Fraction(share.memory_scaling))
    return total - min(RESERVE_MIB, total // RESERVE_PART)


def size_of(gpu: dict[str, Any], share: Share) -> tuple[int, int]:
    """Returns MiB of memory and percent of the SMs of each slice of a GPU. Raises SliceError if a slice would be 0."""
    total, split = int(gpu["memory_mib"]), share.split_count
    if split < 1:
        raise SliceError(f"{_name(gpu)}: cannot be split into {split}; expected a split count of at least 1")
    memory = int(total * Fraction(share.memory_scaling) / split)
    sm_percent = min(100, int(100 * Fraction(share.cores_scaling) / split))
    if memory < 1:
        raise SliceError(
            f"{_name(gpu)}: {total} MiB * {share.memory_scaling} / {split} gives less than 1 MiB a slice, "
            "and 0 would mean no limit; lower the split count or raise the memory scaling"
        )
    if sm_percent < 1:
        raise SliceError(
            f"{_name(gpu)}: 100 * {share.cores_scaling} / {split} gives less than 1 % of the SMs a slice, "
            "and 0 would mean no limit; lower the split count or raise the cores scaling to at least "
            f"{_least_cores(split)}"
        )
    return memory, sm_percent


def findings_for(gpus: Sequence[dict[str, Any]], config: dict[str, Any]) -> list[Finding]:
    """Returns the findings that a valid configuration gives on a host's GPUs. A slice of 0 and an exception that
    matches no GPU are errors. More slices than advised, and an exception that an earlier exception always overrides,
    are warnings.
    """
    findings: list[Finding] = []
    vcuda = vcuda_of(config)
    if vcuda is None:
        return findings
    winners = set()
    for gpu in gpus:
        share = share_of(gpu, config)
        if share is None:
            continue
        where = "sharing.vcuda"
        if share.exception is not None:
            winners.add(share.exception)
            where = f"sharing.vcuda.devices[{share.exception}]"
        try:
            size_of(gpu, share)
        except SliceError as fault:
            findings.append(error(where + ".splitCount", str(fault)))
        equal = vcuda.get("sliceSizing") != "requested"
        advised = advised_split(str(gpu.get("model") or "")) if equal else None
        if advised is not None and share.split_count > advised[1]:
            message = "{0}: {1} slices; for {2}, at most {3} are advised"
            findings.append(
                warning(where + ".splitCount", message.format(_name(gpu), share.split_count, advised[0], advised[1]))
            )
    for n, exception in enumerate(vcuda.get("devices") or []):
        if n in winners:
            continue
        where = f"sharing.vcuda.devices[{n}].match"
        match = exception.get("match") or {}
        if any(matches(match, gpu) for gpu in gpus):
            findings.append(warning(where, "has no effect: an earlier exception matches the same GPUs and wins"))
        else:
            wanted = ", ".join(f"{key} {match[key]}" for key in sorted(match))
            present = "; ".join(_name(gpu) for gpu in gpus) or "none"
            findings.append(error(where, f"no GPU with {wanted}; GPUs of the host: {present}"))
    return findings


def advised_split(model: str) -> tuple[str, int] | None:
    """Returns the greatest advised K of a model, with the model's name, None if there is no advice."""
    for name, split in ADVISED_SPLIT:
        if model_matches(name, model):
            return name, split
    return None


def _scaling(value: Any) -> str:
    text = decimal_text(value)
    if text is None or Fraction(text) <= 0:
        raise SliceError(f'expected a scaling that is a decimal above 0, found "{value}"')
    return text


def _least_cores(split: int) -> str:
    """Returns the smallest cores scaling, to two digits, that gives each of K slices a whole percent."""
    return f"{split // 100}.{split % 100:02d}"


def _name(gpu: dict[str, Any]) -> str:
    return "GPU {} ({}, {})".format(gpu["index"], gpu.get("model") or "model unknown", gpu["uuid"])
