/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Allocates simulated device addresses (the arena). The arena uses chunks of 2 MiB. A block above 1 MiB is a run of
 * chunks; smaller blocks lie in slabs, which are chunks with blocks of one size class. The allocator's records are not
 * in the memory itself, because a program that writes past its block must not crash the driver. A bitmap of the first
 * chunks of all runs finds the block of any address.
 */
#include "arena.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHUNK_BITS 21
#define CHUNK ((uint64_t)1 << CHUNK_BITS)
#define SMALLEST 512u /* The smallest size of a block, and the alignment of every block. */
#define LARGEST_SMALL (CHUNK / 2)
#define CLASSES 24
#define BINS 32
#define NIL UINT32_MAX

enum chunk_state { UNUSED = 0, FREE_RUN, LARGE, SLAB };

struct object {
    uint64_t bytes, id;
    void *owner;
    uint32_t kind; /* A value of enum block_kind; 0 if the chunk is free. */
    uint32_t on_host;
};

struct slab {
    uint32_t size, capacity, used, hint;
    uint64_t taken[CHUNK / SMALLEST / 64];
    struct object objects[];
};

struct chunk {
    uint8_t state, dirty;
    uint8_t size_class;
    /* Number of chunks in the run. */
    uint32_t span;
    /* List links: of the free runs of similar length, or of the slabs of one size class that have room. */
    uint32_t prev, next;
    struct object object;
    struct slab *slab;
};

struct arena {
    pthread_mutex_t mutex;
    uintptr_t base;
    uint32_t count;
    int fd;
    uint64_t next_id;
    uint64_t *heads;
    struct chunk *chunks;
    uint32_t bins[BINS], slabs[CLASSES];
};

/* ---- runs of chunks ------------------------------------------------------------------------------------------ */

static unsigned bin_of(uint32_t span)
{
    return 31u - (unsigned)__builtin_clz(span);
}

static void list_add(struct arena *a, uint32_t *list, uint32_t i)
{
    a->chunks[i].prev = NIL;
    a->chunks[i].next = *list;
    if (*list != NIL)
        a->chunks[*list].prev = i;
    *list = i;
}

static void list_remove(struct arena *a, uint32_t *list, uint32_t i)
{
    struct chunk *c = &a->chunks[i];
    if (c->prev != NIL)
        a->chunks[c->prev].next = c->next;
    else
        *list = c->next;
    if (c->next != NIL)
        a->chunks[c->next].prev = c->prev;
}

static void set_head(struct arena *a, uint32_t i)
{
    a->heads[i / 64] |= (uint64_t)1 << i % 64;
}

static void clear_head(struct arena *a, uint32_t i)
{
    a->heads[i / 64] &= ~((uint64_t)1 << i % 64);
}

/* Returns the first chunk of the run that contains chunk i. A run always starts at chunk 0. */
static uint32_t head_of(const struct arena *a, uint32_t i)
{
    uint32_t word = i / 64;
    uint64_t bits = a->heads[word] & (~(uint64_t)0 >> (63 - i % 64));
    while (!bits)
        bits = a->heads[--word];
    return word * 64 + 63u - (uint32_t)__builtin_clzll(bits);
}

static void put_free(struct arena *a, uint32_t i, uint32_t span)
{
    a->chunks[i].state = FREE_RUN;
    a->chunks[i].span = span;
    set_head(a, i);
    list_add(a, &a->bins[bin_of(span)], i);
}

static uint32_t take_run(struct arena *a, uint32_t span)
{
    for (unsigned bin = bin_of(span); bin < BINS; bin++)
        for (uint32_t i = a->bins[bin]; i != NIL; i = a->chunks[i].next) {
            uint32_t have = a->chunks[i].span;
            if (have < span)
                continue;
            list_remove(a, &a->bins[bin], i);
            if (have > span)
                put_free(a, i + span, have - span);
            a->chunks[i].span = span;
            a->chunks[i].dirty = 0;
            return i;
        }
    return NIL;
}

