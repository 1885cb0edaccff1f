/* SPDX-License-Identifier: Apache-2.0 */
/* Looks up functions by every dlsym handle on a host without the driver. Prints for each function whether it is found
 * and whether dlerror() reports a reason. */
#include <dlfcn.h>
#include <stdio.h>

int main(void)
{
    static const char *const names[] = {"cuInit", "cuMemAlloc_v2", "cuCtxCreate_v2", "nvmlDeviceGetMemoryInfo", "puts"};
    void *handles[] = {RTLD_DEFAULT, RTLD_NEXT, dlopen(NULL, RTLD_LAZY)};
    for (int h = 0; h < 3; h++)
        for (int n = 0; n < 5; n++) {
            dlerror();
            void *found = dlsym(handles[h], names[n]);
            const char *why = dlerror();
            printf("%d %s %s %s\n", h, names[n], found ? "found" : "-", why ? "why" : "-");
        }
    return 0;
}
