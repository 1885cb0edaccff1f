/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counts the instructions and system calls that driver calls take, with or without the library.
 *
 * steps LIBRARY ROUTE CALL COUNT BLOCKS     counts the instructions of COUNT calls of CALL, one line each
 * steps LIBRARY ROUTE start 1 0             counts those of cuInit and the creation of a context
 * steps LIBRARY exec PROGRAM                counts those of a whole program, from its first instruction to its end
 *
 * Single-steps a program with LIBRARY preloaded (an empty LIBRARY means none). ROUTE is the way to look up a function
 * (work.h); BLOCKS blocks of memory are allocated before the first call. A line has six numbers: all instructions;
 * instructions outside the driver; locked instructions in LIBRARY; system calls; calls from LIBRARY into the driver; calls
 * into the vDSO, by which a program reads the clock.
 *
 * Instructions in the vDSO, code of the running kernel, are not counted, because their number varies. A read of the
 * clock starts again if the kernel has updated the time meanwhile; under single-stepping every fourth call does so.
 *
 * A step takes thousands of times as long as the instruction. The library would see pauses of the program, so its reads
 * of the time stamp counter return one tick for each instruction.
 *
 * An instruction is locked if other processors wait for it: a lock prefix, or an exchange with memory.
 */
#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include "work.h"

enum { WARM = 64 };

static int caller(char **argv)
{
    static struct work work;
    unsigned count = (unsigned)atoi(argv[4]);
    bool start = strcmp(argv[3], "start") == 0;
    if (!work_route(&work, argv[2]))
        return 11;
    if (!start) {
        if (!work_nvml() || !work_start(&work, 0) || !work_fill(&work, strtoul(argv[5], NULL, 0)))
            return 12;
        for (unsigned i = 0; i < WARM; i++)
            if (!work_before(&work, argv[3]) || !work_call(&work, argv[3]))
                return 13;
    }
    ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    for (unsigned i = 0; i < count; i++) {
        if (!start && !work_before(&work, argv[3]))
            return 14;
        raise(SIGSTOP);
        if (!(start ? work_start(&work, 0) : work_call(&work, argv[3])))
            return 15;
        raise(SIGSTOP);
    }
    return 0;
}

struct range {
    uint64_t low, high;
};
struct code {
    struct range ours, vdso, driver[2]; /* the driver's libraries, libcuda and libnvidia-ml */
};

/* Finds the address ranges of `library`, the vDSO and the driver in process `pid`; code that is not loaded has an empty
 * range. */
static struct code code_of(pid_t pid, const char *library)
{
    char path[64], line[512], mode[8], name[256];
    struct code found = {0};
    unsigned long low, high;
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *maps = fopen(path, "r");
    while (maps && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %255s", &low, &high, mode, name) != 4 || mode[2] != 'x')
            continue;
        struct range range = {low, high};
        if (library[0] && strcmp(name, library) == 0)
            found.ours = range;
        else if (strcmp(name, "[vdso]") == 0)
            found.vdso = range;
        else if (strstr(name, "/libcuda.so"))
            found.driver[0] = range;
        else if (strstr(name, "/libnvidia-ml.so"))
            found.driver[1] = range;
    }
    if (maps)
        fclose(maps);
    return found;
}

static bool within(uint64_t at, struct range range)
{
    return at >= range.low && at < range.high;
}

static bool is_locked(const unsigned char *code)
{
    unsigned i = 0;
    for (; i < 4; i++) {
        if (code[i] == 0xf0)
            return true;
        if (!strchr("\x66\xf2\xf3\x2e\x36\x3e\x26\x64\x65", code[i]))
            break;
    }
    if ((code[i] & 0xf0) == 0x40) /* a REX prefix */
        i++;
    return (code[i] == 0x86 || code[i] == 0x87) && (code[i + 1] & 0xc0) != 0xc0;
}

struct counts {
    unsigned long all, beside, locked, calls, entries, clock;
};

/* Value of the time stamp counter that the library sees while it is stepped. */
static uint64_t ticks = 1ull << 40;

