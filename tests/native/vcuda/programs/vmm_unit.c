/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests vmm.c, the library's hooks of cuMemCreate, cuMemMap and similar functions, on the simple driver in this file.
 * Usage:
 *   vmm_unit order CALL   CALL, for GPU 0, blocks in the driver; exits with 1 if GPU 1 cannot be used meanwhile
 *   vmm_unit poor CALL    the library has no host memory to record an allocation; it must free the GPU memory and
 *                         return an error
 *   vmm_unit stress       threads create, map, unmap and release; the driver reuses the value of each handle at once
 *   vmm_unit fail         the driver refuses a release and an unmap, and the library must change nothing
 */
#include "check.h"
#include "memory/memory.h"
#include "process.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* --- replacements for the rest of the library -------------------------------------------------------------- */

static struct device devices[2] = {{.uuid = "GPU-0", .ledger = 0}, {.uuid = "GPU-1", .ledger = 1}};
static _Atomic long long charged[2];
static _Atomic int imports;
static bool poor;
static uint32_t sequence;
static struct cached_limits limits = {.control = CONTROL_ON, .sequence_at = &sequence};
static struct process_state state = {.started = true, .limits = &limits};
_Atomic(struct process_state *) vgpu_process = &state;
_Atomic(struct cached_limits *) vgpu_cached_limits = &limits;
_Atomic uint32_t vgpu_pools_dirty;
struct counters vgpu_counters[VGPU_MAX_DEVICES];
void *vgpu_real[FUNCTION_COUNT];

enum control vgpu_enter_again(void) { return CONTROL_ON; }
bool driver_ready(void) { return true; }
void flight_wait(struct counters *counters) { (void)counters; }
void flight_moved(int device) { (void)device; }
bool limits_denied(void) { return false; }
CUresult memory_broken(void) { return CUDA_ERROR_NOT_PERMITTED; }
void memory_refused(const struct device *device, CUresult status) { (void)device, (void)status; }
CUresult memory_meet(void) { return CUDA_SUCCESS; }
CUresult memory_refuse(const char *what) { (void)what; return CUDA_ERROR_NOT_SUPPORTED; }
const struct device *device_of(CUdevice ordinal, CUresult *status) { *status = CUDA_SUCCESS; return &devices[ordinal]; }
bool location_on_card(const CUmemLocation *location, CUdevice *ordinal)
{
    *ordinal = location->id;
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE;
}
const struct device *device_at(const CUmemLocation *location, CUresult *status) { return device_of(location->id, status); }
bool host_memory_physical_wanted(const struct device *device, const CUmemAllocationProp *properties, uint64_t bytes)
{
    (void)device;
    (void)properties;
    (void)bytes;
    return false;
}
CUresult host_memory_create(const struct device *device, CUmemGenericAllocationHandle *handle, uint64_t bytes,
                            const CUmemAllocationProp *properties)
{
    (void)device;
    (void)handle;
    (void)bytes;
    (void)properties;
    return CUDA_ERROR_OUT_OF_MEMORY;
}
void host_memory_freed(int device, uint64_t bytes) { (void)device; (void)bytes; }
CUresult memory_charge(const struct device *device, enum account account, uint64_t bytes)
{
    (void)account;
    charged[device->ledger] += (long long)bytes;
    return CUDA_SUCCESS;
}
void ledger_uncharge(int device, enum account account, uint64_t bytes)
{
    (void)account;
    charged[device] -= (long long)bytes;
}
void ledger_export(int device, uint64_t bytes, bool more) { (void)device; (void)bytes; (void)more; }
bool ledger_join(void) { return true; }
void *ledger_import(uint64_t byte) { (void)byte; imports++; return &imports; }
void ledger_import_end(void *import) { imports -= import != NULL; }
bool ledger_import_open(uint64_t byte) { (void)byte; return false; }
uint64_t shareable_import_byte(uint64_t object) { return object; }
bool shareable_mark(int descriptor, uint64_t *object) { (void)descriptor; *object = 1; return true; }
bool shareable_open(uint64_t object) { (void)object; return false; }
void shareable_unmarked(void) {}
void shareable_release(const uint64_t bytes[VGPU_MAX_DEVICES]) { (void)bytes; }
enum shareable_origin shareable_origin(int descriptor, uint64_t *object)
{
    (void)descriptor;
    *object = 1;
    return SHAREABLE_OURS;
}

