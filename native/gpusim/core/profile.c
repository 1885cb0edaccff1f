/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads the profile, a text file that describes the simulated host. It has `key = value` lines, `#` comments, and one
 * [gpu] section for each kind of GPU. An unknown key or a value out of range is an error. Its message names the file
 * and the line, and says: expected …, found …. Many strings below, such as "a whole number", are one of the two parts
 * of such a message.
 */
#include "internal.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

struct parser {
    const char *path;
    unsigned line;
    struct sim_config *config;
    struct sim_gpu_config section; /* The [gpu] section that is being read. */
    bool in_section;
    unsigned copies;
};

static bool fault(const struct parser *p, const char *key, const char *value, const char *expected)
{
    sim_fail("%s:%u: %s: expected %s, found \"%s\"; correct the profile, then run gpusimctl reset", p->path, p->line,
             key, expected, value);
    return false;
}

static bool number(const struct parser *p, const char *key, const char *text, double low, double high, double *out)
{
    char *end, expected[80];
    errno = 0;
    double value = strtod(text, &end);
    if (end == text || *end || errno || !(value >= low && value <= high)) {
        snprintf(expected, sizeof expected, "a number from %.10g to %.10g", low, high);
        return fault(p, key, text, expected);
    }
    *out = value;
    return true;
}

static bool whole(const struct parser *p, const char *key, const char *text, uint32_t low, uint32_t high, uint32_t *out)
{
    double value;
    if (!number(p, key, text, low, high, &value))
        return false;
    if (value != (double)(uint32_t)value)
        return fault(p, key, text, "a whole number");
    *out = (uint32_t)value;
    return true;
}

static bool text(const struct parser *p, const char *key, const char *value, char *out, size_t size)
{
    if (!*value || strlen(value) >= size)
        return fault(p, key, value, "a text that is neither empty nor longer than the field");
    memcpy(out, value, strlen(value) + 1);
    return true;
}

/* Parses the hostile behaviours (CUDA allows them, but most drivers avoid them): "all", names separated by commas, or
 * nothing for a driver without them. */
static bool behaviours(const struct parser *p, const char *value, uint32_t *out)
{
    static const char *const names[] = {"context-lock", "callbacks",     "teardown", "slow-nvml",
                                        "capture-query", "waiting-frees", "rounding"};
    uint32_t found = !strcmp(value, "all") ? (1u << COUNT(names)) - 1 : 0;
    for (const char *at = found ? "" : value; *at;) {
        size_t length = strcspn(at, ","), used = length;
        while (used && isspace((unsigned char)at[used - 1]))
            used--;
        unsigned i = 0;
        while (i < COUNT(names) && (strlen(names[i]) != used || strncmp(names[i], at, used) != 0))
            i++;
        if (i == COUNT(names))
            return fault(p, "hostile", value,
                         "all, or names separated by commas out of context-lock, callbacks, teardown, slow-nvml, "
                         "capture-query, waiting-frees, rounding");
        found |= 1u << i;
        at += length + (at[length] == ',');
        at += strspn(at, " \t");
    }
    *out = found;
    return true;
}

/* Parses a value that must be one of `names` and stores its index. */
static bool choice(const struct parser *p, const char *key, const char *value, const char *const *names, uint32_t *out)
{
    char expected[80] = "";
    for (uint32_t i = 0; names[i]; i++) {
        if (!strcmp(value, names[i])) {
            *out = i;
            return true;
        }
        snprintf(expected + strlen(expected), sizeof expected - strlen(expected), "%s%s", i ? " or " : "", names[i]);
    }
    return fault(p, key, value, expected);
}

