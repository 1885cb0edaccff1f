/* SPDX-License-Identifier: Apache-2.0 */
/* The program vgpu-probe: reads the options, runs the chosen checks of a slice's limits, and prints the results. A
 * slice is the container's part of a GPU. */
#include "bypass.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TIME_LIMIT_S 120
#define HOLD_AT_MOST_MS 60000

unsigned hold_ms;

typedef void (*check)(const struct slice *slice, struct board *board);

static const struct {
    const char *name;
    check run;
} checks[] = {
    {"totals", check_totals},
    {"visible-devices", check_visible},
    {"limit-exact", check_limit_exact},
    {"private-context", check_private_context},
    {"every-allocator", check_every_allocator},
    {"four-processes", check_four_processes},
    {"dlsym-route", check_dlsym},
    {"getprocaddress-route", check_getprocaddress},
    {"freed", check_freed},
    {"neighbours", check_neighbours},
    {"graphics", check_graphics},
    {"share", check_share},
    {"bypass-ipc-kept", check_bypass_by_ipc},
    {"bypass-handle-kept", check_bypass_by_handle},
    {"bypass-pool-kept", check_bypass_by_pool},
    {"bypass-array-kept", check_bypass_by_array},
#define BYPASS_ROW(way, name, attempt, holder, if_granted) {name, check_bypass_##way},
    BYPASSES(BYPASS_ROW)
    {"import-beside", check_import_beside},
    {"export-beside", check_export_beside},
};
#define CHECKS (sizeof checks / sizeof *checks)
/* The last two checks need a second probe in another container's slice, so they run only if --checks names them. */
#define ALONE (CHECKS - 2)

static const char *const words[] = {"passed", "violated", "not-run", "open"};

/* Runs a check in its own process, so that a crash becomes a verdict. */
static void run(check what, const struct slice *slice, struct board *board)
{
    int status = 0;
    struct report measured = board->report;
    memset(board, 0, sizeof *board);
    memcpy(board->report.launch_ns, measured.launch_ns, sizeof measured.launch_ns);
    memcpy(board->report.kernel_ns, measured.kernel_ns, sizeof measured.kernel_ns);
    result_set(&board->result, NOT_RUN, 0, 0, "", "the check measured nothing");
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        alarm(TIME_LIMIT_S);
        what(slice, board);
        _exit(0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child)
        return;
    if (WIFSIGNALED(status))
        result_set(&board->result, VIOLATED, 0, (uint64_t)WTERMSIG(status), "signal",
                   "the check was killed by a signal%s", WTERMSIG(status) == SIGALRM ? ", after more than two minutes" : "");
}

static void quoted(const char *text)
{
    putchar('"');
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            printf("\\%c", c);
        else if (c < 0x20 || c >= 0x7f)
            printf("\\u%04x", c);
        else
            putchar(c);
    }
    putchar('"');
}

static void print_devices(bool json, const struct report *report)
{
    for (int i = 0; i < report->device_count; i++) {
        const struct device_row *row = &report->devices[i];
        if (!json) {
            printf("GPU %d  %s  total %llu (NVML %llu)  free %llu  used %llu\n", row->index, row->uuid,
                   (unsigned long long)row->total_cuda, (unsigned long long)row->total_nvml,
                   (unsigned long long)row->free_cuda, (unsigned long long)row->used_nvml);
            continue;
        }
        printf("%s{\"index\":%d,\"uuid\":", i ? "," : "", row->index);
        quoted(row->uuid);
        printf(",\"total_cuda\":%llu,\"total_nvml\":%llu,\"free_cuda\":%llu,\"used_nvml\":%llu}",
               (unsigned long long)row->total_cuda, (unsigned long long)row->total_nvml, (unsigned long long)row->free_cuda,
               (unsigned long long)row->used_nvml);
    }
}

static void print_result(bool json, bool first, const char *name, const struct result *result)
{
    if (!json) {
        printf("%-21s %-9s expected %llu, found %llu %s: %s\n", name, words[result->verdict],
               (unsigned long long)result->expected, (unsigned long long)result->found, result->unit, result->detail);
        return;
    }
    printf("%s{\"name\":\"%s\",\"verdict\":\"%s\",\"expected\":%llu,\"found\":%llu,\"unit\":\"%s\",\"detail\":", first ? "" : ",",
           name, words[result->verdict], (unsigned long long)result->expected, (unsigned long long)result->found, result->unit);
    quoted(result->detail);
    printf(",\"left_out\":%s}", result->left_out ? "true" : "false");
}

static void print_measures(bool json, const struct report *report)
{
    const struct {
        const char *name;
        const uint64_t *ns;
    } measures[] = {{"launch-call", report->launch_ns}, {"kernel", report->kernel_ns}};
    const char *between = "";
    for (size_t m = 0; m < sizeof measures / sizeof *measures; m++)
        for (int i = 0; i < VGPU_MAX_DEVICES; i++) {
            unsigned long long value = measures[m].ns[i];
            if (value && json)
                printf("%s{\"name\":\"%s\",\"index\":%d,\"value\":%llu,\"unit\":\"ns\"}", between, measures[m].name, i, value);
            else if (value)
                printf("%-11s  GPU %d  %llu ns\n", measures[m].name, i, value);
            between = value ? "," : between;
        }
}