bool __real_block_put(struct block_map *map, const struct block *block);
bool __wrap_block_put(struct block_map *map, const struct block *block)
{
    return !poor && __real_block_put(map, block);
}

/* --- the driver ------------------------------------------------------------------------------------------------ */

#define OBJECTS 64
#define SLOT (4 * MIB)
#define SPACE 0x100000000ull

static pthread_mutex_t driver_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
    int handles, mappings, device;
} objects[OBJECTS]; /* A handle's value is its index in this array plus 1. */
static int mapped[OBJECTS]; /* For each address range, the handle that is mapped there, or 0. */
static bool refuses;
static const char *slow = "";
static sem_t inside, released;

static void maybe_slow(const char *call, int device)
{
    struct timespec until;
    if (device != 0 || strcmp(call, slow) != 0)
        return;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 20;
    sem_post(&inside);
    if (sem_timedwait(&released, &until) != 0) {
        fprintf(stderr, "%s blocked on GPU 0, and GPU 1 could not be used meanwhile\n", call);
        exit(1);
    }
}

static CUresult driver_create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                              unsigned long long flags)
{
    (void)bytes;
    (void)flags;
    maybe_slow("create", properties->location.id);
    pthread_mutex_lock(&driver_mutex);
    int i = 0;
    while (i < OBJECTS && (objects[i].handles || objects[i].mappings))
        i++;
    CHECK(i < OBJECTS);
    objects[i].handles = 1;
    objects[i].device = properties->location.id;
    pthread_mutex_unlock(&driver_mutex);
    *handle = (CUmemGenericAllocationHandle)i + 1;
    return CUDA_SUCCESS;
}

static CUresult driver_release(CUmemGenericAllocationHandle handle)
{
    maybe_slow("release", objects[handle - 1].device);
    if (refuses)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver_mutex);
    CHECK(objects[handle - 1].handles > 0);
    objects[handle - 1].handles--;
    pthread_mutex_unlock(&driver_mutex);
    return CUDA_SUCCESS;
}

static int slot_of(CUdeviceptr pointer)
{
    return (int)((pointer - SPACE) / SLOT);
}

static CUresult driver_map(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                           unsigned long long flags)
{
    (void)bytes;
    (void)offset;
    (void)flags;
    maybe_slow("map", objects[handle - 1].device);
    pthread_mutex_lock(&driver_mutex);
    CHECK(!mapped[slot_of(pointer)] && objects[handle - 1].handles > 0);
    mapped[slot_of(pointer)] = (int)handle;
    objects[handle - 1].mappings++;
    pthread_mutex_unlock(&driver_mutex);
    return CUDA_SUCCESS;
}

static CUresult driver_unmap(CUdeviceptr pointer, size_t bytes)
{
    maybe_slow("unmap", objects[mapped[slot_of(pointer)] - 1].device);
    if (refuses)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver_mutex);
    for (int slot = slot_of(pointer); slot < slot_of(pointer + bytes); slot++) {
        CHECK(mapped[slot]);
        objects[mapped[slot] - 1].mappings--;
        mapped[slot] = 0;
    }
    pthread_mutex_unlock(&driver_mutex);
    return CUDA_SUCCESS;
}

