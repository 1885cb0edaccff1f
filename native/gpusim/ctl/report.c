/* SPDX-License-Identifier: Apache-2.0 */
/* Prints gpusimctl's reports about the simulated GPUs: devices, memory usage, memory limits and the run log (which
 * process's kernels ran when). A memory limit belongs to a control group. While the group's cgroup controller is off,
 * the limit does not apply, and a group above is charged. */
#include "ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define MIB(bytes) ((double)(bytes) / 1048576.0)

/* Memory buffer for the output: a slow reader of the standard output must not delay the release of the host's lock. */
static FILE *out;
static char *buffer;
static size_t buffer_size;

static bool begin(void)
{
    out = open_memstream(&buffer, &buffer_size);
    if (out)
        sim_lock();
    return out != NULL;
}

static void end(void)
{
    sim_unlock();
    fclose(out);
    fwrite(buffer, 1, buffer_size, stdout);
    free(buffer);
}

static const char *separator(bool *first)
{
    const char *text = *first ? "" : ",";
    *first = false;
    return text;
}

void report_devices(bool json)
{
    struct sim_state *state = sim_state();
    if (!begin())
        return;
    if (json)
        fprintf(out, "{\"driver_version\":\"%s\",\"cuda_version\":\"%u.%u\",\"gpus\":[", state->driver_version,
               state->cuda_version / 1000, state->cuda_version % 1000 / 10);
    for (uint32_t i = 0; i < state->gpu_count; i++) {
        const struct sim_gpu *g = &state->gpus[i];
        if (json)
            fprintf(out, "%s{\"index\":%u,\"uuid\":\"%s\",\"model\":\"%s\",\"name\":\"%s\",\"pci\":\"%08x:%02x:%02x.0\","
                   "\"minor\":%u,\"memory_bytes\":%" PRIu64 ",\"context_bytes\":%" PRIu64
                   ",\"sm_count\":%u,\"compute_capability\":\"%u.%u\",\"visible\":%s,\"lost\":%s,\"mig\":%s}",
                   i ? "," : "", i, g->uuid, g->model, g->name, g->pci_domain, g->pci_bus, g->pci_device, g->minor,
                   g->total, g->context_bytes, g->sm_count, g->cc_major, g->cc_minor,
                   sim_gpu_visible((int)i) ? "true" : "false", g->lost ? "true" : "false", g->mig_mode ? "true" : "false");
        else
            fprintf(out, "%u  %-12s %s  %6.0f MiB  %3u SMs  cc %u.%u  %08x:%02x:%02x.0  /dev/nvidia%u%s%s\n", i, g->model, g->uuid,
                   MIB(g->total), g->sm_count, g->cc_major, g->cc_minor, g->pci_domain, g->pci_bus, g->pci_device,
                   g->minor, sim_gpu_visible((int)i) ? "" : " (not here)", g->lost ? " (fallen off)" : "");
    }
    if (json)
        fprintf(out, "]}\n");
    end();
}

/* Returns a process's name without characters that break JSON: a process can set its name to any bytes. */
static const char *safe_name(const struct sim_proc *proc)
{
    static char name[sizeof proc->comm];
    for (size_t i = 0; i < sizeof name; i++) {
        unsigned char c = (unsigned char)proc->comm[i];
        name[i] = c && (c < ' ' || c > '~' || c == '"' || c == '\\') ? '?' : (char)c;
    }
    name[sizeof name - 1] = 0;
    return name;
}

static void usage_of(const struct sim_proc *proc, uint32_t slot, const struct sim_usage *use, bool json, bool *first)
{
    if (json)
        fprintf(out, "%s{\"pid\":%d,\"slot\":%u,\"serial\":%" PRIu64 ",\"name\":\"%s\",\"memory\":%" PRIu64 ",\"context\":%" PRIu64
               ",\"module\":%" PRIu64 ",\"total\":%" PRIu64 ",\"peak\":%" PRIu64 ",\"contexts\":%u,\"kernels\":%" PRIu64
               ",\"busy_ns\":%" PRIu64 "}",
               separator(first), sim_proc_pid((int)slot), slot, proc->serial, safe_name(proc), use->memory, use->context,
               use->module, sim_usage_bytes(use), use->peak, use->contexts, use->kernels, use->busy_ns);
    else
        fprintf(out, "     pid %-8d %-16s %10.1f MiB  (allocated %.1f, contexts %.1f, modules %.1f; peak %.1f)\n",
               sim_proc_pid((int)slot), safe_name(proc), MIB(sim_usage_bytes(use)), MIB(use->memory), MIB(use->context),
               MIB(use->module), MIB(use->peak));
}