static void give_run(struct arena *a, uint32_t i)
{
    uint32_t span = a->chunks[i].span, next = i + span;
    if (a->chunks[i].dirty) /* Give the pages back to the system. Otherwise freed device memory would stay resident. */
        fallocate(a->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)i << CHUNK_BITS, (off_t)span << CHUNK_BITS);
    if (next < a->count && a->chunks[next].state == FREE_RUN) {
        list_remove(a, &a->bins[bin_of(a->chunks[next].span)], next);
        clear_head(a, next);
        span += a->chunks[next].span;
    }
    if (i > 0) {
        uint32_t before = head_of(a, i - 1);
        if (a->chunks[before].state == FREE_RUN) {
            list_remove(a, &a->bins[bin_of(a->chunks[before].span)], before);
            clear_head(a, i);
            a->chunks[i].state = UNUSED;
            span += a->chunks[before].span;
            i = before;
        }
    }
    put_free(a, i, span);
}

/* ---- slabs ------------------------------------------------------------------------------------------------------ */

/* Returns the index of the smallest size class that fits: 512, 768, 1024, 1536, … */
static unsigned class_of(uint64_t bytes)
{
    if (bytes <= SMALLEST)
        return 0;
    unsigned bits = 63u - (unsigned)__builtin_clzll(bytes - 1);
    return (bits - 9) * 2 + ((bytes - 1) >> (bits - 1) & 1) + 1;
}

static uint32_t class_size(unsigned class)
{
    uint32_t size = SMALLEST << class / 2;
    return class & 1 ? size + size / 2 : size;
}

static bool slab_alloc(struct arena *a, uint64_t bytes, const struct object *object, struct block *out)
{
    unsigned class = class_of(bytes);
    uint32_t i = a->slabs[class];
    if (i == NIL) {
        uint32_t size = (class_size(class) + SMALLEST - 1) / SMALLEST * SMALLEST, capacity = (uint32_t)(CHUNK / size);
        struct slab *slab = calloc(1, sizeof *slab + capacity * sizeof slab->objects[0]);
        if (!slab || (i = take_run(a, 1)) == NIL) {
            free(slab);
            return false;
        }
        slab->size = size;
        slab->capacity = capacity;
        if (capacity % 64) /* Mark the bits beyond the capacity in the last word as taken. */
            slab->taken[capacity / 64] = ~(uint64_t)0 << capacity % 64;
        a->chunks[i].state = SLAB;
        a->chunks[i].size_class = (uint8_t)class;
        a->chunks[i].slab = slab;
        set_head(a, i);
        list_add(a, &a->slabs[class], i);
    }
    struct slab *slab = a->chunks[i].slab;
    uint32_t word = slab->hint;
    while (slab->taken[word] == ~(uint64_t)0)
        word = (word + 1) * 64 < slab->capacity ? word + 1 : 0;
    slab->hint = word;
    uint32_t n = word * 64 + (uint32_t)__builtin_ctzll(~slab->taken[word]);
    slab->taken[word] |= (uint64_t)1 << n % 64;
    slab->objects[n] = *object;
    if (++slab->used == slab->capacity)
        list_remove(a, &a->slabs[class], i);
    out->base = a->base + ((uint64_t)i << CHUNK_BITS) + (uint64_t)n * slab->size;
    return true;
}

static void slab_free(struct arena *a, uint32_t i, uint32_t n)
{
    struct chunk *c = &a->chunks[i];
    struct slab *slab = c->slab;
    slab->taken[n / 64] &= ~((uint64_t)1 << n % 64);
    slab->objects[n].kind = 0;
    slab->hint = n / 64;
    if (slab->used-- == slab->capacity)
        list_add(a, &a->slabs[c->size_class], i);
    /* The last slab of a class stays. Otherwise a program that repeatedly allocates and frees one block would create it
     * again each time. */
    if (slab->used == 0 && (c->prev != NIL || c->next != NIL)) {
        list_remove(a, &a->slabs[c->size_class], i);
        free(slab);
        c->slab = NULL;
        give_run(a, i);
    }
}

/* ---- interface -------------------------------------------------------------------------------------------------- */

