/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads lines "NAME VERSION FLAGS" from standard input and looks each function up by cuGetProcAddress_v2 and
 * cuGetProcAddress. For each lookup it prints the status, and the shared object and the symbol to which the returned
 * pointer belongs.
 */
#include <dlfcn.h>
#include <stdio.h>

#include "driver/cuda_abi.h"

static void print(int status, void *function)
{
    Dl_info info;
    const char *object = "-", *symbol = "-";
    if (function && dladdr(function, &info)) {
        object = info.dli_fname;
        symbol = info.dli_sname ? info.dli_sname : "?";
    }
    for (const char *c = object; *c; c++)
        if (*c == '/')
            object = c + 1;
    printf("%d %s %s ", status, object, symbol);
}

int main(void)
{
    char name[128];
    int version;
    unsigned long long flags;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
    CUresult (*old)(const char *, void **, int, cuuint64_t) =
        (CUresult(*)(const char *, void **, int, cuuint64_t))dlsym(library, "cuGetProcAddress");
    CUresult (*new)(const char *, void **, int, cuuint64_t, int *) =
        (CUresult(*)(const char *, void **, int, cuuint64_t, int *))dlsym(library, "cuGetProcAddress_v2");
    init(0);
    while (scanf("%127s %d %llu", name, &version, &flags) == 3) {
        void *function = NULL;
        int found = -1, status = new (name, &function, version, flags, &found);
        print(status, function);
        printf("%d ", found);
        function = NULL;
        status = old(name, &function, version, flags);
        print(status, function);
        puts("");
    }
    return 0;
}