void report_usage(bool json)
{
    struct sim_state *state = sim_state();
    if (!begin())
        return;
    sim_reap();
    if (json)
        fprintf(out, "{\"repairs\":%" PRIu64 ",\"late_calls\":%" PRIu64 ",\"gpus\":[", state->repairs,
                (uint64_t)state->late_calls);
    for (uint32_t i = 0; i < state->gpu_count; i++) {
        const struct sim_gpu *g = &state->gpus[i];
        uint64_t limit = g->total - g->reserved_bytes, unused = g->used < limit ? limit - g->used : 0;
        bool first = true;
        sim_advance((int)i, sim_now());
        if (json)
            fprintf(out, "%s{\"index\":%u,\"uuid\":\"%s\",\"total\":%" PRIu64 ",\"reserved\":%" PRIu64 ",\"used\":%" PRIu64
                   ",\"free\":%" PRIu64 ",\"orphans\":%" PRIu64 ",\"processes\":[",
                   i ? "," : "", i, g->uuid, g->total, g->reserved_bytes, g->used, unused, sim_shared_orphans((int)i, false));
        else
            fprintf(out, "%u  %s  %.1f of %.1f MiB in use\n", i, g->uuid, MIB(g->used), MIB(limit));
        for (uint32_t slot = 0; slot < state->proc_high; slot++) {
            const struct sim_usage *use = &state->procs[slot].use[i];
            if (state->procs[slot].role != SIM_ROLE_NONE && (use->contexts || sim_usage_bytes(use)))
                usage_of(&state->procs[slot], slot, use, json, &first);
        }
        if (json)
            fprintf(out, "]}");
    }
    if (json)
        fprintf(out, "]}\n");
    end();
}

void report_limits(bool json)
{
    struct sim_state *state = sim_state();
    static const char *const backends[] = {"none", "misc", "dmem"};
    bool first = true;
    if (!begin())
        return;
    sim_reap();
    if (json)
        fprintf(out, "{\"backend\":\"%s\",\"limits\":[", backends[state->memacct % 3]);
    for (uint32_t i = 0; i < SIM_LIMITS; i++) {
        const struct sim_limit *limit = &state->limits[i];
        if (!limit->group)
            continue;
        uint64_t used = sim_group_used(limit);
        if (json)
            fprintf(out, "%s{\"gpu\":%u,\"group\":%" PRIu64 ",\"path\":\"%s\",\"soft\":%" PRIu64 ",\"hard\":%" PRIu64
                   ",\"used\":%" PRIu64 ",\"binds\":%s}",
                   separator(&first), limit->gpu, limit->group, limit->path, limit->soft, limit->hard, used,
                   limit->idle ? "false" : "true");
        else if (limit->hard == SIM_UNLIMITED)
            fprintf(out, "%u  %10.1f MiB, no limit  %s\n", limit->gpu, MIB(used), limit->path);
        else
            fprintf(out, "%u  %10.1f of %.1f MiB  %s%s\n", limit->gpu, MIB(used), MIB(limit->hard), limit->path,
                   limit->idle ? " (its controller is off: an ancestor is charged)" : "");
    }
    if (json)
        fprintf(out, "]}\n");
    end();
}

/* ---- the run log ----------------------------------------------------------------------------------------------------- */

struct runner { /* The totals of a living or ended process that ran on the GPU. */
    uint64_t serial, busy_ns, kernels;
    int pid;
    bool alive;
};

static unsigned runners_of(const struct sim_state *state, uint32_t gpu, struct runner *list, unsigned room)
{
    unsigned count = 0;
    uint64_t first = state->past_count > SIM_PAST ? state->past_count - SIM_PAST : 0;
    for (uint64_t i = first; i < state->past_count && count < room; i++) {
        const struct sim_past *past = &state->past[i % SIM_PAST];
        if (past->gpu == (int)gpu && past->use.busy_ns)
            list[count++] = (struct runner){past->serial, past->use.busy_ns, past->use.kernels, past->pid, false};
    }
    for (uint32_t slot = 0; slot < state->proc_high && count < room; slot++) {
        const struct sim_usage *use = &state->procs[slot].use[gpu];
        if (state->procs[slot].role != SIM_ROLE_NONE && use->busy_ns)
            list[count++] = (struct runner){state->procs[slot].serial, use->busy_ns, use->kernels,
                                           sim_proc_pid((int)slot), true};
    }
    return count;
}

static uint64_t busy_between(const struct sim_gpu *g, uint64_t first, uint64_t serial, uint64_t from, uint64_t to)
{
    uint64_t sum = 0;
    for (uint64_t i = first; i < g->log_count; i++) {
        const struct sim_interval *at = &g->log[i % SIM_LOG];
        if (at->kind != SIM_RUN_KERNEL || at->serial != serial || at->end <= from || at->start >= to)
            continue;
        sum += (at->end < to ? at->end : to) - (at->start > from ? at->start : from);
    }
    return sum;
}

