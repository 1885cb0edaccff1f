/* SPDX-License-Identifier: Apache-2.0 */
/* Implements NVML's event sets. A set delivers the Xid and ECC events of the GPUs registered with it, in order, from
 * the moment of registration. */
#include "nvml_internal.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define SUPPORTED_WITH_ECC (NVML_EVENT_XID | NVML_EVENT_SINGLE_BIT_ECC | NVML_EVENT_DOUBLE_BIT_ECC)

struct nvml_event_set {
    pthread_mutex_t mutex;
    /* Registered event types by GPU number. */
    unsigned long long types[NVML_MAX_GPUS];
    /* Number of the last event before the GPU's registration. */
    uint64_t since[NVML_MAX_GPUS];
    /* Number of the last event that this set has checked. */
    uint64_t seen;
};

NVML_API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    NVML_TRY(nvml_enter());
    NVML_NEED(set != NULL);
    struct nvml_event_set *made = calloc(1, sizeof *made);
    if (made == NULL)
        return NVML_ERROR_MEMORY;
    pthread_mutex_init(&made->mutex, NULL);
    sim_lock();
    made->seen = sim_state()->event_count;
    sim_unlock();
    *set = made;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    NVML_TRY(nvml_enter());
    NVML_NEED(set != NULL);
    pthread_mutex_destroy(&set->mutex);
    free(set);
    return NVML_SUCCESS;
}

NVML_GETTER(nvmlDeviceGetSupportedEventTypes, unsigned long long, nvml_open(device, NVML_WHOLE_GPU, &target), true,
            target.model->ecc ? SUPPORTED_WITH_ECC : NVML_EVENT_XID)

NVML_API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    struct nvml_target target;
    unsigned long long supported;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_TRY(nvmlDeviceGetSupportedEventTypes(device, &supported));
    NVML_NEED(set != NULL);
    if (types & ~supported)
        return NVML_ERROR_NOT_SUPPORTED;
    sim_lock();
    uint64_t now = sim_state()->event_count;
    sim_unlock();
    pthread_mutex_lock(&set->mutex);
    if (set->types[target.number] == 0)
        set->since[target.number] = now;
    set->types[target.number] |= types;
    pthread_mutex_unlock(&set->mutex);
    return NVML_SUCCESS;
}

static unsigned long long type_of(const struct sim_event *event)
{
    switch ((enum sim_event_kind)event->kind) {
    case SIM_EVENT_XID:
        return NVML_EVENT_XID;
    case SIM_EVENT_ECC_SINGLE:
        return NVML_EVENT_SINGLE_BIT_ECC;
    case SIM_EVENT_ECC_DOUBLE:
        return NVML_EVENT_DOUBLE_BIT_ECC;
    }
    return 0;
}

/* Finds the next event of this set. Events that newer events have overwritten in the ring are lost, as in a driver. The
 * caller must hold the set's mutex and the lock of the host's state. */
static bool next_event(struct nvml_event_set *set, struct sim_event *found)
{
    const struct sim_state *state = sim_state();
    if (set->seen > state->event_count) /* The host's state was reset, so the numbers start again. */
        set->seen = 0;
    if (state->event_count - set->seen > SIM_EVENTS)
        set->seen = state->event_count - SIM_EVENTS;
    while (set->seen < state->event_count) {
        const struct sim_event *event = &state->events[set->seen++ % SIM_EVENTS];
        if (event->gpu < NVML_MAX_GPUS && (set->types[event->gpu] & type_of(event)) &&
            event->number > set->since[event->gpu]) {
            *found = *event;
            return true;
        }
    }
    return false;
}

static nvmlReturn_t wait_for(nvmlEventSet_t set, struct sim_event *event, unsigned timeout_ms)
{
    struct sim_state *state = sim_state();
    for (;;) {
        uint32_t before = atomic_load(&state->event_seq);
        pthread_mutex_lock(&set->mutex);
        sim_lock();
        bool found = next_event(set, event);
        sim_unlock();
        pthread_mutex_unlock(&set->mutex);
        if (found)
            return NVML_SUCCESS;
        /* An event that this set does not wait for restarts the time-out. This is acceptable, because events are
         * rare. */
        sim_event_wait(before, timeout_ms);
        if (atomic_load(&state->event_seq) == before)
            return NVML_ERROR_TIMEOUT;
    }
}

NVML_API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms)
{
    struct sim_event event;
    NVML_TRY(nvml_enter());
    NVML_NEED(set != NULL && data != NULL);
    NVML_TRY(wait_for(set, &event, timeout_ms));
    *data = (nvmlEventData_t){.device = nvml_gpu_handle((int)event.gpu), .eventType = type_of(&event),
                              .eventData = event.kind == SIM_EVENT_XID ? event.data : 0,
                              .gpuInstanceId = NVML_INSTANCE_ID_NONE, .computeInstanceId = NVML_INSTANCE_ID_NONE};
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_v1_t *data, unsigned timeout_ms)
{
    nvmlEventData_t whole;
    NVML_NEED(data != NULL);
    NVML_TRY(nvmlEventSetWait_v2(set, &whole, timeout_ms));
    *data = (nvmlEventData_v1_t){.device = whole.device, .eventType = whole.eventType, .eventData = whole.eventData};
    return NVML_SUCCESS;
}
