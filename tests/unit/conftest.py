# SPDX-License-Identifier: Apache-2.0
"""Prepares plain pytest for all unit tests. The tests can import the package of test doubles, and the collection by its
real name, as under ansible-test. Hypothesis gets no time limit for single examples.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

TESTS = Path(__file__).resolve().parents[1]
COLLECTIONS = TESTS.parent / ".build" / "collections"

if COLLECTIONS.is_dir() and str(COLLECTIONS) not in sys.path:
    sys.path.insert(0, str(COLLECTIONS))
sys.path.append(str(TESTS))  # the package ``doubles`` is in this folder

# By default Hypothesis fails an example that takes more than 200 ms. On a busy machine an example of correct code may
# take longer.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
