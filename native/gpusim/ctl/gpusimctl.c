/* SPDX-License-Identifier: Apache-2.0 */
/* The command gpusimctl: shows the true state of the simulated GPU host and injects faults, for tests and people. */
#include "ctl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char usage[] =
    "usage: gpusimctl COMMAND\n"
    "  devices [--json]             the GPUs of the host\n"
    "  usage [--json]               memory in use, by GPU and process\n"
    "  log [--json] [--window MS] [--intervals]\n"
    "                               kernels that ran: totals; --window: shares per window; --intervals: each interval\n"
    "  reset [--force]              read the profile again, clear log, faults and modes (--force: even while processes run)\n"
    "  xid GPU NUMBER               raise an Xid, an error report of the driver\n"
    "  ecc GPU COUNT [single]       COUNT uncorrectable (or corrected) ECC errors\n"
    "  fall-off GPU | recover GPU   take the GPU off the bus; bring it back\n"
    "  nvml-fail on|off             let nvmlInit fail\n"
    "  limits [--json]              memory limits of control groups, and what is charged to them\n"
    "  memacct-forget               lose all memory limits, as a reload of the driver does\n"
    "  memacct-drop-next            report success for the next limit that is set, but do not set it\n"
    "  memacct-stale GPU MIB        let the next group inherit a limit of MIB from a removed group (controller misc)\n"
    "  dead-creator on|off          charge no memory if the process that opened the driver (the creator) has ended\n"
    "  forked-child on|off          let a forked child use the driver that its parent opened, which CUDA forbids\n"
    "  limits-by-anybody on|off     let processes without CAP_SYS_ADMIN set memory limits\n"
    "  clock real|manual|auto       choose the clock. manual: only 'clock advance' moves the time; auto: the time\n"
    "                               jumps to the next event when all processes wait\n"
    "  clock [advance MS]           show the time, or move a manual clock\n"
    "GPU is an index or a UUID. GPUSIM_STATE and GPUSIM_PROFILE name the host's files.\n";

static int die(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("gpusimctl: ", stderr);
    vfprintf(stderr, format, arguments);
    fputs("\n", stderr);
    va_end(arguments);
    return 2;
}

static int gpu_of(const char *text)
{
    char *end;
    unsigned long index = strtoul(text, &end, 10);
    for (uint32_t i = 0; i < sim_state()->gpu_count; i++)
        if ((*text && !*end && index == i) || strcasecmp(text, sim_state()->gpus[i].uuid) == 0)
            return (int)i;
    return -1;
}

static bool number(const char *text, double *out)
{
    char *end;
    *out = strtod(text, &end);
    return end != text && !*end && *out >= 0;
}

static int on_gpu(int argc, char **argv)
{
    struct sim_state *state = sim_state();
    int gpu = argc >= 2 ? gpu_of(argv[1]) : -1;
    double value = 0;
    if (gpu < 0)
        return die("%s: expected a GPU (0 to %u, or a UUID), found \"%s\"; see gpusimctl devices", argv[0],
                   state->gpu_count - 1, argc >= 2 ? argv[1] : "");
    bool needs_number = !strcmp(argv[0], "xid") || !strcmp(argv[0], "ecc") || !strcmp(argv[0], "memacct-stale");
    if (needs_number && (argc < 3 || !number(argv[2], &value) || value < 1))
        return die("%s: expected a number from 1 on, found \"%s\"", argv[0], argc >= 3 ? argv[2] : "");
    sim_lock();
    struct sim_gpu *g = &state->gpus[gpu];
    sim_advance(gpu, sim_now());
    if (!strcmp(argv[0], "xid")) {
        sim_event_add(gpu, SIM_EVENT_XID, (uint64_t)value);
    } else if (!strcmp(argv[0], "ecc")) {
        bool single = argc >= 4 && !strcmp(argv[3], "single");
        uint64_t *counters = single ? g->ecc_single : g->ecc_double;
        counters[0] += (uint64_t)value;
        counters[1] += (uint64_t)value;
        sim_event_add(gpu, single ? SIM_EVENT_ECC_SINGLE : SIM_EVENT_ECC_DOUBLE, (uint64_t)value);
        if (!single)
            sim_event_add(gpu, SIM_EVENT_XID, 48); /* Xid 48 means a double-bit ECC error. */
    } else if (!strcmp(argv[0], "memacct-stale")) {
        state->stale_limit[gpu] = (uint64_t)value << 20;
    } else if (!strcmp(argv[0], "fall-off")) {
        sim_gpu_lose(gpu);
    } else {
        sim_gpu_recover(gpu);
    }
    sim_unlock();
    return 0;
}

