/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures the share of the GPU's time that a busy program in this slice really gets, in windows of a second.
 *
 * An arithmetic kernel is first timed alone with the GPU's own events and then launched as fast as the driver accepts
 * it. The share in a window is the number of kernels that ended in it, times the duration of one kernel alone, divided
 * by the length of the window. The probe sets the compute policy `force` for its process, because otherwise a tenant
 * that is alone may use the whole GPU. Other containers can only reduce the share, so only a larger share is a fault.
 */
#include "probe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "loader.h"

#define WINDOWS 3
#define WINDOW_NS 1000000000ull
#define TOLERANCE_PERMILLE 50
#define IN_FLIGHT 8
#define TIMED 15
#define SPIN_ROUNDS 100000
#define MOST_ROUNDS 100000000
#define WANTED_US 500.0f /* Wanted duration of one kernel in microseconds. */
#define TRIES 3

typedef struct CUfunc_st *CUfunction;

/* The kernel's comment line sets the kernel's cost in the simulated driver, which runs no code. */
static const char image[] = ".version 6.0\n"
                            ".target sm_50\n"
                            ".address_size 64\n"
                            "// .gpusim kernel vgpu_probe_spin 500\n"
                            ".visible .entry vgpu_probe_spin(.param .u32 rounds, .param .u64 never)\n"
                            "{\n"
                            "    .reg .u32 %r<5>;\n"
                            "    .reg .u64 %d<2>;\n"
                            "    .reg .pred %p<3>;\n"
                            "    ld.param.u32 %r1, [rounds];\n"
                            "    ld.param.u64 %d1, [never];\n"
                            "    mov.u32 %r2, 0;\n"
                            "    mov.u32 %r3, 1;\n"
                            "again:\n"
                            "    mad.lo.u32 %r3, %r3, 1664525, 1013904223;\n"
                            "    add.u32 %r2, %r2, 1;\n"
                            "    setp.lt.u32 %p1, %r2, %r1;\n"
                            "    @%p1 bra again;\n"
                            /* This branch is always taken. The store only keeps the compiler from removing the
                             * arithmetic. */
                            "    setp.eq.u64 %p2, %d1, 0;\n"
                            "    @%p2 bra done;\n"
                            "    st.global.u32 [%d1], %r3;\n"
                            "done:\n"
                            "    ret;\n"
                            "}\n";

static struct {
    CUresult (*load)(CUmodule *module, const void *image);
    CUresult (*function)(CUfunction *function, CUmodule module, const char *name);
    CUresult (*launch)(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, CUstream stream, void **parameters, void **extra);
    CUresult (*stream)(CUstream *stream, unsigned flags);
    CUresult (*event)(CUevent *event, unsigned flags);
    CUresult (*record)(CUevent event, CUstream stream);
    CUresult (*wait)(CUevent event);
    CUresult (*elapsed)(float *milliseconds, CUevent start, CUevent end);
} call;

