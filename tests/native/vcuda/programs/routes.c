/* SPDX-License-Identifier: Apache-2.0 */
/* Looks up the driver functions of routes.h for the puppet program. A route is a way to look functions up, such as
 * dlsym or cuGetProcAddress; there is one for each way that real programs use. */
#include "routes.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef CUresult (*get_proc)(const char *, void **, int, cuuint64_t, int *);
typedef void *(*lookup)(void *, const char *);

#ifndef UNLINKED /* With UNLINKED the program is not linked to the driver, but opens the driver by dlopen. */
static void fill_link(struct api *api)
{
#define FN(symbol, name, version, stream, parameters) api->symbol = symbol;
    FUNCTIONS(FN)
#undef FN
}
#endif

static void fill_by(struct api *api, void *handle, lookup look)
{
#define FN(symbol, name, version, stream, parameters) *(void **)&api->symbol = look(handle, #symbol);
    FUNCTIONS(FN)
#undef FN
}

static void fill_proc(struct api *api, get_proc get)
{
    void *function;
#define FN(symbol, name, version, stream, parameters) \
    function = NULL; \
    if (get(name, &function, version, stream ? 2 : 0, NULL) == CUDA_SUCCESS) \
        *(void **)&api->symbol = function;
    FUNCTIONS(FN)
#undef FN
}

int route_fill(struct api *api, const char *route)
{
    memset(api, 0, sizeof *api);
#ifndef UNLINKED
    if (strcmp(route, "link") == 0) {
        fill_link(api);
        return 1;
    }
#endif
    if (strcmp(route, "handle") == 0) {
        fill_by(api, dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL), dlsym);
    } else if (strcmp(route, "default") == 0) {
        fill_by(api, RTLD_DEFAULT, dlsym);
    } else if (strcmp(route, "next") == 0) {
        fill_by(api, RTLD_NEXT, dlsym);
    } else if (strcmp(route, "self") == 0) {
        fill_by(api, dlopen(NULL, RTLD_LAZY), dlsym);
    } else if (strncmp(route, "copy:", 5) == 0) {
        fill_by(api, dlopen(route + 5, RTLD_LAZY | RTLD_LOCAL), dlsym);
    } else if (strcmp(route, "dlsym-of-libc") == 0) {
        /* This route looks up the address of dlsym itself in libc, and uses this address for all further lookups. */
        lookup look = (lookup)dlsym(dlopen("libc.so.6", RTLD_LAZY), "dlsym");
        fill_by(api, dlopen("libcuda.so.1", RTLD_LAZY), look);
    } else if (strcmp(route, "dlvsym-of-libc") == 0) {
        lookup look = (lookup)dlvsym(dlopen("libc.so.6", RTLD_LAZY), "dlsym", "GLIBC_2.2.5");
        if (!look)
            look = (lookup)dlvsym(dlopen("libc.so.6", RTLD_LAZY), "dlsym", "GLIBC_2.17");
        fill_by(api, dlopen("libcuda.so.1", RTLD_LAZY), look);
    } else if (strcmp(route, "proc") == 0) {
        fill_proc(api, (get_proc)dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuGetProcAddress_v2"));
    } else if (strcmp(route, "proc-of-proc") == 0) {
        void *second = NULL;
        get_proc first = (get_proc)dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuGetProcAddress_v2");
        first("cuGetProcAddress", &second, 12000, 0, NULL);
        fill_proc(api, (get_proc)second);
    } else {
        fprintf(stderr, "puppet: no route '%s'\n", route);
        return 0;
    }
    return 1;
}
