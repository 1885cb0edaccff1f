/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs host functions in streams (cuLaunchHostFunc). As on hardware, the stream waits at a host function until a helper
 * thread of the process has run it. The thread starts with the first host function.
 */
#include "op.h"

#include <signal.h>
#include <stdlib.h>

#define POLL_NS 50000u

struct callback {
    CUcontext context;
    CUstream stream;
    uint64_t seq;
    CUhostFn function;
    CUstreamCallback old_style;
    void *data;
    struct callback *next;
};

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t added;
    struct callback *first;
    bool started;
} queue = {.mutex = PTHREAD_MUTEX_INITIALIZER, .added = PTHREAD_COND_INITIALIZER};

/* Waits while the list is empty. Then removes and returns the oldest callback whose turn has come, or returns NULL. */
static struct callback *take_ready(void)
{
    struct callback *ready = NULL;
    pthread_mutex_lock(&queue.mutex);
    while (!queue.first)
        pthread_cond_wait(&queue.added, &queue.mutex);
    for (struct callback **link = &queue.first; *link; link = &(*link)->next)
        if (sim_work_reached((*link)->context->gpu, (*link)->context->channel, (*link)->seq)) {
            ready = *link;
            *link = ready->next;
            break;
        }
    pthread_mutex_unlock(&queue.mutex);
    return ready;
}

static void *worker(void *unused)
{
    (void)unused;
    for (;;) {
        struct callback *callback = take_ready();
        if (!callback) {
            sim_sleep_until(sim_now() + POLL_NS);
            continue;
        }
        if (callback->old_style)
            callback->old_style(callback->stream, CUDA_SUCCESS, callback->data);
        else
            callback->function(callback->data);
        sim_work_release(callback->context->gpu, callback->context->channel, callback->seq);
        free(callback);
    }
    return NULL;
}

static bool start(void)
{
    pthread_t thread;
    sigset_t all, before;
    if (queue.started)
        return true;
    sigfillset(&all); /* The new thread blocks all signals: only the program's own threads may handle them. */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    queue.started = pthread_create(&thread, NULL, worker, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (queue.started)
        pthread_detach(thread);
    return queue.started;
}

CUresult callback_add(CUstream stream, CUhostFn function, CUstreamCallback old_style, void *data)
{
    struct callback *callback = calloc(1, sizeof *callback);
    REQUIRE(callback, CUDA_ERROR_OUT_OF_MEMORY);
    struct sim_work work = {.kind = SIM_WORK_HOST};
    *callback = (struct callback){.context = stream->context, .stream = stream, .function = function,
                                  .old_style = old_style, .data = data};
    pthread_mutex_lock(&queue.mutex);
    bool good = start();
    pthread_mutex_unlock(&queue.mutex);
    /* Submit without the mutex: if the queue is full, the submit waits for the helper thread, which needs the mutex. */
    CUresult result = good ? stream_submit(stream, &work, &callback->seq) : CUDA_ERROR_OPERATING_SYSTEM;
    if (result != CUDA_SUCCESS) {
        free(callback);
        return result;
    }
    pthread_mutex_lock(&queue.mutex);
    struct callback **link = &queue.first;
    while (*link)
        link = &(*link)->next;
    *link = callback;
    pthread_cond_signal(&queue.added);
    pthread_mutex_unlock(&queue.mutex);
    return CUDA_SUCCESS;
}

static CUresult add(CUstream handle, CUstreamCallback callback, void *data, unsigned flags)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    REQUIRE(callback && flags == 0, CUDA_ERROR_INVALID_VALUE);
    CUresult result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    REQUIRE(!stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return callback_add(stream, NULL, callback, data);
}

EXPORT CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void *data, unsigned flags)
{
    return add(LEGACY_STREAM(stream), callback, data, flags);
}

EXPORT CUresult cuStreamAddCallback_ptsz(CUstream stream, CUstreamCallback callback, void *data, unsigned flags)
{
    return add(PER_THREAD_STREAM(stream), callback, data, flags);
}
