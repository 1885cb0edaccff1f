/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vgpu-arbiter: gives the tenants (containers) that share a GPU their turns to use it. An allocation is the part of one
 * or more GPUs that one container was given. For every GPU of an allocation the arbiter writes a gpu page: a file that
 * says when the container may use this GPU. The arbiter stores no state of its own, so after a kill and restart it
 * continues from the pages. While it does not run, each tenant limits its own use to its share.
 *
 * vgpu-arbiter [--run DIR] [--json-status] [--help]
 */
#include "tenants.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define SCAN_NS (1000 * MS)  /* SCAN_NS: folders are scanned at this interval even without an inotify event. */
#define LIMITS_NS (50 * MS)  /* LIMITS_NS: a live change of a limit is seen within this time. */
#define WATCH (IN_CREATE | IN_DELETE | IN_MOVED_TO | IN_MOVED_FROM | IN_ONLYDIR)

static volatile sig_atomic_t ending;

static void end(int signal)
{
    (void)signal;
    ending = 1;
}

static uint64_t monotonic(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Adds watches for new folders. For a folder that is already watched, inotify returns the existing watch. */
static void watch(int descriptor, const struct node *node)
{
    char path[700];
    inotify_add_watch(descriptor, node->root, WATCH);
    for (int i = 0; i < ALLOCATIONS; i++)
        if (node->allocation[i].used && snprintf(path, sizeof path, "%s/%s", node->root, node->allocation[i].id) < (int)sizeof path)
            inotify_add_watch(descriptor, path, WATCH);
}

static bool drain(int descriptor)
{
    char events[4096];
    bool any = false;
    while (read(descriptor, events, sizeof events) > 0)
        any = true;
    return any;
}

static uint64_t look_at_all(struct node *node, uint64_t now)
{
    uint64_t next = now + 50 * MS;
    bool any = false;
    for (int i = 0; i < GPUS; i++) {
        struct gpu *gpu = &node->gpu[i];
        if (!gpu->uuid[0])
            continue;
        any = true;
        if (gpu->next <= now)
            tenants_look(gpu, now);
        if (gpu->next < next)
            next = gpu->next;
    }
    return any ? next : now + SCAN_NS;
}

static int run(struct node *node, const char *folder)
{
    char lock[600];
    snprintf(lock, sizeof lock, "%s/arbiter.lock", folder);
    int held = open(lock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (held < 0) {
        fprintf(stderr, "vgpu-arbiter: %s cannot be opened: %s; does %s exist, and may this user write there?\n", lock, strerror(errno),
                folder);
        return 1;
    }
    if (flock(held, LOCK_EX | LOCK_NB) != 0) {
        fprintf(stderr, "vgpu-arbiter: %s is locked: another arbiter serves %s; stop that arbiter first\n", lock, folder);
        return 1;
    }
    sigset_t stops, before;
    sigemptyset(&stops);
    sigaddset(&stops, SIGTERM);
    sigaddset(&stops, SIGINT);
    /* Signals are delivered only during the wait. So a signal that arrives between the test and the wait is not
     * lost. */
    sigprocmask(SIG_BLOCK, &stops, &before);
    struct sigaction action = {.sa_handler = end};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    int signs = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    uint64_t scanned = 0, limits = 0, alive = 0, interval = notify_interval();
    bool again = true, ready = false;
    while (!ending) {
        uint64_t now = monotonic();
        if (again || now - scanned >= SCAN_NS) {
            tenants_scan(node, now);
            watch(signs, node);
            scanned = limits = now;
        } else if (now - limits >= LIMITS_NS && tenants_count(node)) {
            tenants_limits(node, now);
            limits = now;
        }
        uint64_t next = look_at_all(node, now);
        if (!ready) {
            notify("READY=1\nSTATUS=serving");
            ready = true;
        }
        if (interval && now - alive >= interval) {
            notify("WATCHDOG=1");
            alive = now;
        }
        if (next > scanned + SCAN_NS)
            next = scanned + SCAN_NS;
        if (interval && next > alive + interval)
            next = alive + interval;
        now = monotonic();
        uint64_t left = next > now ? next - now : 0;
        struct timespec timeout = {.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
        struct pollfd sign = {.fd = signs, .events = POLLIN};
        int found = ppoll(&sign, signs >= 0 ? 1 : 0, &timeout, &before);
        again = found > 0 && drain(signs);
    }
    notify("STOPPING=1");
    tenants_release(node);
    return 0;
}

/* Raises the limit of open files: every allocation folder needs two descriptors, and a shell's limit of 1024 is too
 * low. */
static void raise_descriptors(void)
{
    struct rlimit limit;
    const rlim_t wanted = 4 * ALLOCATIONS;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted)
        return;
    limit.rlim_cur = limit.rlim_max < wanted ? limit.rlim_max : wanted;
    setrlimit(RLIMIT_NOFILE, &limit);
}

int main(int argc, char **argv)
{
    static struct node node;
    const char *folder = "/run/vgpu";
    bool status = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--run") == 0 && i + 1 < argc) {
            folder = argv[++i];
        } else if (strcmp(argv[i], "--json-status") == 0) {
            status = true;
        } else if (strcmp(argv[i], "--help") == 0) {
            puts("vgpu-arbiter [--run DIR] [--json-status]\n"
                 "  --run DIR       folder of the allocations: DIR/allocations/<id>/ (default /run/vgpu)\n"
                 "  --json-status   print the state of each tenant and its turns, and exit");
            return 0;
        } else {
            fprintf(stderr, "vgpu-arbiter: unknown argument \"%s\"; see vgpu-arbiter --help\n", argv[i]);
            return 2;
        }
    }
    if (snprintf(node.root, sizeof node.root, "%s/allocations", folder) >= (int)sizeof node.root) {
        fprintf(stderr, "vgpu-arbiter: --run %s is too long\n", folder);
        return 2;
    }
    for (int i = 0; i < GPUS; i++)
        node.gpu[i].schedule.holder = -1;
    node.quiet = status;
    raise_descriptors();
    return status ? status_print(&node) : run(&node, folder);
}
