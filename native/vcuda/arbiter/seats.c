/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Assigns the tenants of a GPU to the seats (entries) of the GPU's schedule, and writes the schedule's result into the
 * tenants' gpu pages, from which each tenant reads when it may run. A schedule has fewer seats than a GPU may have
 * tenants, and most tenants are idle, so a tenant that starts to work takes the seat of a resting tenant.
 */
#include "tenants.h"

#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A tenant without a seat counts as working for this time after its last launch. */
#define AT_WORK_NS (100 * MS)
/* Maximum number of a tenant's waiting threads that the arbiter wakes at once; these threads wake the others. If the
 * arbiter woke thousands of threads itself, another tenant's turn would be delayed. */
#define WAKE_MOST 64

/* --- seats ------------------------------------------------------------------------------------------------ */

static int gpu_find(struct node *node, const char *uuid)
{
    int empty = -1;
    for (int i = 0; i < GPUS; i++) {
        if (strcmp(node->gpu[i].uuid, uuid) == 0)
            return i;
        if (!node->gpu[i].uuid[0] && empty < 0)
            empty = i;
    }
    if (empty >= 0) {
        memset(&node->gpu[empty], 0, sizeof node->gpu[empty]);
        snprintf(node->gpu[empty].uuid, VGPU_UUID_SIZE, "%s", uuid);
        node->gpu[empty].schedule.holder = -1;
    }
    return empty;
}

static void read_input(const struct allocation *allocation, int index, struct schedule_input *input)
{
    struct vgpu_tenant_page page;
    const struct vgpu_limits *limits = &allocation->limits;
    uint32_t percent = limits->devices[index].sm_percent;
    bool speaks = tenants_page(allocation, &page);
    *input = (struct schedule_input){
        .share_ppm = percent && percent < 100 ? percent * 10000 : 1000000,
        .force = limits->core_policy == VGPU_CORE_FORCE,
        .high = limits->priority == 0,
        .unlimited = limits->core_policy == VGPU_CORE_DISABLE || !percent || percent >= 100,
    };
    if (!speaks)
        return;
    struct vgpu_tenant_device *device = &page.devices[index];
    input->active_ns = device->active_ns;
    input->waiting_ns = device->waiting_ns;
    input->used_ns = device->used_ns;
    input->high = input->high && !(device->requests & VGPU_TENANT_LOW);
    for (unsigned i = 0; i < VGPU_TENANT_LANES; i++)
        if (device->busy_until_ns[i] > input->busy_until_ns)
            input->busy_until_ns = device->busy_until_ns[i];
}

static unsigned unlimited(const struct gpu *gpu)
{
    unsigned count = 0;
    for (int i = 0; i < SCHEDULE_TENANTS; i++)
        count += gpu->tenant[i] && gpu->schedule.tenant[i].in.unlimited;
    return count;
}

/*
 * Returns the seat of the tenant that has rested longest, or -1 if all tenants must keep their seats. A tenant with
 * negative credit keeps its seat until its credit is 0 again, because only this schedule knows the credit. If only one
 * seat has a tenant without a limit, this tenant keeps it: it may run during every turn, which the schedule must know.
 */
static int resting(const struct gpu *gpu)
{
    int best = -1;
    bool several = unlimited(gpu) > 1;
    for (int i = 0; i < SCHEDULE_TENANTS; i++) {
        const struct schedule_tenant *tenant = &gpu->schedule.tenant[i];
        if (tenant->active || tenant->credit < 0 || (tenant->in.unlimited && !several))
            continue;
        if (best < 0 || tenant->in.active_ns < gpu->schedule.tenant[best].in.active_ns)
            best = i;
    }
    return best;
}

/* If the tenant could use the whole GPU since the arbiter's last pass, adds this time to open_ns. The watcher, which
 * looks for tenants that exceed their shares, reads open_ns: during this time a tenant may exceed its share. A long gap
 * means that the arbiter did not run; such a gap is not counted. */
static void count_open(struct vgpu_gpu_page *page, uint64_t now)
{
    uint64_t passed = now - page->heartbeat_ns;
    if (page->heartbeat_ns && page->gate == VGPU_GATE_OPEN && page->rate_ppm == 1000000 && passed < VGPU_ARBITER_SILENT_NS)
        __atomic_store_n(&page->open_ns, page->open_ns + passed, __ATOMIC_RELAXED);
}