static int switch_command(int argc, char **argv, uint32_t *fault)
{
    if (argc != 2 || (strcmp(argv[1], "on") && strcmp(argv[1], "off")))
        return die("%s: expected on or off, found \"%s\"", argv[0], argc > 1 ? argv[1] : "");
    sim_lock();
    *fault = !strcmp(argv[1], "on");
    sim_unlock();
    return 0;
}

static int clock_command(int argc, char **argv)
{
    static const char *const modes[] = {"real", "manual", "auto"};
    double ms;
    if (argc == 1) {
        printf("%s %.6f s\n", modes[sim_state()->clock_mode % 3], (double)sim_now() / 1e9);
        return 0;
    }
    for (unsigned i = 0; i < 3; i++)
        if (argc == 2 && !strcmp(argv[1], modes[i])) {
            sim_clock_set((enum sim_clock)i);
            return 0;
        }
    if (argc == 3 && !strcmp(argv[1], "advance") && number(argv[2], &ms)) {
        if (sim_state()->clock_mode == SIM_CLOCK_REAL)
            return die("clock advance: expected a manual clock, found the real one; run gpusimctl clock manual");
        sim_clock_advance((uint64_t)(ms * 1e6));
        return 0;
    }
    return die("clock: expected real, manual, auto or advance MS, found \"%s\"", argv[1]);
}

static int log_command(int argc, char **argv, bool json)
{
    double window = 0;
    bool intervals = false;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--intervals"))
            intervals = true;
        else if (!strcmp(argv[i], "--window") && i + 1 < argc && number(argv[i + 1], &window) && window > 0)
            i++;
        else if (strcmp(argv[i], "--json"))
            return die("log: unknown option \"%s\"; see gpusimctl", argv[i]);
    }
    report_log(json, (uint64_t)(window * 1e6), intervals);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fputs(usage, stderr);
        return 2;
    }
    argc--;
    argv++;
    if (!strcmp(argv[0], "--help") || !strcmp(argv[0], "help")) {
        fputs(usage, stdout);
        return 0;
    }
    if (sim_attach(SIM_ROLE_TOOL) != SIM_OK)
        return die("%s", sim_error());
    bool json = false;
    for (int i = 1; i < argc; i++)
        json = json || !strcmp(argv[i], "--json");
    if (!strcmp(argv[0], "devices")) {
        report_devices(json);
        return 0;
    }
    if (!strcmp(argv[0], "usage")) {
        report_usage(json);
        return 0;
    }
    if (!strcmp(argv[0], "log"))
        return log_command(argc, argv, json);
    if (!strcmp(argv[0], "reset"))
        return sim_reset(argc > 1 && !strcmp(argv[1], "--force")) == SIM_OK ? 0 : die("%s", sim_error());
    if (!strcmp(argv[0], "clock"))
        return clock_command(argc, argv);
    if (!strcmp(argv[0], "limits")) {
        report_limits(json);
        return 0;
    }
    if (!strcmp(argv[0], "nvml-fail"))
        return switch_command(argc, argv, &sim_state()->nvml_fail);
    if (!strcmp(argv[0], "dead-creator"))
        return switch_command(argc, argv, &sim_state()->dead_creators);
    if (!strcmp(argv[0], "forked-child"))
        return switch_command(argc, argv, &sim_state()->forked_children);
    if (!strcmp(argv[0], "limits-by-anybody"))
        return switch_command(argc, argv, &sim_state()->anybody_limits);
    if (!strcmp(argv[0], "memacct-drop-next") || !strcmp(argv[0], "memacct-forget")) {
        sim_lock();
        if (!strcmp(argv[0], "memacct-forget"))
            sim_group_forget();
        else
            sim_state()->drop_next_limit = 1;
        sim_unlock();
        return 0;
    }
    static const char *const gpu_commands[] = {"xid", "ecc", "fall-off", "recover", "memacct-stale"};
    for (unsigned i = 0; i < sizeof gpu_commands / sizeof gpu_commands[0]; i++)
        if (!strcmp(argv[0], gpu_commands[i]))
            return on_gpu(argc, argv);
    return die("unknown command \"%s\"; run gpusimctl for the list", argv[0]);
}
