#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the hosts' files besides their image: the apt repository with NVIDIA's package names, and the container image.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
"$here/packages/build.sh"
"$here/packages/make_image.sh"
