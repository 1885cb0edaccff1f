# SPDX-License-Identifier: Apache-2.0
"""numba_own.py REPORT: run numba-cuda's own driver tests and write each test's result to REPORT as JSON."""

from __future__ import annotations

import json
import sys
import unittest

import numba.cuda.tests.cudadrv as suite


class Verdicts(unittest.TestResult):
    """Collects results: test id → ok, fail, error or skip. A test with subtests gets the worst of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.verdicts: dict = {}

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.verdicts.setdefault(test.id(), "ok")

    def addFailure(self, test: unittest.TestCase, err: tuple) -> None:
        self.verdicts[test.id()] = "fail"

    def addError(self, test: unittest.TestCase, err: tuple) -> None:
        self.verdicts[test.id()] = "error"

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.verdicts[test.id()] = "skip"

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: tuple | None) -> None:
        if err is not None:
            self.verdicts[test.id()] = "fail" if issubclass(err[0], test.failureException) else "error"


result = Verdicts()
unittest.TestLoader().loadTestsFromModule(suite).run(result)
with open(sys.argv[1], "w") as report:
    json.dump(result.verdicts, report)