static bool host_key(struct parser *p, const char *key, const char *value)
{
    struct sim_config *c = p->config;
    double d;
    uint32_t major, minor;
    char rest;
    if (!strcmp(key, "driver_version"))
        return text(p, key, value, c->driver_version, sizeof c->driver_version);
    if (!strcmp(key, "cuda_version")) {
        if (sscanf(value, "%" SCNu32 ".%" SCNu32 "%c", &major, &minor, &rest) != 2 || minor > 99)
            return fault(p, key, value, "major.minor, like 12.2");
        c->cuda_version = major * 1000 + minor * 10;
        return true;
    }
    if (!strcmp(key, "device_nodes")) {
        c->device_nodes_required = !strcmp(value, "require");
        return c->device_nodes_required || !strcmp(value, "ignore") || fault(p, key, value, "require or ignore");
    }
    if (!strcmp(key, "clock")) {
        static const char *const modes[] = {"real", "manual", "auto"};
        for (unsigned i = 0; i < COUNT(modes); i++)
            if (!strcmp(value, modes[i])) {
                c->clock = (enum sim_clock)i;
                return true;
            }
        return fault(p, key, value, "real, manual or auto");
    }
    if (!strcmp(key, "slice_us"))
        return number(p, key, value, 1, 1e7, &d) && (c->slice_ns = (uint64_t)(d * 1000), true);
    if (!strcmp(key, "switch_us"))
        return number(p, key, value, 0, 1e6, &d) && (c->switch_ns = (uint64_t)(d * 1000), true);
    if (!strcmp(key, "jitter_percent"))
        return number(p, key, value, 0, 90, &d) && (c->jitter_permille = (uint32_t)(d * 10), true);
    if (!strcmp(key, "copy_gib_per_s"))
        return number(p, key, value, 0.001, 1e4, &d) &&
               (c->copy_bytes_per_ms = (uint64_t)(d * 1073741824.0 / 1000), true);
    if (!strcmp(key, "allocation_granularity"))
        return whole(p, key, value, 1, 1u << 30, &major) && (c->granularity = major, true);
    if (!strcmp(key, "hostile"))
        return behaviours(p, value, &c->hostile);
    if (!strcmp(key, "memacct"))
        return choice(p, key, value, (const char *const[]){"none", "misc", "dmem", NULL}, &c->memacct);
    if (!strcmp(key, "cgroup_root"))
        return text(p, key, value, c->cgroup_root, sizeof c->cgroup_root) &&
               (*value == '/' || fault(p, key, value, "an absolute path"));
    if (!strcmp(key, "controllers"))
        return choice(p, key, value, (const char *const[]){"ignore", "require", NULL}, &c->controllers_required);
    if (!strcmp(key, "memacct_below_use"))
        return choice(p, key, value, (const char *const[]){"keep", "apply", NULL}, &c->lowers_below_use);
    if (!strcmp(key, "seed"))
        return number(p, key, value, 0, 9e15, &d) && (c->seed = (uint64_t)d, c->has_seed = true);
    return fault(p, "key", key,
                 "driver_version, cuda_version, device_nodes, clock, seed, slice_us, switch_us, jitter_percent, "
                 "copy_gib_per_s, allocation_granularity, hostile, memacct, cgroup_root, controllers, "
                 "memacct_below_use or a [gpu] section");
}

static bool gpu_key(struct parser *p, const char *key, const char *value)
{
    struct sim_gpu_config *g = &p->section;
    uint32_t n;
    char rest;
    if (!strcmp(key, "model")) {
        char expected[256] = "";
        g->model = sim_model_find(value);
        for (unsigned i = 0; !g->model && i < sim_model_count; i++)
            snprintf(expected + strlen(expected), sizeof expected - strlen(expected), "%s%s", i ? ", " : "one of ",
                     sim_models[i].key);
        return g->model || fault(p, key, value, expected);
    }
    if (!strcmp(key, "count"))
        return whole(p, key, value, 1, SIM_MAX_GPUS, &p->copies);
    if (!strcmp(key, "uuid"))
        return text(p, key, value, g->uuid, sizeof g->uuid) &&
               (!strncmp(value, "GPU-", 4) || fault(p, key, value, "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"));
    if (!strcmp(key, "name"))
        return text(p, key, value, g->name, sizeof g->name);
    if (!strcmp(key, "pci")) {
        g->has_pci = sscanf(value, "%x:%x:%x.0%c", &g->pci_domain, &g->pci_bus, &g->pci_device, &rest) == 3;
        return g->has_pci || fault(p, key, value, "domain:bus:device.0, like 00000000:3b:00.0");
    }
    if (!strcmp(key, "minor"))
        return whole(p, key, value, 0, 254, &n) && (g->minor = (int)n, true);
    if (!strcmp(key, "memory_mib"))
        return whole(p, key, value, 1, 1u << 24, &g->memory_mib);
    if (!strcmp(key, "reserved_mib"))
        return whole(p, key, value, 0, 1u << 24, &g->reserved_mib);
    if (!strcmp(key, "numa_node"))
        return whole(p, key, value, 1, 1023, &g->numa_node);
    if (!strcmp(key, "sm_count"))
        return whole(p, key, value, 1, 1024, &g->sm_count);
    if (!strcmp(key, "context_mib")) {
        g->has_context = true;
        return whole(p, key, value, 1, 65536, &g->context_mib);
    }
    if (!strcmp(key, "compute_capability")) {
        g->has_cc = sscanf(value, "%" SCNu32 ".%" SCNu32 "%c", &g->cc_major, &g->cc_minor, &rest) == 2;
        return g->has_cc || fault(p, key, value, "major.minor, like 8.0");
    }
    return fault(p, "key in [gpu]", key,
                 "model, count, uuid, name, pci, minor, memory_mib, reserved_mib, sm_count, context_mib, "
                 "numa_node or compute_capability");
}

