/* SPDX-License-Identifier: Apache-2.0 */
/* Ways to the driver's own functions: other names of its file, other ways of the loader, its symbol table, another loader. */
#include "bypass.h"
#include "loader.h"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>

#if __SIZEOF_POINTER__ == 8
#define ELF_SYMBOL Elf64_Sym
#else
#define ELF_SYMBOL Elf32_Sym
#endif

typedef void *(*lookup)(void *where, const char *symbol);

static void *by_name(void *where, const char *symbol)
{
    return dlsym(where, symbol);
}

static enum attempt beyond_by(lookup look, void *where, CUdevice device)
{
    struct cuda cuda;
    memset(&cuda, 0, sizeof cuda);
    cuda.init = (CUresult(*)(unsigned))look(where, "cuInit");
    cuda.ctx_create = (CUresult(*)(CUcontext *, unsigned, CUdevice))look(where, "cuCtxCreate_v2");
    cuda.mem_alloc = (CUresult(*)(CUdeviceptr *, size_t))look(where, "cuMemAlloc_v2");
    cuda.mem_free = (CUresult(*)(CUdeviceptr))look(where, "cuMemFree_v2");
    if (!cuda.init || !cuda.ctx_create || !cuda.mem_alloc || !cuda.mem_free)
        return UNABLE;
    return cuda.init(0) == CUDA_SUCCESS ? ask_beyond(&cuda, device) : REFUSED;
}

static struct link_map *driver_map(void)
{
    struct link_map *map = NULL;
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    return handle && dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? map : NULL;
}

enum attempt by_path(const struct fill *fill)
{
    struct link_map *map = driver_map();
    void *handle = map ? dlopen(map->l_name, RTLD_NOW | RTLD_LOCAL) : NULL;
    return handle ? beyond_by(by_name, handle, fill->device) : UNABLE;
}

enum attempt by_copy(const struct fill *fill)
{
    struct link_map *map = driver_map();
    const char *copy = map ? scratch_file("driver.so") : NULL;
    if (!copy || !copy_file(map->l_name, copy, 0700))
        return UNABLE;
    void *handle = dlopen(copy, RTLD_NOW | RTLD_LOCAL);
    unlink(copy);
    return handle ? beyond_by(by_name, handle, fill->device) : UNABLE;
}

enum attempt by_namespace(const struct fill *fill)
{
    void *handle = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return handle ? beyond_by(by_name, handle, fill->device) : UNABLE;
}

/* Reads the table as a loader of one's own would. The strings follow the symbols in every object that a linker writes,
 * but other tables may lie between, whose words are no names. */
static void *in_symbol_table(void *where, const char *wanted)
{
    const struct link_map *map = where;
    const ELF_SYMBOL *symbols = NULL;
    const char *strings = NULL;
    size_t size = 0;
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_SYMTAB)
            symbols = (const ELF_SYMBOL *)entry->d_un.d_ptr;
        else if (entry->d_tag == DT_STRTAB)
            strings = (const char *)entry->d_un.d_ptr;
        else if (entry->d_tag == DT_STRSZ)
            size = entry->d_un.d_val;
    }
    if (!symbols || !strings)
        return NULL;
    for (const ELF_SYMBOL *one = symbols + 1; (const char *)(one + 1) <= strings; one++)
        if (one->st_value && one->st_name < size && strcmp(strings + one->st_name, wanted) == 0)
            return (char *)map->l_addr + one->st_value;
    return NULL;
}

enum attempt by_symbol_table(const struct fill *fill)
{
    struct link_map *map = driver_map();
    return map ? beyond_by(in_symbol_table, map, fill->device) : UNABLE;
}

/* The file that is mapped at an address; false: none is found. */
static bool file_at(unsigned long address, char *path, size_t room)
{
    char line[512], format[40];
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "re");
    snprintf(format, sizeof format, "%%lx-%%*x %%*s %%*s %%*s %%*s %%%zus", room - 1);
    while (maps && !found && fgets(line, sizeof line, maps)) {
        unsigned long start = 0;
        found = sscanf(line, format, &start, path) == 2 && start == address && path[0] == '/';
    }
    if (maps)
        fclose(maps);
    return found;
}

/* So that a loader looks for its list of libraries where there is none: what a program with a loader of its own, or one that is
 * linked statically, has from the start. */
static bool forget_the_preload(const char *loader)
{
    static const char list[] = VGPU_PATH_PRELOAD;
    bool done = false;
    int file = open(loader, O_RDWR | O_CLOEXEC);
    off_t size = file < 0 ? 0 : lseek(file, 0, SEEK_END);
    char *bytes = size > 0 ? mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    if (bytes != MAP_FAILED) {
        for (char *at = bytes; (at = memmem(at, (size_t)(bytes + size - at), list, sizeof list)); done = true)
            at[sizeof list - 2] = '-';
        munmap(bytes, (size_t)size);
    }
    if (file >= 0)
        close(file);
    return done;
}

/* Run without a name: who watches may end all of us while what was got is held, and no file is to stay behind then. */
enum attempt by_own_loader(const struct fill *fill)
{
    char loader[400], program[400], nameless[40];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    const char *copy = scratch_file("loader");
    if (length <= 0 || !copy || !file_at(getauxval(AT_BASE), loader, sizeof loader) || !copy_file(loader, copy, 0700))
        return UNABLE;
    program[length] = 0;
    int file = forget_the_preload(copy) ? open(copy, O_RDONLY) : -1; /* for the new program to be run by */
    unlink(copy);
    if (file < 0)
        return UNABLE;
    snprintf(nameless, sizeof nameless, "/proc/self/fd/%d", file);
    enum attempt attempt = ask_by_loader(nameless, program, fill->device);
    close(file);
    return attempt;
}
