/* SPDX-License-Identifier: Apache-2.0 */
/* deep BYTES: opens inner.so, by a name that only this program's own run path finds, with its own symbols first. */
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