static bool section_end(struct parser *p)
{
    if (!p->in_section)
        return true;
    p->in_section = false;
    if (!p->section.model)
        return fault(p, "[gpu] section", "no model", "a model");
    if (p->config->gpu_count + p->copies > SIM_MAX_GPUS)
        return fault(p, "[gpu] section", "more", "at most 16 GPUs on a host");
    if (p->copies > 1 && (p->section.uuid[0] || p->section.has_pci || p->section.minor >= 0))
        return fault(p, "count", "more than 1", "count = 1 where uuid, pci or minor is given");
    for (unsigned i = 0; i < p->copies; i++)
        p->config->gpus[p->config->gpu_count++] = p->section;
    return true;
}

static char *trim(char *s)
{
    while (isspace((unsigned char)*s))
        s++;
    for (char *end = s + strlen(s); end > s && isspace((unsigned char)end[-1]);)
        *--end = 0;
    return s;
}

static bool parse_line(struct parser *p, char *raw)
{
    raw[strcspn(raw, "#")] = 0;
    char *line = trim(raw);
    if (!*line)
        return true;
    if (*line == '[') {
        if (strcmp(line, "[gpu]"))
            return fault(p, "section", line, "[gpu]");
        if (!section_end(p))
            return false;
        memset(&p->section, 0, sizeof p->section);
        p->section.minor = -1;
        p->in_section = true;
        p->copies = 1;
        return true;
    }
    char *equals = strchr(line, '=');
    if (!equals)
        return fault(p, "line", line, "key = value");
    *equals = 0;
    char *key = trim(line), *value = trim(equals + 1);
    return p->in_section ? gpu_key(p, key, value) : host_key(p, key, value);
}

enum sim_status sim_profile_read(const char *path, struct sim_config *config)
{
    struct parser p = {.path = path, .config = config};
    char raw[1024];
    *config = (struct sim_config){.driver_version = "535.261.03", .cuda_version = 12020, .slice_ns = 1024000,
                                  .switch_ns = 50000, .jitter_permille = 100, .granularity = 1,
                                  .copy_bytes_per_ms = 12ull << 20, .cgroup_root = "/sys/fs/cgroup"};
    FILE *file = fopen(path, "re");
    if (!file) {
        sim_fail("%s: cannot read the profile of the simulated host: %s; write one or set GPUSIM_PROFILE", path,
                 strerror(errno));
        return SIM_ERR_NO_PROFILE;
    }
    bool good = true;
    while (good && fgets(raw, sizeof raw, file)) {
        p.line++;
        good = parse_line(&p, raw);
    }
    good = good && section_end(&p);
    if (good && config->memacct && atoi(config->driver_version) < 615)
        good = fault(&p, "memacct", config->driver_version, "driver_version 615 or newer, which has memory limits");
    fclose(file);
    return good ? SIM_OK : SIM_ERR_PROFILE;
}