static void *map_arena(int fd, uint64_t bytes, bool low)
{
    if (!low)
        return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    for (uintptr_t hint = 0x30000000; hint + bytes <= 0x100000000u; hint += 0x10000000) {
        void *at = mmap((void *)hint, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE,
                        fd, 0);
        if (at == (void *)hint)
            return at;
        if (at != MAP_FAILED)
            munmap(at, bytes);
    }
    return MAP_FAILED;
}

struct arena *arena_create(uint64_t bytes, bool low)
{
    bytes = (bytes + CHUNK - 1) >> CHUNK_BITS << CHUNK_BITS;
    struct arena *a = calloc(1, sizeof *a);
    int fd = memfd_create("gpusim-device-memory", MFD_CLOEXEC);
    void *base = MAP_FAILED;
    if (a && fd >= 0 && ftruncate(fd, (off_t)(bytes + CHUNK)) == 0)
        base = map_arena(fd, bytes + CHUNK, low);
    if (base != MAP_FAILED) {
        /* Align the mapping and the file offsets to a chunk; unmap the unused part in front. */
        uintptr_t aligned = ((uintptr_t)base + CHUNK - 1) >> CHUNK_BITS << CHUNK_BITS;
        if (mmap((void *)aligned, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0) !=
            (void *)aligned)
            base = MAP_FAILED;
        madvise((void *)aligned, bytes, MADV_DONTDUMP);
        if (a) {
            a->base = aligned;
            a->count = (uint32_t)(bytes >> CHUNK_BITS);
            a->fd = fd;
            a->next_id = 1;
            a->heads = calloc(a->count / 64 + 1, sizeof *a->heads);
            a->chunks = calloc(a->count, sizeof *a->chunks);
        }
    }
    if (base == MAP_FAILED || !a->heads || !a->chunks) {
        if (fd >= 0)
            close(fd);
        if (a) {
            free(a->heads);
            free(a->chunks);
        }
        free(a);
        return NULL;
    }
    pthread_mutex_init(&a->mutex, NULL);
    memset(a->bins, 0xff, sizeof a->bins);
    memset(a->slabs, 0xff, sizeof a->slabs);
    put_free(a, 0, a->count);
    return a;
}

bool arena_alloc(struct arena *a, uint64_t bytes, enum block_kind kind, void *owner, struct block *out)
{
    bool found = false;
    if (bytes == 0 || bytes > (uint64_t)a->count << CHUNK_BITS)
        return false;
    pthread_mutex_lock(&a->mutex);
    struct object object = {.bytes = bytes, .id = a->next_id++, .owner = owner, .kind = kind};
    *out = (struct block){.bytes = bytes, .id = object.id, .owner = owner, .kind = kind};
    if (bytes <= LARGEST_SMALL) {
        found = slab_alloc(a, bytes, &object, out);
    } else {
        uint32_t i = take_run(a, (uint32_t)((bytes + CHUNK - 1) >> CHUNK_BITS));
        if (i != NIL) {
            a->chunks[i].state = LARGE;
            a->chunks[i].object = object;
            set_head(a, i);
            out->base = a->base + ((uint64_t)i << CHUNK_BITS);
            found = true;
        }
    }
    pthread_mutex_unlock(&a->mutex);
    return found;
}

/* Returns the record of the block that contains address, or NULL; *chunk and *index receive the record's position. */
static struct object *locate(struct arena *a, uintptr_t address, uintptr_t *base, uint32_t *chunk, uint32_t *index)
{
    uint32_t i = head_of(a, (uint32_t)((address - a->base) >> CHUNK_BITS));
    struct chunk *c = &a->chunks[i];
    uintptr_t start = a->base + ((uint64_t)i << CHUNK_BITS);
    *chunk = i;
    *index = 0;
    *base = start;
    if (c->state == LARGE)
        return address - start < c->object.bytes ? &c->object : NULL;
    if (c->state != SLAB)
        return NULL;
    uint32_t n = (uint32_t)(address - start) / c->slab->size;
    if (n >= c->slab->capacity || !c->slab->objects[n].kind)
        return NULL;
    *index = n;
    *base = start + (uint64_t)n * c->slab->size;
    return address - *base < c->slab->objects[n].bytes ? &c->slab->objects[n] : NULL;
}

