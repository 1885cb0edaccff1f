/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds the objects (program and libraries) that are loaded in this process, and their symbols, by reading their ELF
 * tables in memory. The library replaces dlsym, so it cannot find libc's dlsym by calling dlsym. If it imported dlsym
 * instead, it would need the glibc version of the build machine. So it reads the dynamic section of libc.
 */
#include "real.h"

#include <elf.h>
#include <link.h>
#include <string.h>

struct walk {
    int (*visit)(const struct object *object, void *data);
    void *data;
};

static int describe(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    struct walk *walk = data;
    struct object object = {.base = info->dlpi_addr, .soname = "", .path = info->dlpi_name, .low = UINTPTR_MAX};
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(info->dlpi_addr + header->p_vaddr);
        if (header->p_type == PT_LOAD) {
            uintptr_t low = info->dlpi_addr + header->p_vaddr, high = low + header->p_memsz;
            object.low = low < object.low ? low : object.low;
            object.high = high > object.high ? high : object.high;
        }
    }
    if (!dynamic)
        return 0;
    const ElfW(Dyn) *soname = NULL;
    object.dynamic = dynamic;
    for (; dynamic->d_tag != DT_NULL; dynamic++) {
        /* glibc has relocated these pointers in place. Read-only dynamic sections (the vDSO) are an exception: their
         * pointers are relative to the base. */
        uintptr_t pointer = dynamic->d_un.d_ptr;
        if (pointer < object.base)
            pointer += object.base;
        switch (dynamic->d_tag) {
        case DT_SYMTAB: object.symbols = (const void *)pointer; break;
        case DT_STRTAB: object.strings = (const char *)pointer; break;
        case DT_HASH: object.hash = (const void *)pointer; break;
        case DT_GNU_HASH: object.gnu_hash = (const void *)pointer; break;
        case DT_SONAME: soname = dynamic; break;
        default: break;
        }
    }
    if (!object.symbols || !object.strings)
        return 0;
    if (soname)
        object.soname = object.strings + soname->d_un.d_val;
    return walk->visit(&object, walk->data);
}

int object_each(int (*visit)(const struct object *object, void *data), void *data)
{
    struct walk walk = {visit, data};
    return dl_iterate_phdr(describe, &walk);
}

struct search {
    const char *soname;
    uintptr_t address;
    struct object *found;
};

static int matches(const struct object *object, void *data)
{
    struct search *search = data;
    if (search->soname ? strcmp(object->soname, search->soname) != 0
                       : search->address < object->low || search->address >= object->high)
        return 0;
    *search->found = *object;
    return 1;
}

bool object_with_soname(const char *soname, struct object *found)
{
    struct search search = {.soname = soname, .found = found};
    return object_each(matches, &search) != 0;
}

bool object_at(const void *address, struct object *found)
{
    struct search search = {.address = (uintptr_t)address, .found = found};
    return object_each(matches, &search) != 0;
}

static void *value_of(const struct object *object, const ElfW(Sym) *symbol)
{
    unsigned type = ELF64_ST_TYPE(symbol->st_info), bind = ELF64_ST_BIND(symbol->st_info);
    if (symbol->st_shndx == SHN_UNDEF || (bind != STB_GLOBAL && bind != STB_WEAK))
        return NULL;
    if (type != STT_FUNC && type != STT_GNU_IFUNC && type != STT_NOTYPE && type != STT_OBJECT)
        return NULL;
    void *value = (void *)(object->base + symbol->st_value);
    if (type == STT_GNU_IFUNC) {
        void *(*resolve)(void) = (void *(*)(void))value;
        return resolve();
    }
    return value;
}

static void *by_gnu_hash(const struct object *object, const char *name)
{
    const uint32_t *table = object->gnu_hash;
    uint32_t buckets = table[0], first = table[1], words = table[2];
    const ElfW(Addr) *bloom = (const ElfW(Addr) *)(table + 4);
    const uint32_t *bucket = (const uint32_t *)(bloom + words), *chain = bucket + buckets;
    const ElfW(Sym) *symbols = object->symbols;
    uint32_t hash = 5381;
    for (const unsigned char *c = (const unsigned char *)name; *c; c++)
        hash = hash * 33 + *c;
    if (!buckets)
        return NULL;
    for (uint32_t i = bucket[hash % buckets]; i >= first && i; i++) {
        uint32_t found = chain[i - first];
        if ((found | 1) == (hash | 1) && strcmp(object->strings + symbols[i].st_name, name) == 0) {
            void *value = value_of(object, &symbols[i]);
            if (value)
                return value;
        }
        if (found & 1)
            break;
    }
    return NULL;
}