static void write_output(struct vgpu_gpu_page *page, const struct schedule_output *out, uint64_t now)
{
    count_open(page, now);
    /* An arbiter of an earlier version stored the number of neighbours here, so clear it. */
    __atomic_store_n(&page->unused[0], 0, __ATOMIC_RELAXED);
    __atomic_store_n(&page->unused[1], 0, __ATOMIC_RELAXED);
    if (page->gate == out->gate && page->flags == out->flags && page->rate_ppm == out->rate_ppm &&
        page->turn_start_ns == out->turn_start_ns && page->turn_end_ns == out->turn_end_ns &&
        page->outstanding_max_us == out->outstanding_max_us && !(page->sequence & 1)) {
        __atomic_store_n(&page->heartbeat_ns, now, __ATOMIC_RELEASE);
        return;
    }
    /* The sequence is already odd if an earlier arbiter died while it wrote the page. */
    uint32_t sequence = page->sequence | 1;
    __atomic_store_n(&page->sequence, sequence, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    __atomic_store_n(&page->gate, out->gate, __ATOMIC_RELAXED);
    __atomic_store_n(&page->flags, out->flags, __ATOMIC_RELAXED);
    __atomic_store_n(&page->rate_ppm, out->rate_ppm, __ATOMIC_RELAXED);
    __atomic_store_n(&page->turn_start_ns, out->turn_start_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&page->turn_end_ns, out->turn_end_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&page->outstanding_max_us, out->outstanding_max_us, __ATOMIC_RELAXED);
    __atomic_store_n(&page->turns, out->turns, __ATOMIC_RELAXED);
    __atomic_store_n(&page->heartbeat_ns, now, __ATOMIC_RELAXED);
    __atomic_store_n(&page->sequence, sequence + 1, __ATOMIC_RELEASE);
    __atomic_fetch_add(&page->wake, 1, __ATOMIC_RELEASE);
    if (out->gate != VGPU_GATE_CLOSED)
        syscall(SYS_futex, &page->wake, FUTEX_WAKE, WAKE_MOST, NULL, NULL, 0);
}

static struct vgpu_gpu_page *page_of(const struct gpu *gpu, int slot)
{
    return gpu->tenant[slot]->device[gpu->index[slot]].page;
}

static void fall_silent(const struct gpu *gpu, int slot)
{
    const struct schedule_output nothing = {.gate = VGPU_GATE_NONE};
    write_output(page_of(gpu, slot), &nothing, 0);
}

void seat_leave(struct node *node, struct allocation *allocation, int device)
{
    int gpu = allocation->device[device].gpu, slot = allocation->device[device].slot;
    bool any = false;
    allocation->device[device].gpu = -1;
    if (gpu < 0)
        return;
    struct gpu *g = &node->gpu[gpu];
    g->tenant[slot] = NULL;
    memset(&g->schedule.tenant[slot], 0, sizeof g->schedule.tenant[slot]);
    if (g->schedule.holder == slot)
        g->schedule.turn_end = 0; /* This ends the turn: the next pass gives the GPU to a waiting tenant. */
    for (int i = 0; i < SCHEDULE_TENANTS; i++)
        any = any || g->tenant[i];
    if (!any)
        memset(g, 0, sizeof *g);
}

bool seat_take(struct node *node, struct allocation *allocation, int device, uint64_t now)
{
    struct schedule_input in;
    int gpu = gpu_find(node, allocation->device[device].uuid), slot = -1;
    if (gpu < 0)
        return false;
    struct gpu *g = &node->gpu[gpu];
    read_input(allocation, device, &in);
    uint64_t last = in.active_ns > in.waiting_ns ? in.active_ns : in.waiting_ns;
    bool works = last && (last > now ? last - now : now - last) < AT_WORK_NS;
    for (int i = 0; i < SCHEDULE_TENANTS && slot < 0; i++)
        if (!g->tenant[i])
            slot = i;
    if (slot < 0) {
        if (!works && (!in.unlimited || unlimited(g)))
            return true; /* The tenant rests, so it needs no seat. */
        slot = resting(g);
        if (slot < 0)
            return false;
        fall_silent(g, slot);
        seat_leave(node, g->tenant[slot], g->index[slot]);
    }
    allocation->device[device].gpu = gpu;
    allocation->device[device].slot = slot;
    g->tenant[slot] = allocation;
    g->index[slot] = device;
    g->schedule.tenant[slot].in = in;
    /* The next pass computes `active` again. Until then, true keeps other tenants from taking the seat. */
    g->schedule.tenant[slot].active = works;
    g->next = 0;
    return true;
}

/* --- reading inputs and writing pages ------------------------------------------------------------------------ */

uint64_t tenants_look(struct gpu *gpu, uint64_t now)
{
    for (int i = 0; i < SCHEDULE_TENANTS; i++) {
        struct schedule_tenant *tenant = &gpu->schedule.tenant[i];
        tenant->present = gpu->tenant[i] != NULL;
        if (tenant->present)
            read_input(gpu->tenant[i], gpu->index[i], &tenant->in);
    }
    gpu->next = schedule_step(&gpu->schedule, now);
    for (int i = 0; i < SCHEDULE_TENANTS; i++)
        if (gpu->tenant[i])
            write_output(page_of(gpu, i), &gpu->schedule.tenant[i].out, now);
    return gpu->next;
}

void tenants_release(struct node *node)
{
    for (int i = 0; i < GPUS; i++)
        for (int t = 0; t < SCHEDULE_TENANTS; t++)
            if (node->gpu[i].tenant[t])
                fall_silent(&node->gpu[i], t);
}
