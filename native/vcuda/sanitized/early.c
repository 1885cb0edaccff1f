/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lets libvgpu's dlsym serve a sanitizer's runtime that has not started yet.
 *
 * While the runtime starts, it calls libvgpu's dlsym to look up the functions that it intercepts. Until it has started,
 * instrumented code and every intercepted function (strcmp, dl_iterate_phdr) would crash. So in a build with a
 * sanitizer route_entry.S, the entry of dlsym, calls this code instead of vgpu_decide. The code is built without
 * instrumentation and calls no function of libc. It sends the runtime's look-ups to the real dlsym, and calls
 * vgpu_decide for all other callers.
 */
#include <link.h>
#include <stdint.h>

static int early_compare(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return *a - *b;
}

/* Calls `visit` for each object in the loader's list. The list has the address of the object's ELF header, but 0 for a
 * program that is linked to a fixed address. Such a program is skipped. */
static int early_iterate(int (*visit)(struct dl_phdr_info *info, size_t size, void *data), void *data)
{
    for (const struct link_map *map = _r_debug.r_map; map; map = map->l_next) {
        const ElfW(Ehdr) *header = (const ElfW(Ehdr) *)map->l_addr;
        if (!header)
            continue;
        struct dl_phdr_info info = {.dlpi_addr = map->l_addr, .dlpi_name = map->l_name};
        info.dlpi_phdr = (const ElfW(Phdr) *)(map->l_addr + header->e_phoff);
        info.dlpi_phnum = header->e_phnum;
        int found = visit(&info, sizeof info, data);
        if (found)
            return found;
    }
    return 0;
}

/* Includes elf.c, the library's own reader of objects. Its functions are renamed, and it uses the two functions
 * above. */
#define strcmp early_compare
#define dl_iterate_phdr early_iterate
#define object_each early_object_each
#define object_with_soname early_object_with_soname
#define object_at early_object_at
#define object_symbol early_object_symbol
#define object_exports early_object_exports
#define object_links early_object_links
#include "../src/driver/elf.c"

struct decision {
    void *function;
    uintptr_t decided;
};
struct decision vgpu_decide(void *handle, const char *name, const char *version, void *caller);
struct decision sanitized_decide(void *handle, const char *name, const char *version, void *caller);

__attribute__((visibility("hidden"))) void *sanitized_dlsym, *sanitized_dlvsym;

static bool is_runtime(const char *soname)
{
    static const char *const names[] = {"libasan.so", "libtsan.so", "libubsan.so", "liblsan.so"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *a = soname, *b = names[i];
        while (*b && *a == *b)
            a++, b++;
        if (!*b)
            return true;
    }
    return false;
}

struct decision sanitized_decide(void *handle, const char *name, const char *version, void *caller)
{
    struct object object;
    if (!sanitized_dlsym && object_with_soname("libc.so.6", &object)) {
        sanitized_dlvsym = object_symbol(&object, "dlvsym");
        sanitized_dlsym = object_symbol(&object, "dlsym");
    }
    if (object_at(caller, &object) && is_runtime(object.soname))
        return (struct decision){NULL, 0};
    return vgpu_decide(handle, name, version, caller);
}