static CUresult driver_retain(CUmemGenericAllocationHandle *handle, void *address)
{
    int found = mapped[slot_of((CUdeviceptr)(uintptr_t)address)];
    maybe_slow("retain", objects[found - 1].device);
    pthread_mutex_lock(&driver_mutex);
    objects[found - 1].handles++;
    pthread_mutex_unlock(&driver_mutex);
    *handle = (CUmemGenericAllocationHandle)found;
    return CUDA_SUCCESS;
}

static CUresult driver_export(void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags)
{
    (void)type;
    (void)flags;
    maybe_slow("export", objects[handle - 1].device);
    *(int *)shareable = 99;
    return CUDA_SUCCESS;
}

static CUresult driver_import(CUmemGenericAllocationHandle *handle, void *shareable, int type)
{
    (void)shareable;
    (void)type;
    static const CUmemAllocationProp there = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    maybe_slow("import", 0);
    return driver_create(handle, 2 * MIB, &there, 0);
}

static CUresult driver_bind(CUmemGenericAllocationHandle object, size_t place, CUmemGenericAllocationHandle memory,
                            size_t offset, size_t bytes, unsigned long long flags)
{
    (void)object;
    (void)place;
    (void)memory;
    (void)offset;
    (void)bytes;
    (void)flags;
    maybe_slow("bind", objects[memory - 1].device);
    return CUDA_SUCCESS;
}

static int live(void)
{
    int count = 0;
    for (int i = 0; i < OBJECTS; i++)
        count += objects[i].handles + objects[i].mappings;
    return count;
}

/* --- the programs --------------------------------------------------------------------------------------------- */

static CUmemGenericAllocationHandle create(int device, CUresult expected)
{
    CUmemAllocationProp properties = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    CUmemGenericAllocationHandle handle = 0;
    CHECK(cuMemCreate(&handle, SLOT, &properties, 0) == expected);
    return handle;
}

static void *address(int slot)
{
    return (void *)(uintptr_t)(SPACE + (uint64_t)slot * SLOT);
}

static CUdeviceptr at(int slot)
{
    return (CUdeviceptr)(uintptr_t)address(slot);
}

static CUmemGenericAllocationHandle first;

