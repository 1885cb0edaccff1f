# SPDX-License-Identifier: Apache-2.0
"""Checks whether the host's memory is large enough for the memory scaling of its GPUs. With a scaling above 1 the
host's memory holds the data that does not fit on a card. No I/O.
"""

from __future__ import annotations

from typing import Any, Sequence

from ..config import slices
from ..config.kinds import Finding, error, warning


def findings(gpus: Sequence[dict[str, Any]], config: dict[str, Any], host_mib: int) -> list[Finding]:
    """Returns an error for each slice (share of a GPU) that can never be filled. If there is none, returns one warning
    if the slices cannot all be full at the same time.

    ``host_mib``: all memory of the host, 0 if unknown.
    """
    found: list[Finding] = []
    beyond, first = 0, ""
    for gpu in gpus if host_mib else ():
        share = slices.share_of(gpu, config)
        if share is None:
            continue
        where = "sharing.vcuda" + ("" if share.exception is None else f".devices[{share.exception}]") + ".memoryScaling"
        try:
            slice_mib = slices.size_of(gpu, share)[0]
        except slices.SliceError:
            continue
        card_mib = int(gpu["memory_mib"])
        over = slice_mib * share.split_count - card_mib
        if over <= 0:
            continue
        beyond, first = beyond + over, first or where
        if slice_mib > card_mib + host_mib:
            message = (
                f"a slice of GPU {gpu['index']} has {slice_mib} MiB; expected at most the {card_mib} MiB of the card "
                f"and the {host_mib} MiB of the host together, because more can never be used; lower the scaling"
            )
            found.append(error(where, message))
    if beyond > host_mib and not found:
        message = (
            f"the slices have {beyond} MiB more than the cards, and the host has only {host_mib} MiB of memory "
            "for this excess and for all programs; if containers use the excess, the kernel kills programs; "
            "lower the scaling"
        )
        found.append(warning(first, message))
    return found