/* The generator is splitmix64. Derived UUIDs must differ between hosts and be equal in every run. */
static uint64_t mix(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t host_seed(void)
{
    char name[256] = "";
    uint64_t hash = 1469598103934665603u;
    gethostname(name, sizeof name - 1);
    for (const char *c = name; *c; c++)
        hash = (hash ^ (unsigned char)*c) * 1099511628211u;
    return hash;
}

static void apply_gpu(const struct sim_gpu_config *c, struct sim_gpu *gpu, uint64_t seed, unsigned index)
{
    const struct sim_model *m = c->model;
    uint64_t random = seed + 1000003u * (index + 1), a = mix(&random), b = mix(&random);
    snprintf(gpu->model, sizeof gpu->model, "%s", m->key);
    snprintf(gpu->name, sizeof gpu->name, "%s", c->name[0] ? c->name : m->name);
    if (c->uuid[0])
        snprintf(gpu->uuid, sizeof gpu->uuid, "%s", c->uuid);
    else
        snprintf(gpu->uuid, sizeof gpu->uuid, "GPU-%08x-%04x-%04x-%04x-%012" PRIx64, (uint32_t)(a >> 32),
                 (uint32_t)(a >> 16) & 0xffff, (uint32_t)a & 0xffff, (uint32_t)(b >> 48) & 0xffff,
                 b & 0xffffffffffffu);
    snprintf(gpu->serial_number, sizeof gpu->serial_number, "%013" PRIu64, a % 10000000000000u);
    gpu->pci_domain = c->has_pci ? c->pci_domain : 0;
    gpu->pci_bus = c->has_pci ? c->pci_bus : 0x1b + 0x0c * index;
    gpu->pci_device = c->has_pci ? c->pci_device : 0;
    gpu->minor = c->minor >= 0 ? (uint32_t)c->minor : index;
    gpu->total = (uint64_t)(c->memory_mib ? c->memory_mib : m->memory_mib) << 20;
    gpu->reserved_bytes = (uint64_t)c->reserved_mib << 20;
    gpu->context_bytes = (uint64_t)(c->has_context ? c->context_mib : m->context_mib) << 20;
    gpu->numa_node = c->numa_node;
    gpu->sm_count = c->sm_count ? c->sm_count : m->sm_count;
    gpu->cc_major = c->has_cc ? c->cc_major : m->cc_major;
    gpu->cc_minor = c->has_cc ? c->cc_minor : m->cc_minor;
    gpu->arch = m->arch;

    gpu->lost = gpu->compute_mode = gpu->persistence = gpu->accounting = gpu->time_slice = 0;
    gpu->mig_mode = gpu->mig_pending = 0;
    memset(gpu->gi, 0, sizeof gpu->gi);
    memset(gpu->ecc_single, 0, sizeof gpu->ecc_single);
    memset(gpu->ecc_double, 0, sizeof gpu->ecc_double);
    gpu->ecc_mode = gpu->ecc_pending = m->ecc;
    gpu->power_limit_mw = m->power_limit_mw;
}

void sim_profile_apply(const struct sim_config *config, struct sim_state *state)
{
    uint64_t seed = config->has_seed ? config->seed : host_seed();
    memcpy(state->driver_version, config->driver_version, sizeof state->driver_version);
    state->cuda_version = config->cuda_version;
    state->device_nodes_required = config->device_nodes_required;
    state->jitter_permille = config->jitter_permille;
    state->slice_ns = config->slice_ns;
    state->switch_ns = config->switch_ns;
    state->hostile = config->hostile;
    state->granularity = config->granularity;
    if (state->hostile & SIM_HOSTILE_ROUNDING && state->granularity < SIM_ROUNDING)
        state->granularity = SIM_ROUNDING;
    state->copy_bytes_per_ms = config->copy_bytes_per_ms;
    state->nvml_fail = 0;
    state->event_count = 0;
    state->past_count = 0;
    state->late_calls = 0;
    state->memacct = config->memacct;
    state->controllers_required = config->controllers_required;
    state->lowers_below_use = config->lowers_below_use;
    memcpy(state->cgroup_root, config->cgroup_root, sizeof state->cgroup_root);
    sim_group_forget();
    state->gpu_count = config->gpu_count;
    for (unsigned i = 0; i < config->gpu_count; i++) {
        apply_gpu(&config->gpus[i], &state->gpus[i], seed, i);
        sim_engine_reset((int)i, sim_now(), seed + i);
    }
}