/* Makes `call` on GPU 0 with the memory `first`, which is mapped in slot 0. The call must return `answer`. */
static void use(const char *call, CUresult answer)
{
    CUmemGenericAllocationHandle handle = 0;
    int descriptor;
    if (strcmp(call, "create") == 0) {
        handle = create(0, answer);
    } else if (strcmp(call, "release") == 0) {
        CHECK(cuMemRelease(first) == answer);
    } else if (strcmp(call, "map") == 0) {
        CHECK(cuMemMap(at(1), SLOT, 0, first, 0) == answer);
    } else if (strcmp(call, "unmap") == 0) {
        CHECK(cuMemUnmap(at(0), SLOT) == answer);
    } else if (strcmp(call, "retain") == 0) {
        CHECK(cuMemRetainAllocationHandle(&handle, address(0)) == answer);
    } else if (strcmp(call, "export") == 0) {
        CHECK(cuMemExportToShareableHandle(&descriptor, first, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == answer);
    } else if (strcmp(call, "import") == 0) {
        CHECK(cuMemImportFromShareableHandle(&handle, (void *)99, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == answer);
    } else {
        CHECK(strcmp(call, "bind") == 0);
        CHECK(cuMulticastBindMem(7, 0, first, 0, SLOT, 0) == answer);
    }
}

static void *use_slowly(void *call)
{
    use(call, CUDA_SUCCESS);
    return NULL;
}

static void order(char *call)
{
    pthread_t thread;
    first = create(0, CUDA_SUCCESS);
    CHECK(cuMemMap(at(0), SLOT, 0, first, 0) == CUDA_SUCCESS);
    slow = call;
    CHECK(pthread_create(&thread, NULL, use_slowly, call) == 0);
    sem_wait(&inside);
    CUmemGenericAllocationHandle other = create(1, CUDA_SUCCESS), again;
    CHECK(cuMemMap(at(9), SLOT, 0, other, 0) == CUDA_SUCCESS);
    CHECK(cuMemRetainAllocationHandle(&again, address(9)) == CUDA_SUCCESS && again == other);
    CHECK(cuMemRelease(other) == CUDA_SUCCESS && cuMemRelease(again) == CUDA_SUCCESS);
    CHECK(charged[1] == SLOT);
    CHECK(cuMemUnmap(at(9), SLOT) == CUDA_SUCCESS && charged[1] == 0);
    sem_post(&released);
    pthread_join(thread, NULL);
}

static void no_host_memory(const char *call)
{
    first = create(0, CUDA_SUCCESS);
    CHECK(cuMemMap(at(0), SLOT, 0, first, 0) == CUDA_SUCCESS);
    int before = live();
    poor = true;
    use(call, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(live() == before && charged[0] == SLOT && imports == 0);
    poor = false;
    CHECK(cuMemUnmap(at(0), SLOT) == CUDA_SUCCESS && cuMemRelease(first) == CUDA_SUCCESS);
    CHECK(live() == 0 && charged[0] == 0);
}

static void fail(void)
{
    first = create(0, CUDA_SUCCESS);
    CHECK(cuMemMap(at(0), SLOT, 0, first, 0) == CUDA_SUCCESS);
    refuses = true;
    use("release", CUDA_ERROR_INVALID_VALUE);
    use("unmap", CUDA_ERROR_INVALID_VALUE);
    refuses = false;
    CHECK(charged[0] == SLOT);
    use("release", CUDA_SUCCESS);
    CHECK(charged[0] == SLOT);
    use("unmap", CUDA_SUCCESS);
    CHECK(charged[0] == 0 && live() == 0);
}

static void *worker(void *number)
{
    int own = (int)(intptr_t)number;
    for (int i = 0; i < 20000; i++) {
        CUmemGenericAllocationHandle handle = create(own % 2, CUDA_SUCCESS), again;
        CHECK(cuMemMap(at(own), SLOT, 0, handle, 0) == CUDA_SUCCESS);
        if (i % 2)
            CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
        CHECK(cuMemRetainAllocationHandle(&again, address(own)) == CUDA_SUCCESS);
        CHECK(charged[own % 2] >= (long long)SLOT);
        CHECK(cuMemUnmap(at(own), SLOT) == CUDA_SUCCESS);
        CHECK(cuMemRelease(again) == CUDA_SUCCESS);
        if (i % 2 == 0)
            CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
    }
    return NULL;
}

static void stress(void)
{
    pthread_t threads[8];
    for (int i = 0; i < 8; i++)
        CHECK(pthread_create(&threads[i], NULL, worker, (void *)(intptr_t)i) == 0);
    for (int i = 0; i < 8; i++)
        pthread_join(threads[i], NULL);
    CHECK(live() == 0 && charged[0] == 0 && charged[1] == 0);
}

int main(int count, char **words)
{
    vgpu_real[F_cuMemCreate] = driver_create;
    vgpu_real[F_cuMemRelease] = driver_release;
    vgpu_real[F_cuMemMap] = driver_map;
    vgpu_real[F_cuMemUnmap] = driver_unmap;
    vgpu_real[F_cuMemRetainAllocationHandle] = driver_retain;
    vgpu_real[F_cuMemExportToShareableHandle] = driver_export;
    vgpu_real[F_cuMemImportFromShareableHandle] = driver_import;
    vgpu_real[F_cuMulticastBindMem] = driver_bind;
    sem_init(&inside, 0, 0);
    sem_init(&released, 0, 0);
    CHECK(count >= 2);
    if (strcmp(words[1], "order") == 0)
        order(words[2]);
    else if (strcmp(words[1], "poor") == 0)
        no_host_memory(words[2]);
    else if (strcmp(words[1], "stress") == 0)
        stress();
    else
        fail();
    return 0;
}
