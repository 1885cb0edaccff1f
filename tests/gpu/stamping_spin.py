#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Replaces spin.c in tests. spin.c launches kernels and stores their times of start and end; this program computes the
times and at once writes the output that spin.c has on a real GPU. Each kernel takes its intended time, with a gap of a
microsecond, and the slice's share is kept exactly in periods of 20 ms. With LAX=1 the share is ignored."""

import json
import os
import struct
import sys

SHARE_AT = 128 + 56  # Offset of the first device's sm_percent in the limits file.
GAP = 1000
TURN = 20_000_000


def main():
    seconds, microseconds, steps, path = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[5]
    kernels = int(sys.argv[6]) if len(sys.argv) > 6 else 1
    if not steps:
        print(json.dumps({"steps": 1000, "nanoseconds": microseconds * 1000, "sms": 132}))
        return
    share = 100
    limits = os.environ.get("VGPU_LIMITS_FILE")
    if limits and not os.environ.get("LAX"):
        with open(limits, "rb") as file:
            (share,) = struct.unpack_from("<I", file.read(), SHARE_AT)
    print("ready", flush=True)
    sys.stdin.readline()
    length, now, begin, owed = int(microseconds * 1000) * kernels, 10**15, 10**15, 0
    starts, ends = [], []
    while now - begin < seconds * 1e9:
        # A token bucket: it fills with share × elapsed time, and each launch takes its cost.
        if owed * 100 > (now - begin + TURN) * share:
            now += TURN // 20
            continue
        starts.append(now)
        ends.append(now + length)
        owed += length + GAP
        now += length + GAP
    with open(path, "wb") as file:
        file.write(struct.pack(f"<Q{2 * len(starts)}Q", len(starts), *starts, *ends))
    print(json.dumps({"launches": len(starts), "longest_launch_ns": TURN, "issue_ns": 1, "drain_ns": 1}))


main()
