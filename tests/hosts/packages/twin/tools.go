// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package tools names the one program that is built of this module: NVIDIA's own container runtime, against which the
// stand-in of the simulated hosts is compared. Its version and the digests of all its sources are in go.mod and go.sum.
package tools

import _ "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-container-runtime"
