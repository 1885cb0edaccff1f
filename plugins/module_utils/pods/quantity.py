# SPDX-License-Identifier: Apache-2.0
"""Reads Kubernetes quantities exactly, as whole numbers: "8", "3k", "2Ki", "1e3", 2500 and also "2500000m".

Any other number is an error and is never rounded, because the API server accepts only whole numbers for extended
resources. The grammar is that of apimachinery's resource.Quantity.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from ..config.kinds import show

QUANTITY = re.compile(r"^([+-]?)([0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})([A-Za-z]{0,2}|[eE][+-]?[0-9]{1,2})\Z")
# Maximum characters that the pattern matches. Longer texts must not reach the cache: a pod's author chooses them, and a
# webhook reads them before any other check.
LONGEST = 1 + 40 + 1 + 40 + 4
DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


class QuantityError(ValueError):
    """A value that is no whole number in the range; the text reads "expected …, found …"."""


def exact(value: Any) -> Fraction | None:
    """Returns the quantity as a fraction, None if the text is not a quantity."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    text = str(value).strip()
    return _exact(text) if len(text) <= LONGEST else None


@lru_cache(maxsize=1024)
def _exact(text: str) -> Fraction | None:
    """Parses a quantity. Cached, because the pods of one job repeat the same texts."""
    found = QUANTITY.match(text)
    if found is None:
        return None
    sign, digits, suffix = found.groups()
    number = Fraction("0" + digits if digits.startswith(".") else digits.rstrip("."))
    if suffix in BINARY:
        number *= 1 << BINARY[suffix]
    elif suffix in DECIMAL:
        number *= Fraction(10) ** DECIMAL[suffix]
    elif suffix[0] in "eE" and len(suffix) > 1 and suffix[1:].lstrip("+-").isdigit():
        number *= Fraction(10) ** int(suffix[1:])
    else:
        return None
    return -number if sign == "-" else number


def whole(value: Any, low: int, high: int, unit: str = "") -> int:
    """Returns a quantity as a number. Raises QuantityError unless it is a whole number from ``low`` to ``high``."""
    expected = f"a whole number from {low} to {high}{' ' + unit if unit else ''}"
    number = exact(value)
    if number is None:
        raise QuantityError(f"expected {expected}, found {show(value)}, which is no quantity")
    if number.denominator != 1:
        raise QuantityError(f"expected {expected}, found {show(value)}, which is no whole number")
    if not low <= number <= high:
        raise QuantityError(f"expected {expected}, found {show(value)}")
    return int(number)


def mebibytes(mib: int) -> str:
    """Returns the quantity as the API server writes it: in the largest unit that gives a whole number."""
    for unit in ("Mi", "Gi", "Ti"):
        if mib % 1024 or unit == "Ti":
            return f"{mib}{unit}"
        mib //= 1024
    return f"{mib}Ti"
