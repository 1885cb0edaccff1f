/* SPDX-License-Identifier: Apache-2.0 */
/* Bypasses that call the driver's own functions instead of libvgpu's, which enforce the limit. They find the driver's
 * functions by another name of the driver's file, by other calls of the dynamic loader, by the symbol table, or with
 * another dynamic loader. One of them also hides its process from the node's watcher, which looks for memory that no
 * ledger (a container's file of charged memory) records. */
#include "bypass.h"
#include "loader.h"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
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

/* Looks up the functions of an attempt. Returns false if one is missing. */
static bool found_by(lookup look, void *where, struct cuda *cuda)
{
    memset(cuda, 0, sizeof *cuda);
    cuda->init = (CUresult(*)(unsigned))look(where, "cuInit");
    cuda->ctx_create = (CUresult(*)(CUcontext *, unsigned, CUdevice))look(where, "cuCtxCreate_v2");
    cuda->mem_alloc = (CUresult(*)(CUdeviceptr *, size_t))look(where, "cuMemAlloc_v2");
    cuda->mem_free = (CUresult(*)(CUdeviceptr))look(where, "cuMemFree_v2");
    return cuda->init && cuda->ctx_create && cuda->mem_alloc && cuda->mem_free;
}

static enum attempt beyond_by(lookup look, void *where, CUdevice device)
{
    struct cuda cuda;
    if (!found_by(look, where, &cuda))
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

/* Replaces the last character of `word` wherever the file contains this word. Returns false if the file does not
 * contain it. `size` includes the terminating NUL. */
static bool replace_in(const char *path, const char *word, size_t size, char last)
{
    bool done = false;
    int file = open(path, O_RDWR | O_CLOEXEC);
    off_t length = file < 0 ? 0 : lseek(file, 0, SEEK_END);
    char *bytes = length > 0 ? mmap(NULL, (size_t)length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    if (bytes != MAP_FAILED) {
        for (char *at = bytes; (at = memmem(at, (size_t)(bytes + length - at), word, size)); done = true)
            at[size - 2] = last;
        munmap(bytes, (size_t)length);
    }
    if (file >= 0)
        close(file);
    return done;
}

/* Uses a copy of the driver's library. `last`: the new last character of the library's soname; 0 keeps the soname. */
static enum attempt by_copy_named(const struct fill *fill, char last)
{
    static const char soname[] = "libcuda.so.1";
    struct link_map *map = driver_map();
    const char *copy = map ? scratch_file("driver.so") : NULL;
    if (!copy || !copy_file(map->l_name, copy, 0700))
        return UNABLE;
    bool ready = !last || replace_in(copy, soname, sizeof soname, last);
    void *handle = ready ? dlopen(copy, RTLD_NOW | RTLD_LOCAL) : NULL;
    unlink(copy);
    return handle ? beyond_by(by_name, handle, fill->device) : UNABLE;
}

enum attempt by_copy(const struct fill *fill)
{
    return by_copy_named(fill, 0);
}

enum attempt by_renamed(const struct fill *fill)
{
    return by_copy_named(fill, '7');
}

enum attempt by_namespace(const struct fill *fill)
{
    void *handle = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return handle ? beyond_by(by_name, handle, fill->device) : UNABLE;
}

/* Finds a function in a library's symbol table, as a separate loader would. The table's size is not stored; in every
 * linked object the strings follow the symbols, but other tables may lie between. */
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

bool driver_by_symbol_table(struct cuda *cuda)
{
    struct link_map *map = driver_map();
    return map && found_by(in_symbol_table, map, cuda);
}

/* Returns whether /proc shows that the first thread has ended. */
static bool leader_has_ended(void)
{
    char line[512];
    int file = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? -1 : read(file, line, sizeof line - 1);
    if (file >= 0)
        close(file);
    if (length <= 0)
        return false;
    line[length] = 0;
    const char *state = strrchr(line, ')');
    return state && strncmp(state, ") Z", 3) == 0;
}

static int go_on(void *fill)
{
    const struct timespec nap = {.tv_nsec = 1000000};
    int naps = 0;
    while (!leader_has_ended() && naps++ < 2000)
        nanosleep(&nap, NULL);
    _exit((int)(leader_has_ended() ? by_symbol_table(fill) : UNABLE));
}

/*
 * Continues in a new thread and ends the first one. A watcher that reads only the process's own folder in /proc then
 * sees an ended process. The new thread shares all resources of the first, including its thread-local variables, which
 * is safe because no other thread runs.
 */
enum attempt without_leader(const struct fill *fill)
{
    const size_t size = 8 * MIB;
    const int shared = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM;
    char *stack = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED || clone(go_on, stack + size, shared, (void *)(uintptr_t)fill) < 0)
        return UNABLE;
    for (;;)
        syscall(SYS_exit, 0);
}

/* Finds the file that is mapped at an address. Returns false if there is none. */
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

/* Changes a copy of the loader so that it looks for its preload list under another name, and so does not load libvgpu.
 * Static programs and programs with a loader of their own run without libvgpu in the same way. */
static bool forget_the_preload(const char *loader)
{
    static const char list[] = VGPU_PATH_PRELOAD;
    return replace_in(loader, list, sizeof list, '-');
}

/* Runs the copied loader from a deleted file, so that no file remains if the watcher kills all processes while the
 * memory is held. */
enum attempt by_own_loader(const struct fill *fill)
{
    char loader[400], program[400], nameless[40];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    const char *copy = scratch_file("loader");
    if (length <= 0 || !copy || !file_at(getauxval(AT_BASE), loader, sizeof loader) || !copy_file(loader, copy, 0700))
        return UNABLE;
    program[length] = 0;
    /* The copy is opened without O_CLOEXEC, because it is executed through this descriptor. */
    int file = forget_the_preload(copy) ? open(copy, O_RDONLY) : -1;
    unlink(copy);
    if (file < 0)
        return UNABLE;
    snprintf(nameless, sizeof nameless, "/proc/self/fd/%d", file);
    enum attempt attempt = ask_by_loader(nameless, program, fill->device);
    close(file);
    return attempt;
}