static int usage(FILE *out, int status)
{
    fprintf(out, "usage: vgpu-probe [--json] [--checks NAME,NAME…] [--hold MILLISECONDS] [--seconds SECONDS] [--together]\n"
                 "                  [--beside SOCKET]\n\n"
                 "Measures from inside a slice (a container's part of a GPU) whether its limits are enforced.\n\n"
                 "--hold: for this time limit-exact keeps the full slice, and an open bypass its memory, so that an observer\n"
                 "  outside can see the memory.\n"
                 "--seconds: checks that have not begun after this time are left out (not-run).\n"
                 "--together: tries bypasses that may be open, all at the same time, in a slice that is not filled.\n"
                 "--beside: socket of two probes in two slices; one runs the check export-beside, the other import-beside.\n"
                 "Checks:");
    for (size_t i = 0; i < CHECKS; i++)
        fprintf(out, "%s %s", i ? "," : "", checks[i].name);
    fprintf(out, ".\nExit status: 0 no limit is violated, 1 a check is violated, 2 a check could not be run, 64 bad arguments.\n");
    return status;
}

/* Parses a list of check names. Returns false if one is unknown. */
static bool choose(char *list, bool chosen[CHECKS])
{
    memset(chosen, 0, CHECKS * sizeof *chosen);
    for (char *rest = list, *name; (name = strtok_r(rest, ",", &rest));) {
        size_t i = 0;
        while (i < CHECKS && strcmp(checks[i].name, name) != 0)
            i++;
        if (i == CHECKS) {
            fprintf(stderr, "vgpu-probe: there is no check '%s'\n", name);
            return false;
        }
        chosen[i] = true;
    }
    return true;
}

static unsigned limit_s; /* Time limit in seconds; 0 means no limit. */

static bool limited_to(const char *text)
{
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    if (end == text || *end || !value || value > 3600)
        return false;
    limit_s = (unsigned)value;
    return true;
}

static bool is_late(const struct timespec *begun)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return limit_s && (now.tv_sec - begun->tv_sec) * 1000 + (now.tv_nsec - begun->tv_nsec) / 1000000 >= 1000L * (long)limit_s;
}

/* Runs the chosen bypasses together. Returns false if a check is not of a bypass that may be open, or if there are too
 * many. */
static bool run_together(const struct slice *slice, struct board *board, const bool chosen[CHECKS])
{
    const char *names[MOST_TOGETHER];
    struct result results[MOST_TOGETHER];
    int count = 0;
    for (size_t i = 0; i < CHECKS; i++) {
        if (!chosen[i])
            continue;
        if (count == MOST_TOGETHER || !may_be_open(checks[i].name))
            return false;
        names[count++] = checks[i].name;
    }
    go_together(slice, board, names, count, results);
    for (int i = 0; i < count; i++)
        print_result(true, i == 0, names[i], &results[i]);
    return true;
}

static bool held_for(const char *text)
{
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    if (end == text || *end || value > HOLD_AT_MOST_MS)
        return false;
    hold_ms = (unsigned)value;
    return true;
}

int main(int argc, char **argv)
{
    bool json = false, together = false, chosen[CHECKS], violated = false, skipped = false, first = true;
    memset(chosen, 0, sizeof chosen);
    memset(chosen, 1, ALONE * sizeof *chosen);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0)
            json = true;
        else if (strcmp(argv[i], "--help") == 0)
            return usage(stdout, 0);
        else if (strcmp(argv[i], "--beyond") == 0 && i + 2 < argc) {
            slice_is_empty = together;
            return asked_as_program(argv[i + 1], argv[i + 2]);
        } else if (strcmp(argv[i], "--together") == 0)
            together = true;
        else if (strcmp(argv[i], "--beside") == 0 && i + 1 < argc)
            beside_socket = argv[++i];
        else if (strcmp(argv[i], "--seconds") == 0 && i + 1 < argc && limited_to(argv[i + 1]))
            i++;
        else if (strcmp(argv[i], "--hold") == 0 && i + 1 < argc && held_for(argv[i + 1]))
            i++;
        else if (strcmp(argv[i], "--checks") != 0 || i + 1 == argc)
            return usage(stderr, 64);
        else if (!choose(argv[++i], chosen))
            return usage(stderr, 64);
    }
    /* The driver can hang if a program requests more unified memory than the card has while other containers fill the
     * card. So the checks run without oversubscription. */
    setenv("CUDA_OVERSUBSCRIBE", "false", 1);
    struct timespec begun;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    struct board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    static struct slice slice;
    if (board == MAP_FAILED) {
        perror("vgpu-probe: mmap");
        return 2;
    }
    slice_read(&slice);
    run(list_devices, &slice, board);
    if (together) {
        printf("{\"version\":1,\"devices\":[");
        print_devices(true, &board->report);
        printf("],\"checks\":[");
        bool able = run_together(&slice, board, chosen);
        printf("]}\n");
        return able ? 0 : usage(stderr, 64);
    }
    if (json)
        printf("{\"version\":1,\"devices\":[");
    print_devices(json, &board->report);
    if (json)
        printf("],\"checks\":[");
    for (size_t i = 0; i < CHECKS; i++) {
        if (!chosen[i])
            continue;
        if (is_late(&begun)) {
            result_set(&board->result, NOT_RUN, 0, 0, "", "left out: %u seconds had passed", limit_s);
            board->result.left_out = true;
        } else
            run(checks[i].run, &slice, board);
        print_result(json, first, checks[i].name, &board->result);
        first = false;
        violated = violated || board->result.verdict == VIOLATED;
        skipped = skipped || board->result.verdict == NOT_RUN;
    }
    if (json)
        printf("],\"measures\":[");
    print_measures(json, &board->report);
    if (json)
        printf("]}\n");
    fflush(stdout);
    return violated ? 1 : skipped ? 2 : 0;
}
