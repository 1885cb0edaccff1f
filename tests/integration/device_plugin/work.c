/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The program in the containers of test_upgrade.py: it allocates and frees GPU memory all the time. It links only
 * libc, like tests/hosts/checks/churn.c. Commands on its standard input: "take" allocates until the first refusal and
 * keeps the memory; "free" frees this memory; "busy" launches kernels of 2 ms from then on. At the end of its input
 * the program prints its rounds of allocation and free, and the number of failed calls. If a folder /evil exists, the
 * program first replaces /etc/vgpu by it.
 */
#include <dlfcn.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PIECE ((size_t)64 << 20)
#define MOST 4096

static void *driver, *kernel;
static uint64_t kept[MOST];

static int load(void)
{
    int (*image)(void **, const void *), (*find)(void **, void *, const char *);
    void *module;
    *(void **)&image = dlsym(driver, "cuModuleLoadData");
    *(void **)&find = dlsym(driver, "cuModuleGetFunction");
    int code = image(&module, "// .gpusim kernel spin 2000\n");
    return code ? code : find(&kernel, module, "spin");
}

/* Keeps several kernels queued, so that the GPU does not wait for this process on a busy machine. */
static int launch(void)
{
    int (*run)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    int (*synchronize)(void), code = 0;
    *(void **)&run = dlsym(driver, "cuLaunchKernel");
    *(void **)&synchronize = dlsym(driver, "cuCtxSynchronize");
    for (int i = 0; i < 8 && code == 0; i++)
        code = run(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
    return code ? code : synchronize();
}

/* Reads a line byte by byte, because poll() does not see what stdio reads ahead. Returns false at the end of input. */
static int line_of(char *line, size_t room)
{
    size_t length = 0;
    while (length + 1 < room && read(STDIN_FILENO, line + length, 1) == 1 && line[length] != '\n')
        length++;
    line[length] = 0;
    return length > 0;
}

int main(void)
{
    int (*init)(unsigned), (*create)(void **, unsigned, int), (*take)(uint64_t *, size_t), (*give)(uint64_t);
    void *context = NULL;
    /* Simulates a tenant with root in its container: replaces the folder of singly mounted files by a folder with its
     * own limits. */
    if (access("/evil", F_OK) == 0 && (rename("/etc/vgpu", "/etc/moved") != 0 || rename("/evil", "/etc/vgpu") != 0)) {
        perror("work: rename");
        return 1;
    }
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "work: %s\n", dlerror());
        return 1;
    }
    *(void **)&init = dlsym(driver, "cuInit");
    *(void **)&create = dlsym(driver, "cuCtxCreate_v2");
    *(void **)&take = dlsym(driver, "cuMemAlloc_v2");
    *(void **)&give = dlsym(driver, "cuMemFree_v2");
    setvbuf(stdout, NULL, _IOLBF, 0);
    int code = init(0);
    if (code == 0)
        code = create(&context, 0, 0);
    printf("context %d\n", code);
    if (code)
        return 1;
    unsigned long rounds = 0, failed = 0, count = 0;
    char line[16];
    for (;;) {
        struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
        if (poll(&input, 1, kernel ? 0 : 1) > 0) {
            if (!line_of(line, sizeof line))
                break;
            if (!strcmp(line, "take")) {
                while (count < MOST && (code = take(&kept[count], PIECE)) == 0)
                    count++;
                printf("error %d\n", code);
            } else if (!strcmp(line, "free")) {
                while (count)
                    failed += give(kept[--count]) != 0;
                printf("free\n");
            } else {
                printf("busy %d\n", load());
            }
        } else if (count == 0) {
            uint64_t piece;
            code = take(&piece, PIECE);
            failed += code ? 1 : give(piece) != 0;
            failed += kernel && launch() != 0;
            rounds++;
        }
    }
    printf("%lu %lu\n", rounds, failed);
    return 0;
}
