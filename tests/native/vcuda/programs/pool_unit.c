/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests the records of pool.c on the simple driver in this file, which gives the handle of a destroyed pool to the next
 * pool, as an allocator of host memory does. Usage:
 *   pool_unit race    a thread creates a pool while the driver's call that destroys the former pool of that handle has
 *                     not yet returned; the library must know the new pool, and keep the memory of the former one
 *   pool_unit many    pools are created and destroyed; the library must not keep a record for each
 */
#include "check.h"
#include "context/context.h"
#include "memory/pool.h"
#include "process.h"

#include <pthread.h>
#include <semaphore.h>
#include <string.h>

#include "events.h"

/* --- replacements for the rest of the library -------------------------------------------------------------- */

static struct device device = {.uuid = "GPU-0"};
static long long charged;
static uint32_t sequence;
static struct cached_limits limits = {.control = CONTROL_ON, .sequence_at = &sequence};
static struct process_state state = {.started = true, .limits = &limits};
_Atomic(struct process_state *) vgpu_process = &state;
_Atomic(struct cached_limits *) vgpu_cached_limits = &limits;
_Atomic int vgpu_log_level;
struct counters vgpu_counters[VGPU_MAX_DEVICES];
void *vgpu_real[FUNCTION_COUNT];
const struct events vgpu_events;

void vgpu_log_line(enum log_level level, const char *format, ...) { (void)level; (void)format; }
enum control vgpu_enter_again(void) { return CONTROL_ON; }
bool driver_ready(void) { return true; }
void flight_wait(struct counters *counters) { (void)counters; }
void flight_moved(int index) { (void)index; }
void lock_wait(struct lock *lock) { while (!lock_try(lock)) ; }
void lock_wake(struct lock *lock) { (void)lock; }
CUresult memory_broken(void) { return CUDA_ERROR_NOT_PERMITTED; }
CUresult memory_refuse(const char *what) { (void)what; return CUDA_ERROR_NOT_SUPPORTED; }
const struct device *device_at(const CUmemLocation *location, CUresult *status)
{
    (void)location;
    *status = CUDA_SUCCESS;
    return &device;
}
void ledger_uncharge(int index, enum account account, uint64_t bytes)
{
    (void)index;
    (void)account;
    charged -= (long long)bytes;
}
void ledger_export(int index, uint64_t bytes, bool more) { (void)index; (void)bytes; (void)more; }
bool ledger_join(void) { return true; }
void *ledger_import(uint64_t byte) { (void)byte; return NULL; }
void ledger_import_end(void *import) { (void)import; }
bool shareable_mark(int descriptor, uint64_t *object) { (void)descriptor; *object = 1; return true; }
void shareable_unmarked(void) {}
uint64_t shareable_import_byte(uint64_t object) { return object; }
enum shareable_origin shareable_origin(int descriptor, uint64_t *object)
{
    (void)descriptor;
    *object = 1;
    return SHAREABLE_OURS;
}
void unaccounted_due(int index) { (void)index; }

static int records;
void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size)
{
    records++;
    return __real_calloc(count, size);
}

/* --- the driver ------------------------------------------------------------------------------------------------ */

static CUmemoryPool const handle = (CUmemoryPool)0x1000;
static cuuint64_t reserved;
static bool slow;
static sem_t destroyed, created;

static CUresult driver_create(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    (void)properties;
    *pool = handle;
    return CUDA_SUCCESS;
}

static CUresult driver_destroy(CUmemoryPool pool)
{
    (void)pool;
    if (slow) {
        sem_post(&destroyed);
        sem_wait(&created);
    }
    return CUDA_SUCCESS;
}

static CUresult driver_attribute(CUmemoryPool pool, int attribute, void *value)
{
    (void)pool;
    (void)attribute;
    *(cuuint64_t *)value = reserved;
    return CUDA_SUCCESS;
}

/* --- the programs --------------------------------------------------------------------------------------------- */

static void create(void)
{
    static const CUmemPoolProps properties = {.allocType = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemoryPool pool;
    CHECK(cuMemPoolCreate(&pool, &properties) == CUDA_SUCCESS && pool == handle);
}

/* Records that the pool has grown by a block, as the hook of an allocation does. */
static struct pool *grow(uint64_t block)
{
    struct pool *pool = pool_known((uintptr_t)handle);
    CHECK(pool && pool->charged == 0 && pool->outstanding == 0);
    pool_hold(pool, POOL_UNIT);
    pool->outstanding = block;
    reserved = POOL_UNIT;
    charged += POOL_UNIT;
    return pool;
}

static void *create_beside(void *unused)
{
    sem_wait(&destroyed);
    create();
    sem_post(&created);
    return unused;
}

static void race(void)
{
    pthread_t thread;
    create();
    struct pool *former = grow(1);
    slow = true;
    CHECK(pthread_create(&thread, NULL, create_beside, NULL) == 0);
    CHECK(cuMemPoolDestroy(handle) == CUDA_SUCCESS);
    pthread_join(thread, NULL);
    slow = false;
    CHECK(pool_known((uintptr_t)handle) && pool_known((uintptr_t)handle) != former);
    CHECK(charged == POOL_UNIT);
    grow(1);
    pool_freed((uintptr_t)former, 1);
    pools_waited(true);
    CHECK(charged == POOL_UNIT && former->charged == 0);
    CHECK(pool_known((uintptr_t)handle)->charged == POOL_UNIT);
}

static void many(void)
{
    for (int i = 0; i < 1000; i++) {
        create();
        struct pool *pool = grow(1);
        if (i % 2 == 0)
            CHECK(cuMemPoolDestroy(handle) == CUDA_SUCCESS && charged == POOL_UNIT);
        reserved = 0;
        pool_freed((uintptr_t)pool, 1);
        CHECK(charged == (i % 2 ? 0 : (long long)POOL_UNIT));
        pools_waited(true);
        CHECK(charged == 0);
        if (i % 2)
            CHECK(cuMemPoolDestroy(handle) == CUDA_SUCCESS);
        CHECK(!pool_known((uintptr_t)handle));
    }
    CHECK(records == 1);
}

int main(int count, char **words)
{
    vgpu_real[F_cuMemPoolCreate] = driver_create;
    vgpu_real[F_cuMemPoolDestroy] = driver_destroy;
    vgpu_real[F_cuMemPoolGetAttribute] = driver_attribute;
    sem_init(&destroyed, 0, 0);
    sem_init(&created, 0, 0);
    CHECK(count == 2);
    if (strcmp(words[1], "race") == 0)
        race();
    else
        many();
    return 0;
}
