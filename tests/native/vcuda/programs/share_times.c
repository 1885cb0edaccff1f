/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs the code by which vgpu-probe chooses how long its measuring kernel runs. The kernel consists of a loop. Two
 * arguments describe a simulated GPU: the time of a kernel without loop rounds, and the time of a loop round, both in
 * us. Prints the number of rounds that the probe chooses, and the kernel duration that it predicts, in us.
 */
#include "share.c"

static double base_us, round_us;
static unsigned launched_rounds;

static CUresult fake_load(CUmodule *module, const void *text)
{
    (void)module, (void)text;
    return CUDA_SUCCESS;
}

static CUresult fake_function(CUfunction *function, CUmodule module, const char *name)
{
    (void)function, (void)module, (void)name;
    return CUDA_SUCCESS;
}

static CUresult fake_launch(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned shared, CUstream stream, void **parameters, void **extra)
{
    (void)function, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
    launched_rounds = *(unsigned *)parameters[0];
    return CUDA_SUCCESS;
}

static CUresult fake_stream(CUstream *stream, unsigned flags)
{
    (void)stream, (void)flags;
    return CUDA_SUCCESS;
}

static CUresult fake_event(CUevent *event, unsigned flags)
{
    (void)event, (void)flags;
    return CUDA_SUCCESS;
}

static CUresult fake_record(CUevent event, CUstream stream)
{
    (void)event, (void)stream;
    return CUDA_SUCCESS;
}

static CUresult fake_wait(CUevent event)
{
    (void)event;
    return CUDA_SUCCESS;
}

static CUresult fake_elapsed(float *milliseconds, CUevent start, CUevent end)
{
    (void)start, (void)end;
    *milliseconds = (float)((base_us + round_us * launched_rounds) / 1000);
    return CUDA_SUCCESS;
}

int main(int count, char **words)
{
    struct spin spin = {0};
    if (count != 3)
        return 2;
    base_us = atof(words[1]);
    round_us = atof(words[2]);
    call.load = fake_load;
    call.function = fake_function;
    call.launch = fake_launch;
    call.stream = fake_stream;
    call.event = fake_event;
    call.record = fake_record;
    call.wait = fake_wait;
    call.elapsed = fake_elapsed;
    CUresult status = prepare(&spin);
    printf("%u %.1f\n", spin.rounds, (double)spin.us);
    return status != CUDA_SUCCESS;
}
