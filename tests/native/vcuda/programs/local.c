/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program and, compiled with -DPLUGIN, a library that the program opens with RTLD_LOCAL, as plugins and language
 * bindings are opened. The library is linked to the driver and looks names up in its own scope. The program is not
 * linked to the driver.
 */
#include <dlfcn.h>
#include <stdio.h>

#ifdef PLUGIN
int cuInit(unsigned flags);
void *ask(const char *name);

void *ask(const char *name)
{
    return cuInit(0) == 0 ? dlsym(RTLD_DEFAULT, name) : NULL;
}
#else
int main(int argc, char **argv)
{
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library)
        return 2;
    void *(*ask)(const char *) = (void *(*)(const char *))dlsym(library, "ask");
    for (int i = 2; i < argc; i++) {
        Dl_info info = {.dli_fname = "-"};
        void *found = ask(argv[i]);
        if (found)
            dladdr(found, &info);
        printf("%s %s\n", argv[i], info.dli_fname);
    }
    return 0;
}
#endif
