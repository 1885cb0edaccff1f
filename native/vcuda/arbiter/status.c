/* SPDX-License-Identifier: Apache-2.0 */
/* Implements --json-status of vgpu-arbiter: prints what the shared files of all tenants say about their compute limits
 * and turns on the GPUs. This works whether an arbiter runs or not. */
#include "tenants.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* Prints an id or a UUID. A character that is not printable ASCII, or needs an escape in JSON, becomes '?'. */
static void print_text(const char *text)
{
    putchar('"');
    for (; *text; text++)
        putchar(*text >= ' ' && *text < 127 && *text != '"' && *text != '\\' ? *text : '?');
    putchar('"');
}

int status_print(struct node *node)
{
    static const char *const gates[] = {"none", "open", "turn", "closed"}, *const policies[] = {"default", "force", "disable"};
    struct timespec time;
    bool comma = false, alive = false;
    if (!tenants_scan(node, 0)) {
        fprintf(stderr, "vgpu-arbiter: %s does not exist: no allocation has been made on this node\n", node->root);
        return 1;
    }
    printf("{\"version\": 1, \"tenants\": [");
    for (int i = 0; i < ALLOCATIONS; i++) {
        const struct allocation *allocation = &node->allocation[i];
        struct vgpu_tenant_page own;
        if (!allocation->used || !allocation->limits_good)
            continue;
        bool speaks = tenants_page(allocation, &own);
        for (uint32_t d = 0; d < allocation->limits.device_count; d++) {
            const struct vgpu_gpu_page *page = allocation->device[d].page;
            const struct vgpu_tenant_device *said = &own.devices[d];
            /* Read the clock after the page. Otherwise a page that is written between the two reads would seem to come
             * from the future. */
            uint64_t heartbeat = page ? __atomic_load_n(&page->heartbeat_ns, __ATOMIC_ACQUIRE) : 0;
            clock_gettime(CLOCK_MONOTONIC, &time);
            uint64_t now = (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
            bool fresh = heartbeat && now - heartbeat < VGPU_ARBITER_SILENT_NS;
            alive = alive || fresh;
            printf("%s\n  {\"allocation\": ", comma ? "," : "");
            print_text(allocation->id);
            printf(", \"uuid\": ");
            print_text(allocation->limits.devices[d].uuid);
            printf(", \"sm_percent\": %u, \"policy\": \"%s\", \"priority\": %u, \"gate\": \"%s\", \"rate_percent\": %.2f, "
                   "\"exclusive\": %s, \"turns\": %u, \"arbiter\": %s, \"used_ns\": %llu, \"balance_ns\": %lld}",
                   allocation->limits.devices[d].sm_percent, policies[allocation->limits.core_policy % 3],
                   allocation->limits.priority, page ? gates[page->gate % 4] : "none", page ? page->rate_ppm / 1e4 : 0.0,
                   page && (page->flags & VGPU_GPU_EXCLUSIVE) ? "true" : "false", page ? page->turns : 0, fresh ? "true" : "false",
                   (unsigned long long)(speaks ? said->used_ns : 0), (long long)(speaks ? said->balance_ns : 0));
            comma = true;
        }
    }
    printf("\n], \"arbiter\": %s}\n", alive ? "true" : "false");
    return 0;
}