/* Emulates the program's rdtsc instruction. */
static bool is_counter(pid_t pid, const unsigned char *code, struct user_regs_struct *registers)
{
    if (code[0] != 0x0f || code[1] != 0x31)
        return false;
    registers->rax = ticks & 0xffffffffu;
    registers->rdx = ticks >> 32;
    registers->rip += 2;
    ptrace(PTRACE_SETREGS, pid, NULL, registers);
    return true;
}

/* Single-steps until something other than a step stops the program. Returns 0 at a SIGSTOP, 1 if the program ended. */
static int walk(pid_t pid, const struct code *code, struct counts *counts, int *status)
{
    struct user_regs_struct registers;
    bool was_ours = false, was_vdso = false;
    for (;;) {
        ptrace(PTRACE_GETREGS, pid, NULL, &registers);
        errno = 0;
        union {
            long word;
            unsigned char code[sizeof(long)];
        } at = {.word = ptrace(PTRACE_PEEKTEXT, pid, registers.rip, NULL)};
        bool readable = errno == 0, ours = within(registers.rip, code->ours);
        bool driver = within(registers.rip, code->driver[0]) || within(registers.rip, code->driver[1]);
        ticks++;
        if (ours && readable && is_counter(pid, at.code, &registers)) {
            counts->all++;
            counts->beside++;
            continue;
        }
        if (ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL) != 0 || waitpid(pid, status, 0) != pid)
            return 1;
        bool vdso = within(registers.rip, code->vdso);
        counts->clock += vdso && !was_vdso;
        was_vdso = vdso;
        counts->all += !vdso;
        counts->beside += !driver && !vdso;
        counts->locked += ours && readable && is_locked(at.code);
        counts->calls += readable && at.code[0] == 0x0f && at.code[1] == 0x05;
        counts->entries += was_ours && driver;
        was_ours = ours;
        if (!WIFSTOPPED(*status))
            return 1;
        if (WSTOPSIG(*status) == SIGSTOP)
            return 0;
    }
}

static void print(const struct counts *counts)
{
    printf("%lu %lu %lu %lu %lu %lu\n", counts->all, counts->beside, counts->locked, counts->calls, counts->entries,
           counts->clock);
}

int main(int argc, char **argv)
{
    int status;
    if (argc == 6 && strcmp(argv[1], "--caller") == 0)
        return caller(argv);
    bool whole = argc == 4 && strcmp(argv[2], "exec") == 0;
    if (!whole && argc != 6)
        return 2;
    /* Both processes run on one processor: each step wakes both, and waking another processor is expensive. */
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(sched_getcpu(), &here);
    sched_setaffinity(0, sizeof here, &here);
    pid_t pid = fork();
    if (pid == 0) {
        if (argv[1][0])
            setenv("LD_PRELOAD", argv[1], 1);
        if (whole) {
            ptrace(PTRACE_TRACEME, 0, NULL, NULL);
            execl(argv[3], argv[3], NULL);
        } else {
            execl("/proc/self/exe", argv[0], "--caller", argv[2], argv[3], argv[4], argv[5], NULL);
        }
        _exit(127);
    }
    if (waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status)) {
        fprintf(stderr, "steps: the program ended before it was stopped, status %#x\n", (unsigned)status);
        return 3;
    }
    if (whole) {
        struct counts counts = {0};
        walk(pid, &(struct code){0}, &counts, &status);
        print(&counts);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 4;
    }
    for (int i = 0; i < atoi(argv[4]); i++) {
        struct counts counts = {0};
        struct code code = code_of(pid, argv[1]);
        if (walk(pid, &code, &counts, &status) != 0) {
            fprintf(stderr, "steps: the program ended inside call %d, status %#x\n", i, (unsigned)status);
            return 5;
        }
        print(&counts);
        /* Continues from the end of one call to the start of the next. */
        if (ptrace(PTRACE_CONT, pid, NULL, NULL) != 0 || waitpid(pid, &status, 0) != pid)
            return 6;
        if (!WIFSTOPPED(status))
            break;
    }
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    return 0;
}
