/* SPDX-License-Identifier: Apache-2.0 */
/* Returns the address of any function that the library hooks. The address is that of the link-time symbol, or the one
 * that cuGetProcAddress returns. */
#include "rows.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

/* The functions are declared without parameters, because only their addresses are used here. If the driver lacks a
 * function, its address is NULL. */
#ifdef UNLINKED
#define LINKED_ADDRESS(symbol) NULL
#else
#define HOOK(symbol, name, since, stream, result, parameters) extern int symbol(void) __attribute__((weak));
#define NVML(symbol, result, parameters)
#include "driver/hooks.def"
#undef HOOK
#undef NVML
#define LINKED_ADDRESS(symbol) (void *)symbol
#endif

#define HOOK(symbol, name, since, stream, result, parameters) {#symbol, name, since, stream, LINKED_ADDRESS(symbol)},
#define NVML(symbol, result, parameters)
static const struct {
    const char *symbol, *name;
    int since, stream;
    void *linked;
} rows[] = {
#include "driver/hooks.def"
};

void *row_linked(const char *symbol)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strcmp(rows[i].symbol, symbol) == 0)
            return rows[i].linked;
    return NULL;
}

void *row_by_address(const char *symbol)
{
    int (*get)(const char *, void **, int, unsigned long long, int *);
    *(void **)&get = dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuGetProcAddress_v2");
    for (size_t i = 0; get && i < sizeof rows / sizeof *rows; i++) {
        void *function = NULL;
        if (strcmp(rows[i].symbol, symbol) == 0 &&
            get(rows[i].name, &function, rows[i].since, rows[i].stream ? 2 : 1, NULL) == 0)
            return function;
    }
    return NULL;
}
