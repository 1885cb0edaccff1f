# SPDX-License-Identifier: Apache-2.0
"""The toolkit's configuration x wish -> changes of the plan."""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils import plan, wish
from plan_samples import CONVERGED, VARIABLES

PATH = "/etc/nvidia-container-runtime/config.toml"
KEYS = {"accept-nvidia-visible-devices-as-volume-mounts": True}
# the text, changes, words of the error
ROWS = [
    ("accept-nvidia-visible-devices-as-volume-mounts = true\n", [], ""),
    (
        "#accept-nvidia-visible-devices-as-volume-mounts = false\n",
        [f"{PATH}: set accept-nvidia-visible-devices-as-volume-mounts to true"],
        "",
    ),
    (None, [f"{PATH}: set accept-nvidia-visible-devices-as-volume-mounts to true"], ""),
    ("x = \n[t\n", [], f"{PATH}: line"),
]


@pytest.mark.parametrize("text, changes, fault", ROWS)
def test_the_plan_names_each_key(text, changes, fault):
    wanted = wish.collect({**VARIABLES, "nvidia_docker_config": KEYS})
    assert wish.reads(wanted)["texts"] == [PATH]
    made = plan.make_plan(wanted, {**CONVERGED, "texts": {PATH: text}})
    steps = [step for step in made["steps"] if step["role"] == "nvidia_docker"]
    assert [line for step in steps for line in step["changes"]] == changes
    assert (fault in "".join(made["errors"])) if fault else not made["errors"]
