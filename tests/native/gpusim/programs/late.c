/* SPDX-License-Identifier: Apache-2.0 */
/* Calls the driver while the process exits. A thread calls the driver in a loop while main returns, so that some calls
 * are made during the driver's teardown. Usage: late [parked]. With "parked", an atexit handler ends the thread
 * before the teardown begins, so that no call is made during the teardown. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cuInit(unsigned flags);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuCtxSetCurrent(void *context);
int cuCtxSynchronize(void);

static _Atomic int stop;
static void *context;
static pthread_t thread;

static void *ask(void *unused)
{
    (void)unused;
    cuCtxSetCurrent(context);
    while (!stop)
        cuCtxSynchronize();
    return NULL;
}

static void park(void)
{
    stop = 1;
    pthread_join(thread, NULL);
}

int main(int argc, char **argv)
{
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0) || pthread_create(&thread, NULL, ask, NULL)) {
        fprintf(stderr, "late: expected a context and a thread, but cuInit, cuCtxCreate or pthread_create failed\n");
        return 1;
    }
    if (argc > 1 && strcmp(argv[1], "parked") == 0)
        atexit(park);
    return 0;
}
