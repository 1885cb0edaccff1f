/* SPDX-License-Identifier: Apache-2.0 */
/* Opens the library inner.so with RTLD_DEEPBIND and lets it allocate BYTES. Usage: deep BYTES. The loader finds
 * inner.so only by this program's run path. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char **words)
{
    void *library = dlopen("inner.so", RTLD_NOW | RTLD_DEEPBIND);
    int (*inner)(size_t) = library ? (int (*)(size_t))dlsym(library, "inner") : NULL;
    if (count != 2 || !inner) {
        fprintf(stderr, "deep: %s\n", dlerror());
        return 2;
    }
    printf("%d\n", inner(strtoull(words[1], NULL, 0)));
    return 0;
}
