#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the files that the simulated hosts get in addition to their own image: the apt repository with packages of
# NVIDIA's names, and the container image for the tests.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
"$here/packages/build.sh"
"$here/packages/make_image.sh"