static void *by_sysv_hash(const struct object *object, const char *name)
{
    const uint32_t *table = object->hash;
    uint32_t buckets = table[0];
    const uint32_t *bucket = table + 2, *chain = bucket + buckets;
    const ElfW(Sym) *symbols = object->symbols;
    uint32_t hash = 0;
    for (const unsigned char *c = (const unsigned char *)name; *c; c++) {
        hash = (hash << 4) + *c;
        uint32_t high = hash & 0xf0000000u;
        hash ^= high >> 24;
        hash &= ~high;
    }
    if (!buckets)
        return NULL;
    for (uint32_t i = bucket[hash % buckets]; i; i = chain[i]) {
        if (strcmp(object->strings + symbols[i].st_name, name) == 0) {
            void *value = value_of(object, &symbols[i]);
            if (value)
                return value;
        }
    }
    return NULL;
}

void *object_symbol(const struct object *object, const char *name)
{
    if (object->gnu_hash)
        return by_gnu_hash(object, name);
    return object->hash ? by_sysv_hash(object, name) : NULL;
}

static uint32_t symbol_count(const struct object *object)
{
    if (object->hash)
        return ((const uint32_t *)object->hash)[1];
    const uint32_t *table = object->gnu_hash;
    uint32_t buckets = table ? table[0] : 0, last = 0;
    if (!buckets)
        return 0;
    const uint32_t *bucket = (const uint32_t *)((const ElfW(Addr) *)(table + 4) + table[2]), *chain = bucket + buckets;
    for (uint32_t i = 0; i < buckets; i++)
        last = bucket[i] > last ? bucket[i] : last;
    if (last < table[1])
        return 0;
    while (!(chain[last - table[1]] & 1))
        last++;
    return last + 1;
}

bool object_exports(const struct object *object, const void *address)
{
    const ElfW(Sym) *symbols = object->symbols;
    for (uint32_t i = symbol_count(object); i-- > 1;)
        if (ELF64_ST_TYPE(symbols[i].st_info) == STT_FUNC && value_of(object, &symbols[i]) == address)
            return true;
    return false;
}

struct relocations {
    const ElfW(Rela) *first;
    size_t bytes;
};

static bool binds_one(const struct object *object, const struct relocations *table, bool (*wanted)(const char *name))
{
    const ElfW(Sym) *symbols = object->symbols;
    for (const ElfW(Rela) *one = table->first; one && (size_t)(one - table->first) < table->bytes / sizeof *one; one++) {
        const ElfW(Sym) *symbol = &symbols[ELF64_R_SYM(one->r_info)];
        if (symbol->st_name && symbol->st_shndx == SHN_UNDEF && wanted(object->strings + symbol->st_name))
            return true;
    }
    return false;
}

bool object_links(const struct object *object, const char *soname, bool (*wanted)(const char *name))
{
    struct relocations data = {NULL, 0}, calls = {NULL, 0};
    bool needed = false;
    for (const ElfW(Dyn) *entry = object->dynamic; entry->d_tag != DT_NULL; entry++) {
        uintptr_t pointer = entry->d_un.d_ptr;
        if (pointer < object->base)
            pointer += object->base;
        switch (entry->d_tag) {
        case DT_NEEDED: needed = needed || strcmp(object->strings + entry->d_un.d_val, soname) == 0; break;
        case DT_RELA: data.first = (const void *)pointer; break;
        case DT_RELASZ: data.bytes = entry->d_un.d_val; break;
        case DT_JMPREL: calls.first = (const void *)pointer; break;
        case DT_PLTRELSZ: calls.bytes = entry->d_un.d_val; break;
        default: break;
        }
    }
    return needed && (binds_one(object, &calls, wanted) || binds_one(object, &data, wanted));
}
