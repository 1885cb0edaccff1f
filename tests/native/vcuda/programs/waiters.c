/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs threads that wait for their container's turn on the GPU. The arbiter, a service of the node, publishes turns in
 * a file, the GPU page; the threads wait (futex) on the word `wake` of this page. Usage: waiters PAGE THREADS. Prints
 * "ready" when all threads wait. Then it prints, for each input line, the total number of wake-ups so far.
 */
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vgpu_abi.h"

static struct vgpu_gpu_page *page;
static _Atomic unsigned long waiting, woken;

static void *wait_on(void *unused)
{
    (void)unused;
    waiting++;
    for (;;) {
        uint32_t seen = __atomic_load_n(&page->wake, __ATOMIC_ACQUIRE);
        if (syscall(SYS_futex, &page->wake, FUTEX_WAIT, seen, NULL, NULL, 0) == 0)
            woken++;
    }
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    int file = open(argv[1], O_RDONLY | O_CLOEXEC);
    unsigned long threads = strtoul(argv[2], NULL, 10);
    page = file < 0 ? MAP_FAILED : mmap(NULL, VGPU_GPU_PAGE_FILE_SIZE, PROT_READ, MAP_SHARED, file, 0);
    if (page == MAP_FAILED)
        return 3;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 16384);
    for (unsigned long i = 0; i < threads; i++) {
        pthread_t thread;
        if (pthread_create(&thread, &small, wait_on, NULL) != 0)
            return 4;
    }
    while (waiting < threads)
        usleep(1000);
    usleep(100000); /* Each thread counts itself shortly before it waits, so leave it time to begin its wait. */
    puts("ready");
    fflush(stdout);
    while (getchar() != EOF) {
        printf("%lu\n", (unsigned long)woken);
        fflush(stdout);
    }
    _exit(0);
}