static void print_windows(const struct sim_gpu *g, const struct runner *runners, unsigned count, uint64_t window, bool json)
{
    uint64_t first = g->log_count > SIM_LOG ? g->log_count - SIM_LOG : 0;
    bool first_window = true;
    if (json)
        fprintf(out, ",\"windows\":[");
    uint64_t from = g->log_count ? g->log[first % SIM_LOG].start : 0;
    for (; g->log_count && from + window <= g->simulated; from += window) {
        bool first_share = true;
        if (json)
            fprintf(out, "%s{\"start\":%" PRIu64 ",\"end\":%" PRIu64 ",\"shares\":{", separator(&first_window), from, from + window);
        else
            fprintf(out, "     %.3f s:", (double)from / 1e9);
        for (unsigned i = 0; i < count; i++) {
            double share = (double)busy_between(g, first, runners[i].serial, from, from + window) / (double)window;
            if (json)
                fprintf(out, "%s\"%" PRIu64 "\":%.6f", separator(&first_share), runners[i].serial, share);
            else
                fprintf(out, "  pid %d %.1f %%", runners[i].pid, 100 * share);
        }
        fprintf(out, json ? "}}" : "\n");
    }
    if (json)
        fprintf(out, "]");
}

static void print_intervals(const struct sim_gpu *g, bool json)
{
    uint64_t first = g->log_count > SIM_LOG ? g->log_count - SIM_LOG : 0;
    if (json)
        fprintf(out, ",\"intervals\":[");
    for (uint64_t i = first; i < g->log_count; i++) {
        const struct sim_interval *at = &g->log[i % SIM_LOG];
        const char *kind = at->kind == SIM_RUN_KERNEL ? "kernel" : "switch";
        if (json)
            fprintf(out, "%s{\"start\":%" PRIu64 ",\"end\":%" PRIu64 ",\"kind\":\"%s\",\"pid\":%d,\"serial\":%" PRIu64
                   ",\"context\":%u}",
                   i == first ? "" : ",", at->start, at->end, kind, at->pid, at->serial, at->channel);
        else
            fprintf(out, "     %.6f … %.6f s  %-6s pid %d context %u\n", (double)at->start / 1e9, (double)at->end / 1e9, kind,
                   at->pid, at->channel);
    }
    if (json)
        fprintf(out, "]");
}

void report_log(bool json, uint64_t window, bool intervals)
{
    struct sim_state *state = sim_state();
    struct runner *runners = calloc(SIM_PAST + SIM_MAX_PROCS, sizeof *runners);
    if (!runners || !begin()) {
        free(runners);
        return;
    }
    uint64_t now = sim_now();
    sim_reap();
    if (json)
        fprintf(out, "{\"now\":%" PRIu64 ",\"gpus\":[", now);
    for (uint32_t i = 0; i < state->gpu_count; i++) {
        struct sim_gpu *g = &state->gpus[i];
        sim_advance((int)i, now);
        unsigned count = runners_of(state, i, runners, SIM_PAST + SIM_MAX_PROCS);
        if (json)
            fprintf(out, "%s{\"index\":%u,\"uuid\":\"%s\",\"busy_ns\":%" PRIu64 ",\"switch_ns\":%" PRIu64 ",\"switches\":%" PRIu64
                   ",\"slice_ns\":%" PRIu64 ",\"processes\":[",
                   i ? "," : "", i, g->uuid, g->busy_ns, g->switch_ns, g->switches, sim_slice_ns((int)i));
        else
            fprintf(out, "%u  %s  busy %.3f s, %" PRIu64 " context switches in %.3f s\n", i, g->uuid, (double)g->busy_ns / 1e9,
                   g->switches, (double)g->switch_ns / 1e9);
        for (unsigned r = 0; r < count; r++)
            if (json)
                fprintf(out, "%s{\"pid\":%d,\"serial\":%" PRIu64 ",\"alive\":%s,\"busy_ns\":%" PRIu64 ",\"kernels\":%" PRIu64
                       ",\"share\":%.6f}",
                       r ? "," : "", runners[r].pid, runners[r].serial, runners[r].alive ? "true" : "false",
                       runners[r].busy_ns, runners[r].kernels,
                       g->busy_ns ? (double)runners[r].busy_ns / (double)g->busy_ns : 0.0);
            else
                fprintf(out, "     pid %-8d%s ran %.3f s, %" PRIu64 " kernels, %.1f %% of what ran\n", runners[r].pid,
                       runners[r].alive ? "" : " (ended)", (double)runners[r].busy_ns / 1e9, runners[r].kernels,
                       g->busy_ns ? 100.0 * (double)runners[r].busy_ns / (double)g->busy_ns : 0.0);
        if (json)
            fprintf(out, "]");
        if (window)
            print_windows(g, runners, count, window, json);
        if (intervals)
            print_intervals(g, json);
        if (json)
            fprintf(out, "}");
    }
    if (json)
        fprintf(out, "]}\n");
    end();
    free(runners);
}