static void describe(const struct object *object, uintptr_t base, struct block *out)
{
    *out = (struct block){.base = base, .bytes = object->bytes, .id = object->id, .owner = object->owner,
                          .kind = (enum block_kind)object->kind, .on_host = object->on_host != 0};
}

bool arena_contains(const struct arena *a, uintptr_t address)
{
    return a && address - a->base < (uint64_t)a->count << CHUNK_BITS;
}

bool arena_find(struct arena *a, uintptr_t address, struct block *out)
{
    uintptr_t base;
    uint32_t chunk, index;
    pthread_mutex_lock(&a->mutex);
    struct object *object = locate(a, address, &base, &chunk, &index);
    if (object)
        describe(object, base, out);
    pthread_mutex_unlock(&a->mutex);
    return object != NULL;
}

bool arena_free(struct arena *a, uintptr_t address, unsigned kinds, struct block *out)
{
    uintptr_t base;
    uint32_t chunk, index;
    pthread_mutex_lock(&a->mutex);
    struct object *object = locate(a, address, &base, &chunk, &index);
    bool good = object && base == address && kinds & 1u << object->kind;
    if (good) {
        describe(object, base, out);
        if (a->chunks[chunk].state == LARGE) {
            if (object->kind == BLOCK_MANAGED)
                /* The program may write a block in host memory without a driver call, so the block counts as
                 * written. */
                a->chunks[chunk].dirty = 1;
            give_run(a, chunk);
        } else {
            slab_free(a, chunk, index);
        }
    }
    pthread_mutex_unlock(&a->mutex);
    return good;
}

bool arena_place(struct arena *a, uintptr_t address, bool on_host, struct block *out)
{
    uintptr_t base;
    uint32_t chunk, index;
    pthread_mutex_lock(&a->mutex);
    struct object *object = locate(a, address, &base, &chunk, &index);
    bool moved = object && (object->on_host != 0) != on_host;
    if (moved) {
        object->on_host = on_host;
        describe(object, base, out);
    }
    pthread_mutex_unlock(&a->mutex);
    return moved;
}

void arena_touch(struct arena *a, uintptr_t address)
{
    pthread_mutex_lock(&a->mutex);
    a->chunks[head_of(a, (uint32_t)((address - a->base) >> CHUNK_BITS))].dirty = 1;
    pthread_mutex_unlock(&a->mutex);
}

void arena_each(struct arena *a, void *owner, void (*visit)(const struct block *))
{
    /* The lock is released between blocks, so that visit may free a block. Nobody adds a block meanwhile, because the
     * owner is being destroyed. */
    uint32_t i = 0;
    while (i < a->count) {
        struct block block = {.base = 0};
        pthread_mutex_lock(&a->mutex);
        struct chunk *c = &a->chunks[i];
        uint32_t span = c->span ? c->span : 1, capacity = c->state == SLAB ? c->slab->capacity : 1;
        pthread_mutex_unlock(&a->mutex);
        for (uint32_t n = 0; n < capacity; n++) {
            pthread_mutex_lock(&a->mutex);
            const struct object *object = c->state == LARGE                                              ? &c->object
                                          : c->state == SLAB && c->slab && n < c->slab->capacity ? &c->slab->objects[n]
                                                                                                  : NULL;
            bool match = object && object->kind && object->owner == owner;
            if (match)
                describe(object, a->base + ((uint64_t)i << CHUNK_BITS) + (c->state == SLAB ? n * c->slab->size : 0),
                         &block);
            pthread_mutex_unlock(&a->mutex);
            if (match)
                visit(&block);
        }
        i += span;
    }
}

int arena_fd(const struct arena *a)
{
    return a->fd;
}

uint64_t arena_offset(const struct arena *a, uintptr_t address)
{
    return address - a->base;
}