static bool look_up(void)
{
    const struct {
        void **function;
        const char *symbol;
    } table[] = {
        {(void **)&call.load, "cuModuleLoadData"},        {(void **)&call.function, "cuModuleGetFunction"},
        {(void **)&call.launch, "cuLaunchKernel"},        {(void **)&call.stream, "cuStreamCreate"},
        {(void **)&call.event, "cuEventCreate"},          {(void **)&call.record, "cuEventRecord"},
        {(void **)&call.wait, "cuEventSynchronize"},      {(void **)&call.elapsed, "cuEventElapsedTime"},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!(*table[i].function = dlsym(cuda_handle(), table[i].symbol)))
            return false;
    return true;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

struct spin {
    CUfunction function;
    CUstream stream;
    CUevent events[IN_FLIGHT];
    unsigned rounds;
    float us; /* Microseconds that one kernel takes alone. */
};

static CUresult launch(struct spin *spin)
{
    uint64_t never = 0;
    void *parameters[] = {&spin->rounds, &never};
    return call.launch(spin->function, 1, 1, 1, 1, 1, 1, 0, spin->stream, parameters, NULL);
}

/* Returns the shortest time: kernels of other containers in between can only lengthen a measurement. */
static CUresult time_one(struct spin *spin)
{
    CUresult status = CUDA_SUCCESS;
    float took[TIMED + 1] = {0};
    for (int i = 0; i <= TIMED && status == CUDA_SUCCESS; i++)
        if ((status = call.record(spin->events[0], spin->stream)) == CUDA_SUCCESS && (status = launch(spin)) == CUDA_SUCCESS &&
            (status = call.record(spin->events[1], spin->stream)) == CUDA_SUCCESS &&
            (status = call.wait(spin->events[1])) == CUDA_SUCCESS)
            status = call.elapsed(&took[i], spin->events[0], spin->events[1]);
    if (status == CUDA_SUCCESS) {
        /* Ignore the first launch, which includes work that the driver does once per kernel. */
        float least = took[1];
        for (int i = 2; i <= TIMED; i++)
            least = took[i] < least ? took[i] : least;
        spin->us = least * 1000;
    }
    return status;
}

static CUresult prepare(struct spin *spin)
{
    CUmodule module;
    CUresult status = call.load(&module, image);
    if (status == CUDA_SUCCESS)
        status = call.function(&spin->function, module, "vgpu_probe_spin");
    if (status == CUDA_SUCCESS)
        status = call.stream(&spin->stream, 1);
    for (int i = 0; i < IN_FLIGHT && status == CUDA_SUCCESS; i++)
        status = call.event(&spin->events[i], 0);
    spin->rounds = SPIN_ROUNDS;
    for (int tries = 1; status == CUDA_SUCCESS; tries++) {
        status = time_one(spin);
        /* The last attempt keeps its number of rounds. If another container keeps the GPU busy, no attempt may come
         * near the wanted time. */
        if (tries == TRIES || spin->us <= 0 || (spin->us > WANTED_US / 2 && spin->us < WANTED_US * 2))
            break;
        float rounds = (float)spin->rounds * WANTED_US / spin->us;
        spin->rounds = rounds < 1 ? 1 : rounds > MOST_ROUNDS ? MOST_ROUNDS : (unsigned)rounds;
    }
    return status;
}

struct window {
    uint64_t permille[WINDOWS];
    uint64_t launch_ns; /* Shortest time of one launch call in any window. */
};

static CUresult measure(struct spin *spin, struct window *window)
{
    uint64_t launched = 0, ended = 0;
    CUresult status = CUDA_SUCCESS;
    window->launch_ns = UINT64_MAX;
    /* Window -1 is not measured, because the limiter needs a moment to reach the share. */
    for (int w = -1; w < WINDOWS && status == CUDA_SUCCESS; w++) {
        uint64_t start = now_ns(), before = ended, now = start;
        for (; now - start < WINDOW_NS && status == CUDA_SUCCESS; now = now_ns()) {
            if (launched - ended == IN_FLIGHT) {
                status = call.wait(spin->events[ended++ % IN_FLIGHT]);
                continue;
            }
            uint64_t called = now_ns();
            status = launch(spin);
            uint64_t took = now_ns() - called;
            window->launch_ns = took < window->launch_ns ? took : window->launch_ns;
            if (status == CUDA_SUCCESS)
                status = call.record(spin->events[launched++ % IN_FLIGHT], spin->stream);
        }
        if (w >= 0)
            window->permille[w] = (uint64_t)((double)(ended - before) * (double)spin->us * 1e6 / (double)(now - start));
    }
    return status;
}

/* Requests more time by environment variables, as a tenant can. This must have no effect, because the environment can
 * only tighten limits. The policy `force` does tighten: without it a tenant that is alone may use the whole GPU. */
static void ask_for_more(const struct slice *slice)
{
    setenv("CUDA_DEVICE_SM_LIMIT", "100", 1);
    setenv("CUDA_TASK_PRIORITY", "0", 1);
    setenv("GPU_CORE_UTILIZATION_POLICY", slice->core_policy == VGPU_CORE_FORCE ? "disable" : "force", 1);
}

static void share_of(const struct fill *fill)
{
    struct result *result = &fill->board->result;
    const struct vgpu_limits_device *limit = slice_device(fill->slice, fill->uuid);
    struct spin spin = {0};
    struct window window = {0};
    char reason[200];
    CUcontext context;
    ask_for_more(fill->slice);
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    CUresult status = cuda ? cuda->ctx_create(&context, 0, fill->device) : CUDA_ERROR_NO_DEVICE;
    if (status == CUDA_SUCCESS && !look_up())
        status = CUDA_ERROR_NOT_FOUND;
    if (status == CUDA_SUCCESS)
        status = prepare(&spin);
    if (status == CUDA_SUCCESS && spin.us > 0)
        status = measure(&spin, &window);
    if (status != CUDA_SUCCESS || spin.us <= 0) {
        result_set(result, NOT_RUN, limit->sm_percent, 0, "percent", "%s: the driver returns %d", fill->uuid, status);
        return;
    }
    uint64_t most = 0, least = UINT64_MAX, sum = 0;
    for (int w = 0; w < WINDOWS; w++) {
        most = window.permille[w] > most ? window.permille[w] : most;
        least = window.permille[w] < least ? window.permille[w] : least;
        sum += window.permille[w];
    }
    fill->board->report.launch_ns[fill->device] = window.launch_ns;
    fill->board->report.kernel_ns[fill->device] = (uint64_t)((double)spin.us * 1000 * SPIN_ROUNDS / spin.rounds);
    bool held = least > 0 && most <= limit->sm_percent * 10u + TOLERANCE_PERMILLE;
    result_set(result, held ? PASSED : VIOLATED, limit->sm_percent, (sum / WINDOWS + 5) / 10, "percent",
               "%s: shares in windows of 1 s from %.1f to %.1f %%, kernels of %.0f us%s", fill->uuid, (double)least / 10,
               (double)most / 10, (double)spin.us,
               most + TOLERANCE_PERMILLE < limit->sm_percent * 10u ? "; less than the share, because of neighbours or a busy host" : "");
}

static void measure_share(const struct fill *fill)
{
    const struct vgpu_limits_device *limit = slice_device(fill->slice, fill->uuid);
    if (limit->sm_percent == 0 || limit->sm_percent >= 100 || fill->slice->core_policy == VGPU_CORE_DISABLE) {
        /* Without a share there is nothing to check, so no percentage is reported. */
        result_set(&fill->board->result, PASSED, 0, 0, "shares", "%s: no share is set", fill->uuid);
        return;
    }
    result_set(&fill->board->result, VIOLATED, limit->sm_percent, 0, "percent", "%s: the process that ran kernels was killed", fill->uuid);
    pid_t child = fork();
    if (child == 0) {
        share_of(fill);
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

void check_share(const struct slice *slice, struct board *board)
{
    on_every_device(slice, board, measure_share);
}
