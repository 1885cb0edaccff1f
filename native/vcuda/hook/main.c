/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vgpu-limit-hook: makes the driver itself (branch 615 or newer) limit a container to the memory of its slices (its
 * parts of GPUs). It is a CDI hook at stage createRuntime: it runs as root on the host, while the container's first
 * process waits in its control group and before any program of the tenant has run.
 *
 * vgpu-limit-hook --allocations DIR --cgroup-root DIR --nvml FILE --backend dmem|misc --enforce driver|auto  < state
 *
 * With `driver`, a container whose limit cannot be verified does not start. With `auto` it starts, only the library
 * (libvgpu) enforces the limit, and the file driver-limit records this with the reason. If another container uses the
 * slice, the container does not start in either case.
 */
#include "hook.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

char hook_reason[1024];

bool fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(hook_reason, sizeof hook_reason, format, arguments);
    va_end(arguments);
    return false;
}

static int usage(FILE *file, int status)
{
    fprintf(file, "usage: vgpu-limit-hook --allocations DIR --cgroup-root DIR --nvml FILE --backend dmem|misc --enforce driver|auto\n"
                  "CDI hook at stage createRuntime: sets the driver's memory limits of the container whose state is on standard input.\n");
    return status;
}

static bool parse(int count, char **words, struct options *options)
{
    const char *enforce = NULL;
    const struct {
        const char *name;
        const char **place;
    } known[] = {{"--allocations", &options->allocations}, {"--cgroup-root", &options->cgroup_root}, {"--nvml", &options->nvml},
                 {"--backend", &options->backend},         {"--enforce", &enforce}};
    const size_t all = sizeof known / sizeof *known;
    for (int at = 1; at < count; at += 2) {
        size_t i = 0;
        while (i < all && strcmp(known[i].name, words[at]) != 0)
            i++;
        if (i == all || at + 1 == count)
            return false;
        *known[i].place = words[at + 1];
    }
    for (size_t i = 0; i < all; i++)
        if (!*known[i].place || !**known[i].place)
            return false;
    options->driver = strcmp(enforce, "driver") == 0;
    return (options->driver || strcmp(enforce, "auto") == 0) &&
           (strcmp(options->backend, "dmem") == 0 || strcmp(options->backend, "misc") == 0);
}

int main(int count, char **words)
{
    struct options options = {0};
    static struct container container;
    static struct grant grant;
    static struct group group;
    if (count == 2 && strcmp(words[1], "--help") == 0)
        return usage(stdout, 0);
    if (!parse(count, words, &options))
        return usage(stderr, 64);
    bool known = bundle_state(&container) && bundle_allocations(&options, &container, &grant) && grant_read(&options, &grant);
    bool found = known && group_find(&options, &container, &group);
    if (found && !active_free(&options, &grant, &group)) {
        fprintf(stderr, "vgpu-limit-hook: %s\n", hook_reason);
        return 1;
    }
    if (found && enforce(&options, &grant, &group) && active_write(&options, &container, &grant, &group, NULL))
        return 0;
    if (options.driver) {
        fprintf(stderr, "vgpu-limit-hook: the driver's memory limit is not active, so the container does not start: %s\n", hook_reason);
        return 1;
    }
    static char why[sizeof hook_reason];
    memcpy(why, hook_reason, sizeof why);
    fprintf(stderr, "vgpu-limit-hook: only the library limits this container's memory: %s\n", why);
    if (known)
        active_write(&options, &container, &grant, &group, why);
    return 0;
}
