/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parses module images. The simulator does not run code, so a text, alone or inside PTX comments, declares what kernels
 * and global variables the module has and how long the kernels take:
 *
 *     .gpusim kernel NAME DURATION_US [SMS]     DURATION_US: decimal, LOW..HIGH, or inf; SMS: 0 or left out = all of the GPU
 *     .gpusim global NAME BYTES                 or managed: a variable in unified memory
 *     .gpusim bytes N                           device memory that the code takes
 *     .gpusim load MILLISECONDS                 how long the code takes to load (or, loaded lazily, its first use)
 *
 * In PTX without declarations each .entry is a kernel with a default cost. In cubins and fat binaries every name that a
 * program asks for counts as such a kernel.
 */
#include "module.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_NS 10000u
#define FATBIN_MAGIC 0xba55ed50u
#define FATBIN_WRAPPER 0x466243b1u
#define WORD 256

static struct image_entry *entry_of(struct image *image, const char *name)
{
    for (struct image_entry *entry = image->entries; entry; entry = entry->next)
        if (strcmp(entry->name, name) == 0)
            return entry;
    struct image_entry *entry = calloc(1, sizeof *entry);
    char *copy = strdup(name);
    if (!entry || !copy) {
        free(entry);
        free(copy);
        return NULL;
    }
    entry->name = copy;
    entry->cost = (struct kernel_cost){.ns = DEFAULT_NS};
    entry->next = image->entries;
    image->entries = entry;
    return entry;
}

static CUresult declaration(struct image *image, const char *line)
{
    char kind[16] = "", name[WORD], duration[48] = "";
    unsigned sms = 0;
    unsigned long long bytes;
    int fields = sscanf(line, ".gpusim %15s %255s %47s %u", kind, name, duration, &sms);
    if (fields >= 3 && strcmp(kind, "kernel") == 0) {
        char *end = duration, *range = strstr(duration, "..");
        if (range)
            *range = 0; /* Otherwise strtod would parse the first dot of "..". */
        double us = strcmp(duration, "inf") == 0 ? 0 : strtod(duration, &end), most = 0;
        if (range) {
            REQUIRE(us > 0 && end == range, CUDA_ERROR_INVALID_IMAGE);
            most = strtod(range + 2, &end);
            REQUIRE(most >= us && most < 1e12, CUDA_ERROR_INVALID_IMAGE);
        }
        struct image_entry *entry = entry_of(image, name);
        REQUIRE(entry, CUDA_ERROR_OUT_OF_MEMORY);
        REQUIRE(strcmp(duration, "inf") == 0 || (end != duration && *end == 0 && us >= 0 && us < 1e12),
                CUDA_ERROR_INVALID_IMAGE);
        entry->cost = (struct kernel_cost){.ns = end == duration ? SIM_COST_FOREVER : (uint64_t)(us * 1000),
                                            .most = (uint64_t)(most * 1000), .sms = sms};
        entry->declared = true;
        return CUDA_SUCCESS;
    }
    bool managed = strcmp(kind, "managed") == 0;
    if ((managed || strcmp(kind, "global") == 0) && sscanf(line, ".gpusim %*s %255s %llu", name, &bytes) == 2 && bytes > 0) {
        struct image_entry *entry = entry_of(image, name);
        REQUIRE(entry, CUDA_ERROR_OUT_OF_MEMORY);
        entry->bytes = bytes;
        entry->managed = managed;
        return CUDA_SUCCESS;
    }
    if (sscanf(line, ".gpusim load %llu", &bytes) == 1) {
        image->load_ns = (uint64_t)bytes * 1000000u;
        return CUDA_SUCCESS;
    }
    if (sscanf(line, ".gpusim bytes %llu", &bytes) == 1) {
        image->code_bytes = bytes;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_IMAGE;
}

static bool name_character(char c)
{
    return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '.';
}

static CUresult text(struct image *image, const char *source)
{
    bool ptx = strstr(source, ".version") != NULL;
    if (ptx)
        image->code_bytes = strlen(source);
    for (const char *at = source; ptx && (at = strstr(at, ".entry")) != NULL; at += 6) {
        char name[WORD];
        size_t length = 0;
        const char *c = at + 6;
        while (isspace((unsigned char)*c))
            c++;
        while (name_character(c[length]) && length < sizeof name - 1)
            length++;
        memcpy(name, c, length);
        name[length] = 0;
        REQUIRE(length > 0 && entry_of(image, name), CUDA_ERROR_INVALID_PTX);
    }
    bool declared = false;
    for (const char *at = source; (at = strstr(at, ".gpusim")) != NULL; at += 7) {
        char line[1024];
        size_t length = strcspn(at, "\n");
        if (length >= sizeof line)
            length = sizeof line - 1;
        memcpy(line, at, length);
        line[length] = 0;
        CUresult result = declaration(image, line);
        if (result != CUDA_SUCCESS)
            return result;
        declared = true;
    }
    return ptx || declared ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

CUresult image_parse(const void *data, struct image *out)
{
    uint32_t magic = 0;
    *out = (struct image){.entries = NULL};
    REQUIRE(data, CUDA_ERROR_INVALID_VALUE);
    const unsigned char *bytes = data;
    if (!bytes[0])
        return CUDA_ERROR_INVALID_IMAGE;
    memcpy(&magic, data, bytes[1] && bytes[2] ? sizeof magic : 1);
    /* The wrapper of a fat binary begins with a magic, a version and a pointer to the data. */
    if (bytes[1] && bytes[2] && magic == FATBIN_WRAPPER) {
        memcpy(&bytes, bytes + 8, sizeof bytes);
        REQUIRE(bytes, CUDA_ERROR_INVALID_IMAGE);
        memcpy(&magic, bytes, sizeof magic);
    }
    if (bytes[1] && bytes[2] && magic == FATBIN_MAGIC) {
        uint64_t size;
        memcpy(&size, bytes + 8, sizeof size);
        out->any_name = true;
        out->code_bytes = size;
        return CUDA_SUCCESS;
    }
    if (strncmp((const char *)bytes, "\177ELF", 4) == 0) {
        uint64_t table;
        uint16_t size, count;
        memcpy(&table, bytes + 0x28, sizeof table);
        memcpy(&size, bytes + 0x3a, sizeof size);
        memcpy(&count, bytes + 0x3c, sizeof count);
        out->any_name = true;
        out->code_bytes = table + (uint64_t)size * count;
        return CUDA_SUCCESS;
    }
    CUresult result = text(out, (const char *)bytes);
    if (result != CUDA_SUCCESS)
        image_free(out);
    return result;
}

void image_free(struct image *image)
{
    while (image->entries) {
        struct image_entry *gone = image->entries;
        image->entries = gone->next;
        free(gone->name);
        free(gone);
    }
}

CUresult image_read_file(const char *path, char **out)
{
    REQUIRE(path, CUDA_ERROR_INVALID_VALUE);
    FILE *file = fopen(path, "re");
    REQUIRE(file, CUDA_ERROR_FILE_NOT_FOUND);
    size_t size = 0, room = 65536;
    char *data = malloc(room + 1);
    size_t got;
    while (data && (got = fread(data + size, 1, room - size, file)) > 0) {
        size += got;
        if (size == room) {
            char *more = realloc(data, (room *= 2) + 1);
            if (!more)
                free(data);
            data = more;
        }
    }
    fclose(file);
    REQUIRE(data, CUDA_ERROR_OUT_OF_MEMORY);
    data[size] = 0;
    *out = data;
    return CUDA_SUCCESS;
}
