// SPDX-License-Identifier: Apache-2.0

// What Kubernetes itself says of slices and claims, without a cluster: its API server's validation of the slices and
// classes, and its scheduler's allocator, claim by claim. JSON in, JSON out:
//
//	{"slices": […], "classes": […], "claims": […]}
//	{"invalid": ["…"], "allocations": [[{"request", "device", "consumed": {…}}], null, …]}
//
// null: the claim does not fit next to those before it.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	internal "k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install"
	"k8s.io/kubernetes/pkg/apis/resource/validation"
)

type question struct {
	Slices, Classes, Claims []json.RawMessage
}

type part struct {
	Request  string            `json:"request"`
	Device   string            `json:"device"`
	Consumed map[string]string `json:"consumed,omitempty"`
}

type answer struct {
	Invalid     []string `json:"invalid"`
	Allocations [][]part `json:"allocations"`
}

type classes []*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) { return c, nil }
func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, one := range c {
		if one.Name == name {
			return one, nil
		}
	}
	return nil, fmt.Errorf("there is no class %s", name)
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// As the API server reads it: strictly, with defaults, in its internal form.
func decoded(raw json.RawMessage) runtime.Object {
	out, err := runtime.Decode(legacyscheme.Codecs.UniversalDecoder(), raw)
	must(err)
	return out
}

func validated(raw []json.RawMessage) []string {
	found := []string{}
	for _, one := range raw {
		switch object := decoded(one).(type) {
		case *internal.ResourceSlice:
			for _, fault := range validation.ValidateResourceSlice(object) {
				found = append(found, fault.Error())
			}
		case *internal.DeviceClass:
			for _, fault := range validation.ValidateDeviceClass(object) {
				found = append(found, fault.Error())
			}
		case *internal.ResourceClaim:
			for _, fault := range validation.ValidateResourceClaim(object) {
				found = append(found, fault.Error())
			}
		}
	}
	return found
}

func read[T any](raw []json.RawMessage) []*T {
	out := []*T{}
	for _, one := range raw {
		object := new(T)
		must(json.Unmarshal(one, object))
		out = append(out, object)
	}
	return out
}

func main() {
	var asked question
	must(json.NewDecoder(os.Stdin).Decode(&asked))
	said := answer{Invalid: validated(append(append(asked.Slices, asked.Classes...), asked.Claims...))}
	ctx := context.Background()
	slices := read[resourceapi.ResourceSlice](asked.Slices)
	known := classes(read[resourceapi.DeviceClass](asked.Classes))
	features := structured.Features{AdminAccess: true, ConsumableCapacity: true, DeviceTaints: true, PartitionableDevices: true, PrioritizedList: true}
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	cache := cel.NewCache(10, cel.Features{EnableConsumableCapacity: true})
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
	for _, claim := range read[resourceapi.ResourceClaim](asked.Claims) {
		allocator, err := structured.NewAllocator(ctx, features, state, known, slices, cache)
		must(err)
		found, err := allocator.Allocate(ctx, node, []*resourceapi.ResourceClaim{claim})
		must(err)
		if len(found) == 0 {
			said.Allocations = append(said.Allocations, nil)
			continue
		}
		parts := []part{}
		for _, result := range found[0].Devices.Results {
			parts = append(parts, part{result.Request, result.Device, texts(result.ConsumedCapacity)})
			take(state, result)
		}
		said.Allocations = append(said.Allocations, parts)
	}
	must(json.NewEncoder(os.Stdout).Encode(said))
}

func texts(consumed map[resourceapi.QualifiedName]resource.Quantity) map[string]string {
	out := map[string]string{}
	for name, one := range consumed {
		out[string(name)] = one.String()
	}
	return out
}

// As the scheduler keeps account of what it gave out.
func take(state structured.AllocatedState, result resourceapi.DeviceRequestAllocationResult) {
	id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
	if result.ShareID == nil {
		state.AllocatedDevices.Insert(id)
		return
	}
	share := types.UID(*result.ShareID)
	state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, &share))
	state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
}
